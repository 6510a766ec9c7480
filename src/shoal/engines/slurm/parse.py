"""Parses the output of Slurm's commands. Pure; unknown fields are ignored.

It does not use their `--json`, which `scontrol` does not have in 22.05 and whose fields differ in 24.11:
see docs/decisions/0027-slurms-words-and-not-its-json.md.
"""

from __future__ import annotations

import calendar
import re
import time
from itertools import product

import msgspec

from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.partitions import Association, Partition
from shoal.engines.slurm.states import SlurmJob

SQUEUE_FORMAT = "%i|%T|%u|%S|%j|%r"
"""Fields that a job's user cannot choose stand before those that the user can."""
SACCT_FORMAT = "JobIDRaw,State,User,JobName"
ASSOC_FORMAT = "DefaultAccount,Account,Partition,DefaultQOS,QOS"
LEVELS = ("rack", "fabric", "zone")
"""What the levels of Slurm's switch tree mean to us, from the leaves up; higher levels are ignored."""
DEFAULT_KILL_WAIT_S = 30.0
FREE_TEXT_FIELDS = frozenset({"Reason", "Comment", "Extra"})
"""Fields with free text, which stand after all others."""
_FIELD = re.compile(r"(?:^| )([A-Za-z_]+)=")
_RANGE = re.compile(r"\[([0-9,-]+)\]")


class SlurmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm's configuration, as far as a transport shows it: what its reports are worth, and more."""

    kill_wait_s: float = DEFAULT_KILL_WAIT_S
    """From SIGTERM to SIGKILL of a job that ends."""
    has_cgroups: bool = False
    """Whether it ends all processes of a job by its control group, whatever process forked them."""
    switch_labels: dict[str, dict[str, str]] = {}
    """The switches above each node, as labels; empty if there is no tree."""
    is_root: bool = False
    """Slurm's commands and our jobs run as root."""
    groups: frozenset[str] = frozenset()
    """Groups of the user whose the jobs are; empty: unknown."""
    refuses_root: bool = False
    """Whether it runs no job of root's (DisableRootJobs)."""
    cluster: str = ""
    """Its ClusterName; empty: the transport does not show it."""
    can_bind: bool = True
    """Whether it binds tasks to CPUs (task/affinity), or may."""
    heads: tuple[str, ...] = ()
    """The machines that its slurmctld may be on."""


def parse_jobs(text: str) -> list[SlurmJob]:
    """Parse lines of `squeue` in `SQUEUE_FORMAT`."""
    jobs = []
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) == 6:
            job_id, state, user, start, name, reason = parts
            jobs.append(
                SlurmJob(job_id=job_id, state=state, name=name, user=user, start=start, reason=reason)
            )
    return jobs


def parse_accounting(text: str) -> list[SlurmJob]:
    """Parse lines of `sacct` in `SACCT_FORMAT`, which names the user who cancelled a job after the state."""
    jobs = []
    for line in text.splitlines():
        parts = line.split("|", 3)
        if len(parts) == 4 and parts[1]:
            job_id, state, user, name = parts
            jobs.append(SlurmJob(job_id=job_id, state=state.split()[0], name=name, user=user, is_past=True))
    return jobs


def parse_nodes(text: str) -> list[RawNode]:
    """Parse lines of `scontrol show node -o`."""
    lines = [_fields(line) for line in text.splitlines()]
    return [_node_if_readable(fields) for fields in lines if "NodeName" in fields]


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """Return the switches above each node, from `scontrol show topology -o`; empty if there is no tree."""
    places: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        fields = _fields(line)
        level = fields.get("Level", "")
        if level.isdigit() and int(level) < len(LEVELS):
            for node in expand_hostlist(fields.get("Nodes", "")):
                places.setdefault(node, {}).setdefault(LEVELS[int(level)], fields["SwitchName"])
    return places


def parse_config(text: str) -> SlurmFacts:
    """Parse lines `Name = value` of `scontrol show config`."""
    settings = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, flags=re.MULTILINE))
    wait = re.match(r"[0-9]+", settings.get("KillWait", ""))
    return SlurmFacts(
        kill_wait_s=float(wait[0]) if wait else DEFAULT_KILL_WAIT_S,
        has_cgroups=settings.get("ProctrackType") == "proctrack/cgroup",
        refuses_root=settings.get("DisableRootJobs", "").lower() == "yes",
        can_bind="affinity" in settings.get("TaskPlugin", "affinity"),
        cluster=settings.get("ClusterName", ""),
        heads=tuple(re.findall(r"^SlurmctldHost\[[0-9]+\]\s*=\s*([^\s(]+)", text, flags=re.MULTILINE)),
    )


def parse_partitions(text: str) -> list[Partition]:
    """Parse lines of `scontrol show partition -o`."""
    lines = [_fields(line) for line in text.splitlines()]
    return [_partition(fields) for fields in lines if "PartitionName" in fields]


