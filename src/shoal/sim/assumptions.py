"""Assumptions of a twin: checkpoints, node failures, and the stamps of waiting jobs.

A job that is stopped from outside keeps all its work up to its last checkpoint, at a price. Nodes fail by
themselves after exponential times, for a fixed time, the same for the same seed. Waiting jobs are ordered by
the production's `Stamps`, or by another stamper that a test provides. Stamps learn from jobs that have ended,
never from the run time of the job itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf
from random import Random
from typing import Protocol

import msgspec

from shoal.errors import SpecError
from shoal.model.job import ResourceRequest
from shoal.scheduler import Candidate, Holding, NodeInfo


class InterruptedWork(msgspec.Struct, frozen=True):
    """The work of an attempt that was cut short, in seconds: kept, lost, and overhead that was neither."""

    kept_s: float
    lost_s: float
    overhead_s: float


class CheckpointModel(msgspec.Struct, frozen=True, kw_only=True):
    """A modelled program: it works for `interval_s`, writes for `cost_s`, and repeats. It writes none at the
    end.

    An attempt that continues from a checkpoint first reads for `restart_s`. The default never writes a
    checkpoint, so a stopped job begins again from its start.
    """

    interval_s: float = inf
    cost_s: float = 0.0
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.cost_s < 0 or self.restart_s < 0:
            raise SpecError(
                f"a checkpoint every {self.interval_s:g} s that costs {self.cost_s:g} s and takes "
                f"{self.restart_s:g} s to read: the first must be above 0, the others not below",
                hint="--checkpoint 1h,30s,2m",
            )

    def overhead_s(self, work_s: float, *, is_restart: bool) -> float:
        """How much longer than its work an attempt takes that does `work_s` to the end."""
        written = 0 if self.interval_s == inf else max(0, ceil(work_s / self.interval_s) - 1)
        return written * self.cost_s + (self.restart_s if is_restart else 0.0)

    def last_s(self, ran_s: float, *, is_restart: bool) -> float | None:
        """Seconds from its start to the last checkpoint of an attempt that has run for `ran_s`; None without
        a checkpoint.
        """
        restart_s = self.restart_s if is_restart else 0.0
        step_s = self.interval_s + self.cost_s
        written = max(ran_s - restart_s, 0.0) // step_s
        return restart_s + written * step_s if written else None

    def cut_short(self, ran_s: float, *, is_restart: bool) -> InterruptedWork:
        """The work of an attempt that is stopped after `ran_s`."""
        restart_s = min(ran_s, self.restart_s) if is_restart else 0.0
        ran_s -= restart_s
        if self.interval_s == inf:
            return InterruptedWork(0.0, ran_s, restart_s)
        written, rest_s = divmod(ran_s, self.interval_s + self.cost_s)
        # A checkpoint that was being written does not count.
        lost_s = min(rest_s, self.interval_s)
        return InterruptedWork(
            written * self.interval_s, lost_s, restart_s + written * self.cost_s + (rest_s - lost_s)
        )


class NodeFailureModel(msgspec.Struct, frozen=True, kw_only=True):
    """`mtbf_s` is the mean time in service of one node between two failures."""

    mtbf_s: float
    repair_s: float
    seed: int = 1

    def __post_init__(self) -> None:
        if self.mtbf_s <= 0 or self.repair_s < 0:
            raise SpecError(
                f"a node that fails every {self.mtbf_s:g} s for {self.repair_s:g} s: the first must "
                "be above 0, the second not below",
                hint="--mtbf 60d --repair 4h",
            )

    def more_often(self, times: float) -> NodeFailureModel:
        return msgspec.structs.replace(self, mtbf_s=self.mtbf_s / times)


class NodeFailureTimes:
    """The next failure of each node. Each node has its own random numbers, so other nodes do not change its
    times.
    """

    def __init__(self, failures: NodeFailureModel, node: str) -> None:
        self._random = Random(f"{failures.seed}:{node}")
        self._rate = 1 / failures.mtbf_s

    def time_in_service(self) -> float:
        return self._random.expovariate(self._rate)


class Stamper(Protocol):
    """The part of `shoal.scheduler.Stamps` that a twin uses."""

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        """Note the whole cluster, whenever it has changed."""

    def arrive(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its stamps. It waits from now on."""

    def leave(self, attempt_id: str) -> None:
        """Note that it does not wait any more."""

    def ended(self, holding: Holding, request: ResourceRequest, run_s: float, now: float) -> list[Candidate]:
        """Learn from a run that ended. Return the waiting candidates whose stamps changed."""


class LimitStamper:
    """Expects the limit, learns nothing, and treats every job as due at once: what EASY knows."""

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        pass

    def arrive(self, candidate: Candidate) -> Candidate:
        limit_s = candidate.request.time_limit_s
        return msgspec.structs.replace(candidate, expected_s=limit_s, score=limit_s)

    def leave(self, attempt_id: str) -> None:
        pass

    def ended(self, holding: Holding, request: ResourceRequest, run_s: float, now: float) -> list[Candidate]:
        return []
