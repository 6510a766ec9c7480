"""One job of a trace, whatever the log looked like."""

from __future__ import annotations

import msgspec

from shoal.errors import SpecError


class TraceJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a log says of a job. Amounts are for all its nodes together; None where the log does not say."""

    job_id: str
    submitted_at: float
    """Seconds on the log's own clock."""
    run_s: float
    limit_s: float | None = None
    num_processors: int = 0
    num_gpus: float = 0
    num_cpus: float = 0
    memory_bytes: int = 0
    num_nodes: int | None = None
    user: str | None = None
    group: str | None = None
    name: str | None = None
    """What was run: a name, or the number of an executable."""
    project: str | None = None
    """The tenant: a virtual cluster, an account, one of several clusters in the log."""
    queue: str | None = None

    @property
    def planned_s(self) -> float:
        """How long a scheduler must think it runs: the limit, or the run time where there is none."""
        return self.run_s if self.limit_s is None else self.limit_s


class TraceError(SpecError):
    """A trace that is not what it says it is. Names the file, the line and the value."""

    code = "trace.invalid"


def malformed(path: object, line: int, complaint: str, *, hint: str | None = None) -> TraceError:
    return TraceError(f"{path}:{line}: {complaint}", hint=hint, file=str(path), line=line)
