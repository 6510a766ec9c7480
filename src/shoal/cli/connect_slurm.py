"""What `shoal connect slurm` asks Slurm, refuses, and says: who we are there, partitions, accounts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from shoal.cli.cluster_words import counted
from shoal.cli.connect_places import refuse_missing_at
from shoal.engines.slurm import associations, partitions
from shoal.engines.slurm.associations import Association
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.door import Door, open_door
from shoal.engines.slurm.nodes import slurm_nodes
from shoal.engines.slurm.partitions import Partition, Parts
from shoal.engines.slurm.rest import RestDoor
from shoal.engines.slurm.rest_place import renewal
from shoal.engines.slurm.rights import parts_of
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.model.node import NodeFacts


MOST_TOLD = 8
"""Of partitions that are not used: a site may have many that are for others."""


class Found(NamedTuple):
    """What Slurm told."""

    config: SlurmConfig
    version: str
    nodes: list[NodeFacts]
    parts: Parts
    associations: list[Association]
    has_cgroups: bool
    """Whether its word that a job is over can be evidence."""
    account: str
    """The Unix account of all jobs; empty: each job's owner's."""
    remark: str
    """What is amiss and no reason to refuse; empty: nothing."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "partitions": [self._shown(one) for one in self.parts.usable],
            "left_out": self.parts.left_out,
            "accounts": [msgspec.to_builtins(one) for one in self.associations],
        }

    def _shown(self, one: Partition) -> dict[str, Any]:
        return {
            "name": one.name,
            "state": one.state,
            "is_default": one.is_default,
            "nodes": sum(f"{partitions.LABEL}{one.name}" in node.labels for node in self.nodes),
            "pool": sum(node.pool == one.name for node in self.nodes),
            "max_minutes": one.max_minutes,
            "max_nodes": one.max_nodes,
        }


def choices(account: str, qos: str) -> dict[str, Any]:
    """For the config."""
    own_account, accounts = associations.read_choice("--account", account)
    own_qos, project_qos = associations.read_choice("--qos", qos)
    return {"account": own_account, "accounts": accounts, "qos": own_qos, "project_qos": project_qos}


def ask_slurm(config: SlurmConfig, *, as_root: bool) -> Found:
    """`SpecError`: it cannot be used so. The config comes back with what is to be remembered."""
    if config.ssh.rpartition("@")[2].startswith("-") or config.ssh.startswith("-"):
        raise SpecError(
            f"`--ssh {config.ssh}` is no machine: it begins as an option does",
            hint="say `--ssh USER@HOST`, and `--ssh-options='...'` for words to `ssh` itself",
        )
    door = open_door(config)
    version, facts = door.version(), door.facts()
    if config.as_owners:
        _refuse_all_but_root(door, config, as_root=as_root)
    elif facts.is_root and (facts.refuses_root or not as_root):
        _refuse_root(config, can_be_root=not facts.refuses_root)
    remark = refuse_missing_at(door, config.shared, ssh=config.ssh, rest=config.rest)
    known = door.associations()
    associations.refuse_unknown(
        known,
        [name for name in (config.account, *config.accounts.values()) if name],
        [name for name in (config.qos, *config.project_qos.values()) if name],
    )
    default = next((one.account for one in known if one.is_default), "")
    raw, there = door.nodes(), door.partitions()
    config = msgspec.structs.replace(
        config, default_account=default, cluster=facts.cluster, heads=facts.heads
    )
    names = {one.name for one in there}.union(*(node.partitions for node in raw))
    partitions.refuse_unknown(config.partitions, names)
    parts = parts_of(config, facts, there, raw)
    nodes = [node.facts for node in slurm_nodes(raw, facts.places, parts)]
    if not nodes:
        where = f" in partition `{config.partition}`" if config.partition else ""
        told = "; ".join(f"partition `{name}` is left out: {why}" for name, why in parts.left_out.items())
        raise SpecError(
            f"Slurm has no nodes{where} that jobs could use{f': {told}' if told else ''}",
            hint="see its partitions with `sinfo`",
        )
    account = "" if config.as_owners else door.asker()
    return Found(config, version, nodes, parts, known, facts.has_cgroups, account, remark)


