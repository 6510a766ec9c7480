"""What slurmrestd answers, as values: one reader for all versions. Pure; unknown fields are passed over.

Where an older one says a word or a number, a newer one says a list of words, or whether the number is set.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import msgspec

from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.states import Job

VERSION = re.compile(rb"/slurm\\?/(v0\.0\.[0-9]+)\\?/")


class _Number(msgspec.Struct):
    number: float = 0
    set: bool = False


Number = float | _Number | None
Words = str | list[str] | None


class Complaint(msgspec.Struct):
    """One of `errors`."""

    description: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        said = dict.fromkeys(part for part in (self.error, self.description) if part)
        return ": ".join(said)


class _Verdict(msgspec.Struct):
    code: int = 0
    string: str = ""


class _Cancelled(msgspec.Struct):
    """Of one job, where the answer as a whole is no error."""

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
    temporary_disk: int = 0
    gres: str | None = None
    boot_time: Number = None


class Reply(msgspec.Struct):
    """Any answer. What was not asked for is empty."""

    errors: list[Complaint] = []
    meta: _Meta | None = None
    job_id: int = 0
    jobs: list[_JobLine] = []
    nodes: list[_NodeLine] = []
    status: list[_Cancelled] = []
    pings: list[_Ping] = []

    @property
    def said(self) -> str:
        verdicts = [one.error.string for one in self.status if one.error.code]
        return "; ".join(said for said in (*map(str, self.errors), *verdicts) if said)

    @property
    def release(self) -> str:
        return self._named.release

    @property
    def cluster(self) -> str:
        """Older versions do not name it."""
        return self._named.cluster

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(ping.hostname for ping in self.pings if ping.hostname)

    @property
    def _named(self) -> _Named:
        found = [one for one in (self.meta.old, self.meta.new) if one] if self.meta else []
        return found[0] if found else _Named()


def parse_reply(text: bytes) -> Reply | None:
    """None: this is no answer of slurmrestd's."""
    try:
        return msgspec.json.decode(text, type=Reply)
    except msgspec.DecodeError:
        return None


def versions_in(description: bytes) -> list[str]:
    """Those that `/openapi/v3` describes, the newest first."""
    found = {match.decode() for match in VERSION.findall(description)}
    return sorted(found, key=lambda version: int(version.rpartition(".")[2]), reverse=True)


def jobs_in(reply: Reply, user: str, *, is_past: bool = False) -> list[Job]:
    """Those of this user: anybody may give a job the name of one of ours."""
    found = []
    for line in reply.jobs:
        if (line.user_name or line.user) == user:
            said = line.job_state if line.state is None else line.state.get("current")
            found.append(
                Job(
                    job_id=str(line.job_id),
                    state=next(iter(_words(said)), ""),
                    name=line.name or "",
                    start=_moment(line.start_time),
                    reason=line.state_reason or "",
                    is_past=is_past,
                )
            )
    return found


def nodes_in(reply: Reply) -> list[RawNode]:
    return [
        RawNode(
            name=line.name,
            address=line.address or line.name,
            states=frozenset(word.upper() for word in (*_words(line.state), *_words(line.state_flags))),
            reason=line.reason or "",
            features=tuple(_words(line.active_features)),
            partitions=tuple(_words(line.partitions)),
            cpus=float(line.effective_cpus or line.cpus),
            memory_mb=line.real_memory,
            disk_mb=line.temporary_disk,
            gres=line.gres or "",
            booted_at=_value(line.boot_time),
        )
        for line in reply.nodes
    ]


def _words(said: Words) -> Iterable[str]:
    if isinstance(said, str):
        return [word for word in said.split(",") if word]
    return said or []


def _value(number: Number) -> float | None:
    if isinstance(number, _Number):
        return number.number if number.set and number.number else None
    return number or None


def _moment(number: Number) -> str:
    """As `squeue` prints it, in UTC."""
    at = _value(number)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) if at else ""
