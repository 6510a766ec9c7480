"""The smallest cluster that meets a target, by simulations of clusters of several sizes at a time.

Takes for granted that a larger cluster does not miss what a smaller one meets. Schedules have anomalies, so
the answer is a size that meets the target next to one that misses it, and all sizes tried are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import msgspec

from shoal.errors import SpecError
from shoal.sim.fleet import Fleet
from shoal.sim.report import Report, report
from shoal.sim.scenario import Scenario, play
from shoal.sim.target import Target

Simulate = Callable[[Sequence[Scenario]], list[Report]]
"""Reports of scenarios, in their order; where and in how many processes is the caller's affair."""


class Trial(msgspec.Struct, frozen=True):
    num_nodes: int
    value: float
    """Of the target's measure."""
    is_met: bool
    num_refused: int = 0
    """Jobs that fit nowhere: with any of them the target is missed."""


class Answer(msgspec.Struct, frozen=True):
    fleet: Fleet
    report: Report
    trials: list[Trial]
    """By size."""


def simulated(scenario: Scenario) -> Report:
    return report(play(scenario))


def smallest(scenario: Scenario, fleet: Fleet, target: Target, simulate: Simulate, *, at_once: int) -> Answer:
    """The fewest nodes like those of the fleet on which the scenario meets the target.

    `SpecError`: no number of such nodes does.
    """
    search = _Search(scenario, fleet, target, simulate)
    below, most = search.too_few(), search.enough()
    if fleet.count > below:
        search.try_sizes([fleet.count])  # people ask first how what they have would do
    guess = max(below + 1, search.busy_nodes())
    while not search.meeting():
        if max(search.sizes, default=0) >= most:
            raise SpecError(
                f"`{target.text}` is missed even on {most:,} nodes, where nobody waits for room",
                hint='ask for what waiting decides: --target "p95 wait < 10m"',
            )
        search.try_sizes(sorted({min(guess << step, most) for step in range(at_once)}))
        guess <<= at_once
    while (gap := search.gap(below)) is not None:
        search.try_sizes(_between(*gap, at_once))
    return search.answer()


def _between(low: int, high: int, count: int) -> list[int]:
    """At most `count` sizes that cut the gap into equal parts, neither end among them."""
    return sorted({low + ceil((high - low) * part / (count + 1)) for part in range(1, count + 1)} - {high})


class _Search:
    def __init__(self, scenario: Scenario, fleet: Fleet, target: Target, simulate: Simulate) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._target = target
        self._simulate = simulate
        self._reports: dict[int, Report] = {}

    def too_few(self) -> int:
        """A number of nodes on which the largest job cannot run."""
        jobs = self._scenario.workload.jobs
        if self._fleet.is_pool:
            return ceil(max(job.request.cpus for job in jobs)) - 1
        return 0 if self._fleet.others else max(job.request.min_nodes for job in jobs) - 1

    def enough(self) -> int:
        """A number of nodes on which nobody ever waits: all jobs fit side by side."""
        jobs = self._scenario.workload.jobs
        return ceil(
            sum(job.request.min_nodes * (job.request.cpus if self._fleet.is_pool else 1) for job in jobs)
        )

    def busy_nodes(self) -> int:
        """How many would be busy all the time from the first submission to the last."""
        jobs = self._scenario.workload.jobs
        work = sum(
            job.run_s
            * job.request.min_nodes
            * (job.request.gpus.count if job.request.gpus else job.request.cpus)
            for job in jobs
        )
        span = max(jobs[-1].submitted_at - jobs[0].submitted_at, 1.0)
        return ceil(work / span / self._fleet.each)

    def try_sizes(self, sizes: list[int]) -> None:
        new = [size for size in sizes if size not in self._reports]
        if new:
            scenarios = [self._sized(size) for size in new]
            self._reports.update(zip(new, self._simulate(scenarios), strict=True))

    @property
    def sizes(self) -> list[int]:
        """Those tried."""
        return list(self._reports)

    def meeting(self) -> list[int]:
        """Sizes above every size that missed."""
        missed = max((size for size, one in self._reports.items() if not self._target.is_met(one)), default=0)
        return sorted(size for size in self._reports if size > missed)

    def gap(self, below: int) -> tuple[int, int] | None:
        """The largest size that misses and the smallest above it that meets, unless they are neighbours."""
        high = self.meeting()[0]
        low = max([below, *(size for size in self._reports if size < high)])
        return (low, high) if high - low > 1 else None

    def answer(self) -> Answer:
        size = self.meeting()[0]
        trials = [
            Trial(tried, self._target.value(one), self._target.is_met(one), one.num_refused)
            for tried, one in sorted(self._reports.items())
        ]
        return Answer(self._fleet.of(size), self._reports[size], trials)

    def _sized(self, size: int) -> Scenario:
        workload = msgspec.structs.replace(
            self._scenario.workload, nodes=self._fleet.of(size).nodes(), changes=(), windows=()
        )
        return msgspec.structs.replace(self._scenario, workload=workload)