def say_slurm(found: Found, facts: dict[str, Any]) -> None:
    config = found.config
    print(
        f"{found.version}: {facts['alive']} of {facts['nodes']} nodes, {facts['cpus']:g} CPUs, "
        f"{facts['gpus']} GPUs"
    )
    for one in facts["partitions"]:
        print(f"partition {told_partition(one)}")
    left_out = [f"partition {name} left out: {why}" for name, why in found.parts.left_out.items()]
    more = [f"{len(left_out) - MOST_TOLD} more partitions left out: see `--json`"]
    print("".join(f"{line}\n" for line in left_out[:MOST_TOLD] + more * (len(left_out) > MOST_TOLD)), end="")
    if found.associations:
        print(f"accounts you may use: {', '.join(told_account(one) for one in found.associations)}")
    whose = "all projects" if config.has_shared_trust or config.as_owners else f"project {config.project}"
    account = f"the account `{found.account}`" if found.account else "the Unix accounts of their owners"
    print(f"nodes will ask at {facts['nodes_on']}, over TLS; jobs of {whose} run under {account}")
    if not found.has_cgroups:
        print(
            "ProctrackType is not known to be proctrack/cgroup: what falls silent is replaced after its"
            " `fence`"
        )


def told_partition(one: dict[str, Any]) -> str:
    """`main (default): 4 nodes, 3 of them in this pool, up to 1440 min`. A node is in one pool alone."""
    most = one["max_minutes"]
    pool = f", {one['pool']} of them in this pool" if one["pool"] else ", all of them in other pools"
    pool = pool if one["pool"] != one["nodes"] else ""
    limit = f", up to {most} min" if most is not None else ""
    state = f", now {one['state']}" if one["state"] != "UP" else ""
    name, nodes = f"{one['name']}{' (default)' if one['is_default'] else ''}", counted(one["nodes"], "node")
    return f"{name}: {nodes}{pool}{limit}{state}"


def told_account(one: Association) -> str:
    """`vision (default; in main; qos normal, high)`."""
    words = ["default"] if one.is_default else []
    words += [f"in {one.partition}"] if one.partition else []
    words += [f"qos {', '.join(one.qos)}"] if one.qos else []
    return f"{one.account} ({'; '.join(words)})" if words else one.account


def rest_options(rest: str, jwt_file: Path | None, user: str, ssh: str) -> dict[str, Any]:
    """For the config; who listens there now is written down. `SpecError`: what does not belong together."""
    if rest and ssh:
        raise SpecError(f"both `--rest {rest}` and `--ssh {ssh}`", hint="leave one of them out")
    if not rest:
        if jwt_file is not None or user:
            raise SpecError("a token and nobody to show it to", hint="add `--rest URL`")
        return {}
    if jwt_file is None:
        raise SpecError(f"no token for {rest}", hint=f"{renewal('FILE')}, then `--jwt-file FILE`")
    file = str(jwt_file.absolute())
    uid = RestDoor(rest, file, user=user).served_by()
    return {"rest": rest, "jwt_file": file, "rest_user": user, "rest_uid": uid}


def _refuse_root(config: SlurmConfig, *, can_be_root: bool) -> NoReturn:
    whose = f"as {config.ssh}" if config.ssh else "by that token" if config.rest else "here"
    never = "" if can_be_root else ", and this Slurm runs no job of root's (DisableRootJobs=YES)"
    raise SpecError(
        f"all jobs would run as root: that is who asks Slurm {whose}{never}",
        hint="be a user with an account on every node (`--ssh USER@HOST`); or, for people with accounts "
        f"there, `--as-owners`{'; or say `--as-root`' if can_be_root else ''}",
    )


def _refuse_all_but_root(door: Door, config: SlurmConfig, *, as_root: bool) -> None:
    if as_root:
        raise SpecError("jobs run under their owners' accounts or all as root, not both", hint="drop one")
    if config.rest:
        raise SpecError(
            "by REST jobs are those of the token's user, not of their owners",
            hint="leave out `--rest`, or `--as-owners`",
        )
    if not door.is_root():
        raise SpecError(
            f"only root may submit for others, and {config.ssh or 'who asks Slurm here'} is not root",
            hint="run `shoal connect slurm` and `shoal up` as root, or `--ssh root@LOGIN_NODE`",
        )
