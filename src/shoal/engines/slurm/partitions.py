"""Slurm's partitions and associations: which of them a job may use, and where it goes. Pure.

A node may be in several partitions. A job goes to the first that holds all its nodes and accepts it, in one
order for all: that of `--partition`, or else Slurm's default first, then those of a higher tier, then
larger ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

import msgspec

from shoal.errors import EngineRefused, EngineUnreachable, SpecError
from shoal.wire import TaskResources, TaskSpec


class Association(msgspec.Struct, frozen=True, kw_only=True):
    account: str
    is_default: bool = False
    """The account that Slurm charges if none is named."""
    partition: str = ""
    """In that partition alone; empty: in all."""
    qos: tuple[str, ...] = ()
    default_qos: str = ""


def parse_choice(option: str, text: str) -> tuple[str, dict[str, str]]:
    """`NAME` for all jobs, `PROJECT=NAME` for those of one: separated by commas, in any order."""
    parts = [part.partition("=") for part in text.split(",") if part]
    for_all = [name for name, mark, _ in parts if not mark]
    if len(for_all) > 1 or any(mark and not (project and name) for project, mark, name in parts):
        raise SpecError(
            f"`{option} {text}` is not one NAME for all and PROJECT=NAME for single projects",
            hint=f"`{option} NAME`, or `{option} NAME,PROJECT=NAME`",
        )
    return (for_all or [""])[0], {project: name for project, mark, name in parts if mark}


def refuse_unknown_associations(
    associations: Collection[Association], accounts: Iterable[str], qos: Iterable[str]
) -> None:
    """Raise `SpecError` for accounts and QOS that the user may not use.

    Without associations, only Slurm knows them.
    """
    if not associations:
        return
    names = {association.account for association in associations}
    _refuse("--account", "account", [name for name in accounts if name not in names], names)
    offered = {name for association in associations for name in association.qos}
    if offered:
        _refuse("--qos", "QOS", [name for name in qos if name not in offered], offered)


def _refuse(option: str, kind: str, unknown: list[str], choices: Collection[str]) -> None:
    if not unknown:
        return
    near = get_close_matches(unknown[0], choices, n=1)
    raise SpecError(
        f"Slurm lets you use no {kind} `{unknown[0]}`; there is {', '.join(sorted(choices))}",
        hint=f"did you mean `{option} {near[0]}`?" if near else f"leave `{option}` out, or name one of these",
        choices=sorted(choices),
    )


UNLIMITED = "UNLIMITED"
LABEL = "partition."
"""Prefix of a node's label for each of its partitions."""
TIME_MARGIN_S = 120.0
"""How much later Slurm's limit comes than ours, so that the supervisor stops the job, with its grace and a
reason."""


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition. What a transport does not show has its default."""

    name: str
    state: str = "UP"
    is_default: bool = False
    tier: int = 1
    """Slurm serves higher tiers first, and may take nodes from lower ones for them."""
    min_nodes: int = 0
    max_nodes: int | None = None
    max_minutes: int | None = None
    has_default_time: bool = False
    """A job without a time limit gets less than the longest."""
    is_hidden: bool = False
    is_root_only: bool = False
    needs_reservation: bool = False
    groups: tuple[str, ...] = ()
    """Only members of these groups may use it; empty: all. Accounts and QOS likewise."""
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    denied_qos: tuple[str, ...] = ()

    @property
    def is_up(self) -> bool:
        return self.state == "UP"


class PartitionRights(msgspec.Struct, frozen=True, kw_only=True):
    """The known facts that decide which partitions a job may use. Empty: unknown."""

    is_root: bool = False
    groups: frozenset[str] = frozenset()
    account: str = ""
    qos: str = ""


class UsablePartitions(msgspec.Struct, frozen=True, kw_only=True):
    """The partitions that jobs may go to, by preference, and why not to the others."""

    usable: tuple[Partition, ...] = ()
    excluded: dict[str, str] = {}
    """By name, in words."""

    def among(self, names: Collection[str]) -> list[Partition]:
        """Return those of these names that are usable, by preference."""
        return [partition for partition in self.usable if partition.name in names]


ANY_PARTITION = Partition(name="")
NodesOf = Mapping[str, Collection[str]]
"""By node: the names of its partitions, usable or not."""


def find_usable(
    partitions: Iterable[Partition],
    nodes_of: NodesOf,
    only: tuple[str, ...],
    rights: Collection[PartitionRights],
) -> UsablePartitions:
    """Return the partitions that at least one of `rights` may use.

    `only`: these alone, in that order; empty: all. A partition that only nodes mention has default
    properties.
    """
    sizes = Counter(name for names in nodes_of.values() for name in names)
    all_partitions = {name: Partition(name=name) for name in sizes} | {
        partition.name: partition for partition in partitions
    }
    usable, excluded = [], dict[str, str]()
    for partition in all_partitions.values():
        if only and partition.name not in only:
            excluded[partition.name] = "not named by `--partition`"
            continue
        reasons = [
            exclusion_reason(partition, one_rights, is_named=partition.name in only) for one_rights in rights
        ]
        if reasons and all(reasons):
            excluded[partition.name] = reasons[0]
        else:
            usable.append(partition)

    def preference(partition: Partition) -> tuple[int, bool, int, int, str]:
        place = only.index(partition.name) if only else 0
        return place, not partition.is_default, -partition.tier, -sizes[partition.name], partition.name

    return UsablePartitions(
        usable=tuple(sorted(usable, key=preference)), excluded=dict(sorted(excluded.items()))
    )


def exclusion_reason(partition: Partition, rights: PartitionRights, *, is_named: bool = False) -> str:
    """Return why no job with these rights may go there, in words; empty: it may, when the partition is up."""
    if partition.is_hidden and not is_named:
        return f"hidden; `--partition {partition.name}` uses it"
    if partition.is_root_only and not rights.is_root:
        return "for root alone"
    if partition.needs_reservation:
        return "for jobs with a reservation alone"
    if partition.max_nodes == 0:
        return "takes no jobs (MaxNodes=0)"
    if (
        partition.groups
        and rights.groups
        and not rights.is_root
        and not rights.groups & set(partition.groups)
    ):
        return f"for groups {', '.join(partition.groups)} alone"
    for kind, name, allowed, denied in (
        ("account", rights.account, partition.accounts, partition.denied_accounts),
        ("qos", rights.qos, partition.qos, partition.denied_qos),
    ):
        if name and allowed and name not in allowed:
            return f"not for {kind} `{name}`, but for {', '.join(allowed)}"
        if name and not allowed and name in denied:
            return f"not for {kind} `{name}`"
    return ""


def refuse_unknown_partitions(named: Iterable[str], names: Collection[str]) -> None:
    """Raise `SpecError` for a named partition that Slurm does not have."""
    for name in named:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            meant = f"did you mean `{near[0]}`?" if near else "see them with `sinfo`"
            raise SpecError(
                f"Slurm has no partition `{name}`; there is {', '.join(sorted(names)) or 'none'}", hint=meant
            )


def time_argument(resources: TaskResources, partition: Partition) -> str:
    """Return the time a job requests there, in minutes; empty: the site's default.

    A job without a limit gets the longest time, a job with a limit a little more than that, and neither
    more than the partition allows.
    """
    if resources.time_limit_s is not None:
        minutes = math.ceil((resources.time_limit_s + resources.grace_s + TIME_MARGIN_S) / 60)
        return str(minutes if partition.max_minutes is None else min(minutes, partition.max_minutes))
    if not partition.has_default_time:
        return ""
    return UNLIMITED if partition.max_minutes is None else str(partition.max_minutes)


def shortened_time_limit(resources: TaskResources, partition: Partition) -> float | None:
    """Return how long a job with a limit may run if Slurm's own limit would come too soon after it; None:
    as it says.

    Slurm counts from before a supervisor exists, and an attempt that Slurm ends is lost and starts again.
    So our limit has to come first, each time. A short partition is not all margin: half of it is the job's.
    """
    if resources.time_limit_s is None or partition.max_minutes is None:
        return None
    granted_s, early_s = partition.max_minutes * 60.0, resources.grace_s + TIME_MARGIN_S
    if resources.time_limit_s + early_s <= granted_s:
        return None
    return granted_s - min(early_s, granted_s / 2)


def choose_partition(
    partitions: UsablePartitions, nodes_of: NodesOf, task_specs: tuple[TaskSpec, ...], rights: PartitionRights
) -> Partition:
    """Return the partition for a job on these nodes; one without a name means Slurm's default, if nothing
    is node_partitions.

    `EngineRefused`: no partition will ever accept it; the message says why. `EngineUnreachable`: none does
    now.
    """
    node_partitions = [
        set(nodes_of[task_spec.identity.node])
        for task_spec in task_specs
        if task_spec.identity.node in nodes_of
    ]
    if not any(node_partitions):
        return ANY_PARTITION
    together = partitions.among(set.intersection(*node_partitions))
    if not together:
        raise EngineRefused(
            _no_common_partition(partitions, nodes_of, task_specs), hint="set `topology: pool` in the job"
        )
    requested = _requested_partitions(task_specs[0].resources.require)
    fits = {partition.name: _misfit(partition, task_specs, rights, requested) for partition in together}
    fitting = [partition for partition in together if not fits[partition.name]]
    if not fitting:
        reasons = "; ".join(f"`{name}` {why}" for name, why in fits.items())
        raise EngineRefused(
            f"no partition of Slurm's takes job {task_specs[0].identity.job_number}: {reasons}",
            hint="see them with `sinfo`, and name one in the job: `require: {pool: NAME}`",
        )
    is_up = next((partition for partition in fitting if partition.is_up), None)
    if is_up is None:
        reasons = "; ".join(f"partition `{partition.name}` is {partition.state}" for partition in fitting)
        raise EngineUnreachable(f"Slurm takes no jobs there now: {reasons}", hint="`sinfo` shows them")
    return is_up


def requires_partition(require: Iterable[str]) -> bool:
    """Return whether labels that a job requires name a partition, so that all its nodes are in one."""
    return any(name == "pool" or name.startswith(LABEL) for name in require)


def _requested_partitions(require: Mapping[str, str]) -> set[str]:
    """Return the partitions that the job requests by name: as a pool, or by a label."""
    named = {name.removeprefix(LABEL) for name in require if name.startswith(LABEL)}
    return named or {value for name, value in require.items() if name == "pool"}


def _misfit(
    partition: Partition,
    task_specs: tuple[TaskSpec, ...],
    rights: PartitionRights,
    requested: Collection[str],
) -> str:
    time_limit_s, count = task_specs[0].resources.time_limit_s, len(task_specs)
    if requested and partition.name not in requested:
        return "is not the one that it asks for"
    if partition.max_nodes is not None and count > partition.max_nodes:
        return f"takes jobs of up to {partition.max_nodes} nodes, and it has {count}"
    if count < partition.min_nodes:
        return f"takes jobs from {partition.min_nodes} nodes on, and it has {count}"
    if partition.max_minutes is not None and (time_limit_s or 0) > partition.max_minutes * 60:
        return f"takes jobs of up to {partition.max_minutes} min, and its `time_limit` is longer"
    reason = exclusion_reason(partition, rights, is_named=True)
    return f"is {reason}" if reason else ""


def _no_common_partition(
    partitions: UsablePartitions, nodes_of: NodesOf, task_specs: tuple[TaskSpec, ...]
) -> str:
    names_of = {
        task_spec.identity.node: [
            partition.name for partition in partitions.among(nodes_of.get(task_spec.identity.node, ()))
        ]
        for task_spec in task_specs
    }
    places = (f"{node} in {', '.join(names) or 'none'}" for node, names in names_of.items())
    return (
        f"job {task_specs[0].identity.job_number} has nodes that no one partition holds, "
        "and Slurm runs no job in two: "
        f"{'; '.join(places)}"
    )
