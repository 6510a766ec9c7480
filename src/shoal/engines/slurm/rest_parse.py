"""Parses replies of slurmrestd of all versions with one reader. Pure; unknown fields are ignored.

Where an older version has a word or a number, a newer one has a list of words, or a flag for a set number.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import msgspec

from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.partitions import Association, Partition
from shoal.engines.slurm.states import SlurmJob

NO_VALUE = 0xFFFFFFFE
"""From this number on: Slurm's numbers for "not set" and "no limit"."""
VERSION = re.compile(rb"/slurm\\?/(v0\.0\.[0-9]+)\\?/")


class _Number(msgspec.Struct):
    number: float = 0
    set: bool = False
    infinite: bool = False


Number = float | _Number | None
Words = str | list[str] | None


class RestError(msgspec.Struct):
    """One of `errors`."""

    description: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        parts = dict.fromkeys(part for part in (self.error, self.description) if part)
        return ": ".join(parts)


class _Verdict(msgspec.Struct):
    code: int = 0
    string: str = ""


class _Cancelled(msgspec.Struct):
    """The result for one job, in a reply that as a whole is no error."""

    error: _Verdict = msgspec.field(default_factory=_Verdict)


class _Named(msgspec.Struct):
    release: str = ""
    cluster: str = ""


class _Ping(msgspec.Struct):
    hostname: str = ""


class _Meta(msgspec.Struct):
    old: _Named | None = msgspec.field(name="Slurm", default=None)
    new: _Named | None = msgspec.field(name="slurm", default=None)


class _JobLine(msgspec.Struct):
    job_id: int = 0
    name: str | None = None
    user_name: str | None = None
    user: str | None = None
    job_state: Words = None
    state: dict[str, Words] | None = None
    state_reason: str | None = None
    start_time: Number = None


class _NodeLine(msgspec.Struct):
    name: str
    address: str = ""
    state: Words = None
    state_flags: Words = None
    reason: str | None = None
    active_features: Words = None
    partitions: Words = None
    cpus: int = 1
    effective_cpus: int = 0
    real_memory: int = 1
    specialized_memory: int = 0
    """v0.0.38 does not report it."""
    temporary_disk: int = 0
    gres: str | None = None
    boot_time: Number = None
    slurmd_start_time: Number = None


class _List(msgspec.Struct):
    """A list of names as one text; empty: all, or none."""

    allowed: str | None = None
    deny: str | None = None


class _Limits(msgspec.Struct):
    nodes: Number = None
    time: Number = None


class _Tier(msgspec.Struct):
    tier: int = 1


class _State(msgspec.Struct):
    state: Words = None


class _PartitionLine(msgspec.Struct):
    """v0.0.38 has single fields; v0.0.42 has the structures after them."""

    name: str
    state: Words = None
    flags: Words = None
    priority_tier: int = 1
    maximum_nodes_per_job: int | None = None
    min_nodes: int = msgspec.field(name="min nodes per job", default=0)
    max_time_limit: int | None = None
    default_time_limit: int | None = None
    allowed_groups: str | None = None
    allowed_accounts: str | None = None
    denied_accounts: str | None = None
    allowed_qos: str | None = None
    denied_qos: str | None = None
    partition: _State | None = None
    priority: _Tier | None = None
    minimums: _Limits | None = None
    maximums: _Limits | None = None
    defaults: _Limits | None = None
    groups: _List | None = None
    accounts: _List | None = None
    qos: _List | str | None = None


class _Default(msgspec.Struct):
    qos: str | None = None


class _AssociationLine(msgspec.Struct):
    account: str = ""
    user: str | None = None
    partition: str | None = None
    is_default: bool | int = False
    qos: Words = None
    default: _Default | None = None


class RestReply(msgspec.Struct):
    """Any reply. Fields of other requests are empty."""

    errors: list[RestError] = []
    meta: _Meta | None = None
    job_id: int = 0
    jobs: list[_JobLine] = []
    nodes: list[_NodeLine] = []
    partitions: list[_PartitionLine] = []
    associations: list[_AssociationLine] = []
    status: list[_Cancelled] = []
    pings: list[_Ping] = []

    @property
    def error_text(self) -> str:
        verdicts = [entry.error.string for entry in self.status if entry.error.code]
        return "; ".join(text for text in (*map(str, self.errors), *verdicts) if text)

    @property
    def release(self) -> str:
        return self._named.release

    @property
    def cluster(self) -> str:
        """Older versions do not report it."""
        return self._named.cluster

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(ping.hostname for ping in self.pings if ping.hostname)

    @property
    def _named(self) -> _Named:
        named = [part for part in (self.meta.old, self.meta.new) if part] if self.meta else []
        return named[0] if named else _Named()


def parse_reply(text: bytes) -> RestReply | None:
    """Parse a reply. None: it is no reply of slurmrestd."""
    try:
        return msgspec.json.decode(text, type=RestReply)
    except (ValueError, RecursionError):
        return None


