"""The smallest cluster that meets a target, such as `p95 wait < 10m`.

The search simulates clusters of several sizes at a time. It assumes that a larger cluster meets whatever a
smaller one meets. Schedules have anomalies, so the answer is a size that meets the target next to one that
misses it, and the result lists all sizes tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import ceil

import msgspec

from shoal.errors import SpecError
from shoal.sim.cluster_shapes import PlannedFleet
from shoal.sim.report import SimulationReport, build_report
from shoal.sim.scenario import Scenario, play
from shoal.spec.quantity import parse_number, parse_seconds

EXAMPLE = '--target "p95 wait < 10m"'


class Statistic(StrEnum):
    MEAN = "mean"
    P50 = "p50"
    P95 = "p95"
    P99_9 = "p99.9"
    MAX = "max"


class TargetMeasure(StrEnum):
    WAIT = "wait"
    SLOWDOWN = "slowdown"
    COMPLETION = "completion"


WORDS = re.compile(r"(?P<statistic>\S+)\s+(?P<measure>\w+)\s*<\s*(?P<bound>\S+)")


class PlanTarget(msgspec.Struct, frozen=True):
    statistic: Statistic
    measure: TargetMeasure
    bound: float
    """The bound: in seconds, or a factor for a slowdown."""
    text: str

    def value(self, report: SimulationReport) -> float:
        waits = report.overall
        distribution = {
            TargetMeasure.WAIT: waits.wait_s,
            TargetMeasure.SLOWDOWN: waits.slowdown,
            TargetMeasure.COMPLETION: waits.completion_s,
        }[self.measure]
        return float(getattr(distribution, self.statistic.replace(".", "_")))

    def is_met(self, report: SimulationReport) -> bool:
        """Whether the report meets the target, with every job: a refused job has not waited less."""
        return not report.num_refused and self.value(report) < self.bound


def parse_target(text: str) -> PlanTarget:
    match = WORDS.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"`--target {text}`: a target is STATISTIC MEASURE < BOUND", hint=EXAMPLE)
    choices = f"a target is about {' '.join(Statistic)} of {' '.join(TargetMeasure)}"
    for word, enum_type in ((match["statistic"], Statistic), (match["measure"], TargetMeasure)):
        if word not in set(enum_type):
            raise SpecError(f"`--target {text}`: no `{word}`; {choices}", hint=EXAMPLE)
    statistic, measure = Statistic(match["statistic"]), TargetMeasure(match["measure"])
    try:
        read = parse_number if measure is TargetMeasure.SLOWDOWN else parse_seconds
        return PlanTarget(statistic, measure, read(match["bound"]), " ".join(text.split()))
    except ValueError as error:
        raise SpecError(f"`--target {text}`: {error}; {choices}", hint=EXAMPLE) from None


Simulate = Callable[[Sequence[Scenario]], list[SimulationReport]]
"""Returns the reports of scenarios, in their order. The caller decides where and in how many processes."""


class Trial(msgspec.Struct, frozen=True):
    num_nodes: int
    value: float
    """The value of the target's measure."""
    is_met: bool
    num_refused: int = 0
    """Jobs that fit nowhere. With any such job the target is missed."""


class SizingResult(msgspec.Struct, frozen=True):
    fleet: PlannedFleet
    report: SimulationReport
    trials: list[Trial]
    """By size."""


def simulate_report(scenario: Scenario) -> SimulationReport:
    return build_report(play(scenario))


def smallest_cluster(
    scenario: Scenario, fleet: PlannedFleet, target: PlanTarget, simulate: Simulate, *, at_once: int
) -> SizingResult:
    """The fewest nodes like those of the fleet on which the scenario meets the target.

    `SpecError`: no number of such nodes meets it.
    """
    search = _Search(scenario, fleet, target, simulate)
    below, most = search.too_few(), search.enough()
    if fleet.count > below:
        search.try_sizes([fleet.count])  # people first want the result for the present size
    guess = max(below + 1, search.busy_nodes())
    while not search.meeting():
        if max(search.sizes, default=0) >= most:
            raise SpecError(
                f"`{target.text}` is missed even on {most:,} nodes, where no job waits for room",
                hint='choose a measure that waiting decides: --target "p95 wait < 10m"',
            )
        search.try_sizes(sorted({min(guess << step, most) for step in range(at_once)}))
        guess <<= at_once
    while (gap := search.gap(below)) is not None:
        search.try_sizes(_between(*gap, at_once))
    return search.result()


def _between(low: int, high: int, count: int) -> list[int]:
    """At most `count` sizes that cut the gap into equal parts, without the ends."""
    return sorted({low + ceil((high - low) * part / (count + 1)) for part in range(1, count + 1)} - {high})


class _Search:
    def __init__(
        self, scenario: Scenario, fleet: PlannedFleet, target: PlanTarget, simulate: Simulate
    ) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._target = target
        self._simulate = simulate
        self._reports: dict[int, SimulationReport] = {}

    def too_few(self) -> int:
        """A number of nodes on which the largest job cannot run."""
        jobs = self._scenario.workload.jobs
        if self._fleet.is_pool:
            return ceil(max(job.request.cpus for job in jobs)) - 1
        return 0 if self._fleet.others else max(job.request.min_nodes for job in jobs) - 1

    def enough(self) -> int:
        """A number of nodes on which no job ever waits, because all jobs fit side by side."""
        jobs = self._scenario.workload.jobs
        return ceil(
            sum(job.request.min_nodes * (job.request.cpus if self._fleet.is_pool else 1) for job in jobs)
        )

    def busy_nodes(self) -> int:
        """The number of nodes that would be busy all the time from the first submission to the last."""
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
        """The sizes tried."""
        return list(self._reports)

    def meeting(self) -> list[int]:
        """Sizes above every size that missed."""
        missed = max(
            (size for size, report in self._reports.items() if not self._target.is_met(report)), default=0
        )
        return sorted(size for size in self._reports if size > missed)

    def gap(self, below: int) -> tuple[int, int] | None:
        """The largest size that misses and the smallest larger one that meets, unless they are neighbours."""
        high = self.meeting()[0]
        low = max([below, *(size for size in self._reports if size < high)])
        return (low, high) if high - low > 1 else None

    def result(self) -> SizingResult:
        size = self.meeting()[0]
        trials = [
            Trial(tried, self._target.value(report), self._target.is_met(report), report.num_refused)
            for tried, report in sorted(self._reports.items())
        ]
        return SizingResult(self._fleet.of(size), self._reports[size], trials)

    def _sized(self, size: int) -> Scenario:
        workload = msgspec.structs.replace(
            self._scenario.workload, nodes=self._fleet.of(size).nodes(), changes=(), windows=()
        )
        return msgspec.structs.replace(self._scenario, workload=workload)