def parse_associations(text: str) -> list[Association]:
    """Parse lines of `sacctmgr --parsable2` in `ASSOC_FORMAT`."""
    associations = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 5 and parts[1]:
            default, account, partition, default_qos, qos = parts
            associations.append(
                Association(
                    account=account,
                    is_default=account == default,
                    partition=partition,
                    qos=_listed(qos),
                    default_qos=default_qos,
                )
            )
    return associations


def expand_hostlist(names: str) -> list[str]:
    """Expand `n[0-2,5],m1` to single names, with leading zeros kept."""
    expanded = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", names):
        pieces = _RANGE.split(part)
        choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        expanded += ["".join(choice) for choice in product(*choices)]
    return expanded


def _numbers(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return numbers


def _fields(line: str) -> dict[str, str]:
    """Parse `Name=value Name=value`, where a value may hold spaces; empty if a line has no field.

    Free text comes last: nothing in it is a field, and nothing replaces another field.
    """
    places = list(_FIELD.finditer(line))
    first = next((index for index, place in enumerate(places) if place[1] in FREE_TEXT_FIELDS), len(places))
    places = [place for index, place in enumerate(places) if index < first or place[1] in FREE_TEXT_FIELDS]
    ends = [place.start() for place in places[1:]] + [len(line)] if places else []
    fields: dict[str, str] = {}
    for place, end in zip(places, ends, strict=True):
        fields.setdefault(place[1], line[place.end() : end].strip())
    return fields


def _node_if_readable(fields: dict[str, str]) -> RawNode:
    """Parse a node. One that cannot be parsed takes no work and says why; the others are not affected."""
    try:
        return _node(fields)
    except ValueError as error:
        return RawNode(
            name=fields["NodeName"],
            address=fields["NodeName"],
            states=frozenset({"ERROR"}),
            reason=f"(what cannot be read: {error})",
            partitions=_listed(fields.get("Partitions", "")),
        )


def _node(fields: dict[str, str]) -> RawNode:
    return RawNode(
        name=fields["NodeName"],
        address=fields.get("NodeAddr", fields["NodeName"]),
        states=frozenset(fields.get("State", "").replace("*", "+NOT_RESPONDING").split("+")),
        reason=_unless_null(fields.get("Reason", "")),
        features=_listed(fields.get("ActiveFeatures", "")),
        partitions=_listed(fields.get("Partitions", "")),
        cpus=float(fields.get("CPUEfctv") or fields.get("CPUTot") or 1),
        memory_mb=max(int(fields.get("RealMemory", "1")) - _number(fields.get("MemSpecLimit", ""), 0), 1),
        disk_mb=int(fields.get("TmpDisk", "0")),
        gres=_unless_null(fields.get("Gres", "")),
        booted_at=_moment(fields.get("BootTime", "")),
        slurmd_at=_moment(fields.get("SlurmdStartTime", "")),
    )


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isdigit() else otherwise


def _partition(fields: dict[str, str]) -> Partition:
    max_nodes = fields.get("MaxNodes", "")
    return Partition(
        name=fields["PartitionName"],
        state=fields.get("State", "UP"),
        is_default=fields.get("Default") == "YES",
        tier=_number(fields.get("PriorityTier", ""), 1),
        min_nodes=_number(fields.get("MinNodes", ""), 0),
        max_nodes=int(max_nodes) if max_nodes.isdigit() else None,
        max_minutes=parse_minutes(fields.get("MaxTime", "")),
        has_default_time=fields.get("DefaultTime", "NONE") != "NONE",
        is_hidden=fields.get("Hidden") == "YES",
        is_root_only=fields.get("RootOnly") == "YES",
        needs_reservation=fields.get("ReqResv") == "YES",
        groups=_named(fields.get("AllowGroups", "")),
        accounts=_named(fields.get("AllowAccounts", "")),
        denied_accounts=_named(fields.get("DenyAccounts", "")),
        qos=_named(fields.get("AllowQos", "")),
        denied_qos=_named(fields.get("DenyQos", "")),
    )


def parse_minutes(text: str) -> int | None:
    """Parse `1-02:03:04`, `02:03:04` or `03:04`, rounded up to minutes; None: there is no limit."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (days and not days.isdigit()):
        return None
    seconds = sum(int(part) * unit for part, unit in zip(reversed(parts), (1, 60, 3600), strict=False))
    return int(days or 0) * 24 * 60 + -(-seconds // 60)


def _named(text: str) -> tuple[str, ...]:
    """Return the names; empty: all."""
    return () if text == "ALL" else _listed(text)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in _unless_null(text).split(",") if part)


def _unless_null(text: str) -> str:
    return "" if text == "(null)" else text


def _moment(text: str) -> float | None:
    """Parse a date of Slurm, which was asked in UTC; None if it is unknown."""
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
