"""What `shoal connect slurm` asks Slurm, refuses, and prints: users, partitions, accounts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from shoal.cli.cluster.report import counted
from shoal.cli.connect.checks import check_shared_on_cluster
from shoal.engines.slurm import partitions
from shoal.engines.slurm.config import SlurmConfig, usable_partitions
from shoal.engines.slurm.nodes import slurm_nodes
from shoal.engines.slurm.partitions import Association, Partition, UsablePartitions
from shoal.engines.slurm.rest import RestTransport
from shoal.engines.slurm.rest_request import renewal_hint
from shoal.engines.slurm.transport import SlurmTransport, open_transport
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.model.node import NodeFacts


MAX_LEFT_OUT_SHOWN = 8
"""At most this many unused partitions are printed: a site may have many for other users."""


class SlurmSurvey(NamedTuple):
    """What Slurm reported."""

    config: SlurmConfig
    version: str
    nodes: list[NodeFacts]
    parts: UsablePartitions
    associations: list[Association]
    has_cgroups: bool
    """Whether Slurm's report that a job is over can be evidence."""
    account: str
    """The Unix account of all jobs; "" if each job runs as its owner."""
    remark: str
    """A problem that is no reason to refuse, or ""."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "partitions": [self._partition_view(entry) for entry in self.parts.usable],
            "left_out": self.parts.excluded,
            "accounts": [msgspec.to_builtins(entry) for entry in self.associations],
        }

    def _partition_view(self, partition: Partition) -> dict[str, Any]:
        return {
            "name": partition.name,
            "state": partition.state,
            "is_default": partition.is_default,
            "nodes": sum(f"{partitions.LABEL}{partition.name}" in node.labels for node in self.nodes),
            "pool": sum(node.pool == partition.name for node in self.nodes),
            "max_minutes": partition.max_minutes,
            "max_nodes": partition.max_nodes,
        }


def charge_options(account: str, qos: str) -> dict[str, Any]:
    """Return the account and qos for the config."""
    own_account, accounts = partitions.parse_choice("--account", account)
    own_qos, project_qos = partitions.parse_choice("--qos", qos)
    return {"account": own_account, "accounts": accounts, "qos": own_qos, "project_qos": project_qos}


def survey_slurm(config: SlurmConfig, *, as_root: bool) -> SlurmSurvey:
    """Ask Slurm, and return its answers with the completed config. Raise `SpecError` if it cannot be used."""
    if config.ssh.rpartition("@")[2].startswith("-") or config.ssh.startswith("-"):
        raise SpecError(
            f"`--ssh {config.ssh}` is not a machine: it starts like an option",
            hint="write `--ssh USER@HOST`, and `--ssh-options='...'` for options of `ssh` itself",
        )
    door = open_transport(config)
    version, facts = door.version(), door.facts()
    if config.as_owners:
        _refuse_all_but_root(door, config, as_root=as_root)
    elif facts.is_root and (facts.refuses_root or not as_root):
        _refuse_root(config, can_be_root=not facts.refuses_root)
    remark = check_shared_on_cluster(door, config.shared, ssh=config.ssh, rest=config.rest)
    associations = door.associations()
    partitions.refuse_unknown_associations(
        associations,
        [name for name in (config.account, *config.accounts.values()) if name],
        [name for name in (config.qos, *config.project_qos.values()) if name],
    )
    default = next((entry.account for entry in associations if entry.is_default), "")
    raw, there = door.nodes(), door.partitions()
    config = msgspec.structs.replace(
        config, default_account=default, cluster=facts.cluster, heads=facts.heads
    )
    names = {entry.name for entry in there}.union(*(node.partitions for node in raw))
    partitions.refuse_unknown_partitions(config.partitions, names)
    parts = usable_partitions(config, facts, there, raw)
    nodes = [node.facts for node in slurm_nodes(raw, facts.switch_labels, parts)]
    if not nodes:
        where = f" in partition `{config.partition}`" if config.partition else ""
        left_out = "; ".join(f"partition `{name}` is left out: {why}" for name, why in parts.excluded.items())
        raise SpecError(
            f"Slurm has no nodes{where} that jobs could use{f': {left_out}' if left_out else ''}",
            hint="list its partitions with `sinfo`",
        )
    account = "" if config.as_owners else door.account_name()
    return SlurmSurvey(config, version, nodes, parts, associations, facts.has_cgroups, account, remark)


def print_survey(survey: SlurmSurvey, facts: dict[str, Any]) -> None:
    config = survey.config
    print(
        f"{survey.version}: {facts['alive']} of {facts['nodes']} nodes, {facts['cpus']:g} CPUs, "
        f"{facts['gpus']} GPUs"
    )
    for entry in facts["partitions"]:
        print(f"partition {partition_text(entry)}")
    left_out = [f"partition {name} left out: {why}" for name, why in survey.parts.excluded.items()]
    more = [f"{len(left_out) - MAX_LEFT_OUT_SHOWN} more partitions left out: see `--json`"]
    print(
        "".join(
            f"{line}\n"
            for line in left_out[:MAX_LEFT_OUT_SHOWN] + more * (len(left_out) > MAX_LEFT_OUT_SHOWN)
        ),
        end="",
    )
    if survey.associations:
        print(f"accounts you may use: {', '.join(account_text(entry) for entry in survey.associations)}")
    whose = "all projects" if config.has_shared_trust or config.as_owners else f"project {config.project}"
    account = f"the account `{survey.account}`" if survey.account else "the Unix accounts of their owners"
    print(f"nodes will connect to {facts['nodes_on']}, over TLS; jobs of {whose} run under {account}")
    if not survey.has_cgroups:
        print(
            "ProctrackType is not known to be proctrack/cgroup: what falls silent is replaced after its"
            " `fence`"
        )


def partition_text(partition: dict[str, Any]) -> str:
    """Return `main (default): 4 nodes, 3 of them in this pool, up to 1440 min`. A node is in one pool."""
    most = partition["max_minutes"]
    pool = (
        f", {partition['pool']} of them in this pool" if partition["pool"] else ", all of them in other pools"
    )
    pool = pool if partition["pool"] != partition["nodes"] else ""
    limit = f", up to {most} min" if most is not None else ""
    state = f", now {partition['state']}" if partition["state"] != "UP" else ""
    name, nodes = (
        f"{partition['name']}{' (default)' if partition['is_default'] else ''}",
        counted(partition["nodes"], "node"),
    )
    return f"{name}: {nodes}{pool}{limit}{state}"


def account_text(association: Association) -> str:
    """Return `vision (default; in main; qos normal, high)`."""
    details = ["default"] if association.is_default else []
    details += [f"in {association.partition}"] if association.partition else []
    details += [f"qos {', '.join(association.qos)}"] if association.qos else []
    return f"{association.account} ({'; '.join(details)})" if details else association.account


def rest_options(rest: str, jwt_file: Path | None, user: str, ssh: str) -> dict[str, Any]:
    """Return the REST options for the config, with the server's identity. Raise `SpecError` if they clash."""
    if rest and ssh:
        raise SpecError(f"both `--rest {rest}` and `--ssh {ssh}`", hint="leave one of them out")
    if not rest:
        if jwt_file is not None or user:
            raise SpecError("`--jwt-file` without a server to send the token to", hint="add `--rest URL`")
        return {}
    if jwt_file is None:
        raise SpecError(f"no token for {rest}", hint=f"{renewal_hint('FILE')}, then `--jwt-file FILE`")
    file = str(jwt_file.absolute())
    uid = RestTransport(rest, file, user=user).served_by()
    return {"rest": rest, "jwt_file": file, "rest_user": user, "rest_uid": uid}


def _refuse_root(config: SlurmConfig, *, can_be_root: bool) -> NoReturn:
    whose = f"as {config.ssh}" if config.ssh else "by that token" if config.rest else "here"
    never = "" if can_be_root else ", and this Slurm runs no job of root's (DisableRootJobs=YES)"
    raise SpecError(
        f"all jobs would run as root, because root asks Slurm {whose}{never}",
        hint="be a user with an account on every node (`--ssh USER@HOST`); or, for people with accounts "
        f"there, `--as-owners`{'; or add `--as-root`' if can_be_root else ''}",
    )


def _refuse_all_but_root(transport: SlurmTransport, config: SlurmConfig, *, as_root: bool) -> None:
    if as_root:
        raise SpecError("jobs run under their owners' accounts or all as root, not both", hint="drop one")
    if config.rest:
        raise SpecError(
            "by REST, jobs run as the token's user, not as their owners",
            hint="leave out `--rest`, or `--as-owners`",
        )
    if not transport.is_root():
        raise SpecError(
            f"only root may submit for others, and {config.ssh or 'the user asking Slurm here'} is not root",
            hint="run `shoal connect slurm` and `shoal up` as root, or `--ssh root@LOGIN_NODE`",
        )
