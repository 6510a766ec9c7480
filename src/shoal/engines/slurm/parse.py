"""What Slurm's commands print, as values. Pure; unknown fields are passed over."""

from __future__ import annotations

import calendar
import re
import time
from itertools import product

import msgspec

from shoal.engines.slurm.states import Job
from shoal.model.node import Gpu, NodeFacts

SQUEUE_FORMAT = "%i|%T|%u|%S|%j|%r"
"""What a job's user cannot choose stands before what they can."""
DOWN = frozenset({"DOWN", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "ERROR"})
ASLEEP = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"})
"""Slurm wakes them for a job: they take work, and tell nothing."""
CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "MAINT", "RESERVED", "PLANNED_MAINT"})
DEFAULT_KILL_WAIT_S = 30.0
_GRES = re.compile(r"gpu(?::(?P<kind>[A-Za-z0-9_.-]+))?:(?P<count>[0-9]+)")
_FIELD = re.compile(r"(?:^| )([A-Za-z_]+)=")
_RANGE = re.compile(r"\[([0-9,-]+)\]")


class SlurmNode(msgspec.Struct, frozen=True, kw_only=True):
    facts: NodeFacts
    booted_at: float | None
    """Wall clock."""
    partitions: tuple[str, ...]
    answers: bool
    """Its slurmd does, whether or not the node takes work: one that is drained tells what runs there."""


class SlurmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What of its configuration decides what Slurm's word is worth."""

    kill_wait_s: float = DEFAULT_KILL_WAIT_S
    """From SIGTERM to SIGKILL of what is to end."""
    has_cgroups: bool = False
    """Whether it ends all that a job has started: by its control group, whoever forked what."""


def parse_jobs(text: str) -> list[Job]:
    """Lines of `squeue` in `SQUEUE_FORMAT`."""
    found = []
    for line in text.splitlines():
        parts = line.split("|", 5)
        if len(parts) == 6:
            job_id, state, user, start, name, reason = parts
            found.append(Job(job_id=job_id, state=state, name=name, user=user, start=start, reason=reason))
    return found


def parse_nodes(text: str, racks: dict[str, str], partition: str) -> list[SlurmNode]:
    """Lines of `scontrol show node -o`; of one partition, where one is named."""
    found = []
    for line in text.splitlines():
        fields = _fields(line)
        partitions = tuple(part for part in fields.get("Partitions", "").split(",") if part)
        if "NodeName" in fields and (not partition or partition in partitions):
            found.append(_node(fields, partitions, racks, partition))
    return found


def parse_topology(text: str) -> dict[str, str]:
    """The leaf switch of each node, from `scontrol show topology -o`; nothing where there is no tree."""
    racks = {}
    for line in text.splitlines():
        fields = _fields(line)
        if fields.get("Level") == "0":
            racks.update(dict.fromkeys(expand(fields.get("Nodes", "")), fields["SwitchName"]))
    return racks


def parse_config(text: str) -> SlurmFacts:
    """Lines `Name = value` of `scontrol show config`."""
    found = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, flags=re.MULTILINE))
    wait = re.match(r"[0-9]+", found.get("KillWait", ""))
    return SlurmFacts(
        kill_wait_s=float(wait[0]) if wait else DEFAULT_KILL_WAIT_S,
        has_cgroups=found.get("ProctrackType") == "proctrack/cgroup",
    )


def parse_partitions(text: str) -> dict[str, str]:
    """What a job without a limit has to ask for, by partition, from `scontrol show partition -o`: the longest
    there is, where Slurm would give it less by itself. The default one also as `""`.
    """
    longest = {}
    for line in text.splitlines():
        fields = _fields(line)
        if "PartitionName" in fields and fields.get("DefaultTime", "NONE") != "NONE":
            limit = fields.get("MaxTime", "UNLIMITED")
            longest[fields["PartitionName"]] = limit
            if fields.get("Default") == "YES":
                longest[""] = limit
    return longest


def expand(names: str) -> list[str]:
    """`n[0-2,5],m1` as single names, with leading zeros kept."""
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", names):
        pieces = _RANGE.split(part)
        choices = [_numbers(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        found += ["".join(choice) for choice in product(*choices)]
    return found


def _numbers(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found


def _fields(line: str) -> dict[str, str]:
    """`Name=value Name=value`, where a value may hold spaces."""
    places = list(_FIELD.finditer(line))
    ends = [place.start() for place in places[1:]] + [len(line)]
    return {p[1]: line[p.end() : end].strip() for p, end in zip(places, ends, strict=True)}


def _node(
    fields: dict[str, str], partitions: tuple[str, ...], racks: dict[str, str], partition: str
) -> SlurmNode:
    name = fields["NodeName"]
    words = set(fields.get("State", "").replace("*", "+NOT_RESPONDING").split("+"))
    if words & ASLEEP:
        words.discard("NOT_RESPONDING")
    said = [fields[key] for key in ("Reason",) if fields.get(key, "(null)") != "(null)"]
    closed = sorted(words & (DOWN | CLOSED))
    features = [f for f in fields.get("ActiveFeatures", "").split(",") if f and f != "(null)"]
    labels = {f"feature.{feature}": "yes" for feature in features}
    labels |= {f"partition.{part}": "yes" for part in partitions}
    labels |= {"rack": racks[name]} if name in racks else {}
    facts = NodeFacts(
        name=name,
        pool=partition or (partitions[0] if partitions else "default"),
        address=fields.get("NodeAddr", name),
        cpus=float(fields.get("CPUEfctv") or fields.get("CPUTot") or 1),
        memory_bytes=int(fields.get("RealMemory", "1")) << 20,
        disk_bytes=int(fields.get("TmpDisk", "0")) << 20,
        gpus=_gpus(fields.get("Gres", "")),
        is_alive=not closed,
        confinement="unknown",
        labels=labels,
        remarks=(f"Slurm says {' '.join([*closed, *said])}",) if closed else (),
    )
    return SlurmNode(
        facts=facts,
        booted_at=_moment(fields.get("BootTime", "")),
        partitions=partitions,
        answers=not words & (DOWN | ASLEEP),
    )


def _gpus(text: str) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for match in _GRES.finditer(text):
        kind = (match["kind"] or "GPU").upper()
        found += [Gpu(index=len(found) + number, kind=kind) for number in range(int(match["count"]))]
    return tuple(found)


def _moment(text: str) -> float | None:
    """A date of Slurm's, which was asked in UTC; None where it knows none."""
    try:
        return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