def versions_in(description: bytes) -> list[str]:
    """Return the versions that `/openapi/v3` describes, newest first."""
    versions = {match.decode() for match in VERSION.findall(description)}
    return sorted(versions, key=lambda version: int(version.rpartition(".")[2]), reverse=True)


def jobs_in(reply: RestReply, user: str, *, is_past: bool = False) -> list[SlurmJob]:
    """Return the jobs of this user, because any user may give a job the name of one of ours."""
    jobs = []
    for line in reply.jobs:
        if (line.user_name or line.user) == user:
            state = line.job_state if line.state is None else line.state.get("current")
            jobs.append(
                SlurmJob(
                    job_id=str(line.job_id),
                    state=next(iter(_split_words(state)), ""),
                    name=line.name or "",
                    start=_moment(line.start_time),
                    reason=line.state_reason or "",
                    is_past=is_past,
                )
            )
    return jobs


def nodes_in(reply: RestReply) -> list[RawNode]:
    return [
        RawNode(
            name=line.name,
            address=line.address or line.name,
            states=frozenset(
                word.upper() for word in (*_split_words(line.state), *_split_words(line.state_flags))
            ),
            reason=line.reason or "",
            features=tuple(_split_words(line.active_features)),
            partitions=tuple(_split_words(line.partitions)),
            cpus=float(line.effective_cpus or line.cpus),
            memory_mb=max(line.real_memory - line.specialized_memory, 1),
            disk_mb=line.temporary_disk,
            gres=line.gres or "",
            booted_at=_value(line.boot_time),
            slurmd_at=_value(line.slurmd_start_time),
        )
        for line in reply.nodes
    ]


def partitions_in(reply: RestReply) -> list[Partition]:
    return [_newer(line) if line.partition is not None else _older(line) for line in reply.partitions]


def _older(line: _PartitionLine) -> Partition:
    flags = set(_split_words(line.flags))
    return Partition(
        name=line.name,
        state=next(iter(_split_words(line.state)), "UP"),
        is_default="default" in flags,
        is_hidden="hidden" in flags,
        is_root_only="root_only" in flags,
        needs_reservation="reservation_required" in flags,
        tier=line.priority_tier,
        min_nodes=line.min_nodes,
        max_nodes=_finite(line.maximum_nodes_per_job),
        max_minutes=_finite(line.max_time_limit),
        has_default_time=line.default_time_limit is not None,
        groups=_names(line.allowed_groups),
        accounts=_names(line.allowed_accounts),
        denied_accounts=_names(line.denied_accounts),
        qos=_names(line.allowed_qos),
        denied_qos=_names(line.denied_qos),
    )


def _newer(line: _PartitionLine) -> Partition:
    least, most, by_itself = (limits or _Limits() for limits in (line.minimums, line.maximums, line.defaults))
    accounts, groups = line.accounts or _List(), line.groups or _List()
    qos = line.qos if isinstance(line.qos, _List) else _List()
    return Partition(
        name=line.name,
        state=next(iter(_split_words(line.partition.state if line.partition else None)), "UP"),
        tier=line.priority.tier if line.priority else 1,
        min_nodes=int(_value(least.nodes) or 0),
        max_nodes=_finite(most.nodes),
        max_minutes=_finite(most.time),
        has_default_time=_is_limit_set(by_itself.time),
        groups=_names(groups.allowed),
        accounts=_names(accounts.allowed),
        denied_accounts=_names(accounts.deny),
        qos=_names(qos.allowed),
        denied_qos=_names(qos.deny),
    )


def associations_in(reply: RestReply, user: str) -> list[Association]:
    return [
        Association(
            account=line.account,
            is_default=bool(line.is_default),
            partition=line.partition or "",
            qos=tuple(_split_words(line.qos)),
            default_qos=(line.default.qos if line.default else None) or "",
        )
        for line in reply.associations
        if line.user == user
    ]


def _names(text: str | None) -> tuple[str, ...]:
    """Empty: all."""
    return () if text == "ALL" else tuple(_split_words(text))


def _finite(number: Number) -> int | None:
    """Return the number; None: no limit. An older version spells that as -1, or as its largest number."""
    if isinstance(number, _Number):
        return int(number.number) if number.set and not number.infinite else None
    return int(number) if number is not None and 0 <= number < NO_VALUE else None


def _is_limit_set(number: Number) -> bool:
    return isinstance(number, _Number) and (number.set or number.infinite)


def _split_words(value: Words) -> Iterable[str]:
    if isinstance(value, str):
        return [word for word in value.split(",") if word]
    return value or []


def _value(number: Number) -> float | None:
    if isinstance(number, _Number):
        return number.number if number.set and number.number else None
    return number or None


def _moment(number: Number) -> str:
    """Return the time as `squeue` prints it, in UTC."""
    at = _value(number)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) if at else ""
