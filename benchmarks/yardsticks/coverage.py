"""How often a start lies in the interval that was predicted for it, over logs run by the production planner.

A fraction of the waiting jobs is asked about at submission. The prediction uses what the planner knows at
that moment and what it learned from earlier starts of the same log, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from statistics import median
from typing import NamedTuple

from benchmarks.measure import table
from benchmarks.yardsticks.logs import RULES
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.model.job import ResourceRequest
from shoal.scheduler import Candidate, Holding, NodeInfo, Plan, Planner, Policy, Stamps
from shoal.scheduler.facts.cluster_state import holding_of
from shoal.scheduler.prediction.calibration import Calibration, Interval
from shoal.scheduler.prediction.outlook import clamp_to_promise, firm_starts
from shoal.scheduler.prediction.scenarios import StartSpan, predict
from shoal.sim.traces.swf import read_swf
from shoal.sim.traces.trace import TraceJob

LOWEST, HIGHEST = 0.87, 0.93


@dataclass(frozen=True)
class Log:
    name: str
    file: str
    capacity: int
    num_jobs: int
    """How many jobs are replayed, from the first."""
    every: int
    """Of the waiting jobs, one in `every` is asked about."""


LOGS = (
    Log("KTH (constants from here)", "swf/KTH-SP2-1996-2.1-cln.swf.gz", 100, 28_000, 5),
    Log("CTC", "swf/CTC-SP2-1996-3.1-cln.swf.gz", 338, 78_000, 20),
    Log("HPC2N", "swf/HPC2N-2002-2.2-cln.swf.gz", 240, 100_000, 20),
    Log("Curie", "swf/CEA-Curie-2011-2.1-cln.swf.gz", 80_640, 50_000, 10),
    Log("Lublin", "swf/lublin_256.swf.gz", 256, 10_000, 5),
)


class _PendingPrediction(NamedTuple):
    at: float
    span: StartSpan
    given: Interval


@dataclass
class Tally:
    """The results of the questions."""

    calibration: Calibration = field(default_factory=Calibration)
    pending: dict[str, _PendingPrediction] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    widths: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_before: int = 0
    num_after: int = 0
    num_unanswered: int = 0

    @property
    def coverage(self) -> float:
        return 1.0 - (self.num_before + self.num_after) / max(len(self.waits), 1)

    def start(self, attempt_id: str, now: float) -> None:
        question = self.pending.pop(attempt_id, None)
        if question is None:
            return
        waited_s, given = now - question.at, question.given
        self.waits.append(waited_s)
        self.widths.append(given.high_s - given.low_s)
        self.num_before += waited_s < given.low_s
        self.num_after += waited_s > given.high_s
        self.calibration.note(question.span, given, waited_s)


class Replay:
    """A log on one pool of processors."""

    def __init__(self, jobs: Sequence[TraceJob], capacity: int, every: int) -> None:
        self._jobs = sorted(jobs, key=lambda job: job.submitted_at)
        self._capacity = capacity
        self._every = every
        pool = NodeInfo(name="pool", cpus=capacity, memory_bytes=0)
        self._planner, self._stamps = Planner(Policy()), Stamps()
        self._planner.set_node(pool)
        self._stamps.see([pool])
        self._waiting: dict[str, Candidate] = {}
        self._ends: list[tuple[float, int, Holding, ResourceRequest]] = []
        self._num_arrived = self._num_waited = 0
        self.tally = Tally()

    def run(self) -> Tally:
        again_at = inf
        while self._num_arrived < len(self._jobs) or self._waiting:
            now = min(self._next_arrival(), self._ends[0][0] if self._ends else inf, again_at)
            self._end(now)
            new = self._arrive(now)
            made = self._planner.plan(now)
            for start in made.starts:
                candidate = self._waiting.pop(start.attempt_id)
                self._stamps.leave(start.attempt_id)
                self.tally.start(start.attempt_id, now)
                holding = holding_of(candidate, start.allocation, now)
                ends_at = now + self._jobs[candidate.order].run_s
                heappush(self._ends, (ends_at, candidate.order, holding, candidate.request))
            self._ask([attempt_id for attempt_id in new if attempt_id in self._waiting], made, now)
            again_at = inf if made.replan_at is None or made.replan_at <= now else made.replan_at
        return self.tally

    def _next_arrival(self) -> float:
        return self._jobs[self._num_arrived].submitted_at if self._num_arrived < len(self._jobs) else inf

    def _end(self, now: float) -> None:
        while self._ends and self._ends[0][0] == now:
            _, _, holding, request = heappop(self._ends)
            self._planner.release(holding.attempt_id, now)
            for again in self._stamps.ended(holding, request, now - holding.placed_at, now):
                self._waiting[again.attempt_id] = again
                self._planner.add(again)

    def _arrive(self, now: float) -> list[str]:
        new = []
        while self._next_arrival() == now:
            index, job = self._num_arrived, self._jobs[self._num_arrived]
            self._num_arrived += 1
            cpus = min(job.num_processors, self._capacity)
            candidate = self._stamps.arrive(
                Candidate(
                    attempt_id=str(index),
                    job_id=job.job_id,
                    project="default",
                    order=index,
                    submitted_at=now,
                    request=ResourceRequest(cpus=cpus, time_limit_s=job.limit_s),
                    owner=job.user or "",
                    name=job.name or "",
                )
            )
            self._waiting[candidate.attempt_id] = candidate
            self._planner.add(candidate)
            new.append(candidate.attempt_id)
        return new

    def _ask(self, new: list[str], made: Plan, now: float) -> None:
        for attempt_id in new:
            self._num_waited += 1
            if self._num_waited % self._every:
                continue
            tally, began = self.tally, time.process_time()
            snapshot = self._planner.snapshot()
            span = predict(snapshot, Policy(), now, [attempt_id], self._stamps.spread).get(attempt_id)
            tally.cpu_s.append(time.process_time() - began)
            if span is None:
                tally.num_unanswered += 1
                continue
            firm_at = firm_starts(snapshot, made.promises, now).get(attempt_id)
            given = clamp_to_promise(tally.calibration.interval(span), firm_at, now)
            tally.pending[attempt_id] = _PendingPrediction(now, span, given)


def row(log: Log, tally: Tally) -> list[str]:
    count = len(tally.waits)
    cpu_ms = sorted(1000 * cpu_s for cpu_s in tally.cpu_s)
    return [
        log.name,
        f"{count:,}",
        f"{tally.coverage:.1%}",
        f"{tally.num_before / count:.1%}",
        f"{tally.num_after / count:.1%}",
        f"{median(tally.widths) / 60:,.0f}",
        f"{median(tally.waits) / 60:,.0f}",
        f"{median(cpu_ms):.0f} / {cpu_ms[int(0.95 * len(cpu_ms))]:.0f}",
        f"{tally.num_unanswered:,}",
    ]


def run(traces: Traces) -> Report:
    tallies = []
    for log in LOGS:
        jobs = list(read_swf(traces.path(log.file), RULES))[: log.num_jobs]
        tallies.append(Replay(jobs, log.capacity, log.every).run())
        say(f"{log.name}: {tallies[-1].coverage:.1%} of {len(tallies[-1].waits):,}")
    header = ["log", "asked", "inside", "before", "after", "width", "wait", "CPU ms p50 / p95", "no answer"]
    notes = [
        "width of the interval and true wait: medians, in minutes; inside is to be 87 to 93 %",
        "simulated: starts are the production planner's own, on one pool of processors",
    ]
    rows = [row(log, tally) for log, tally in zip(LOGS, tallies, strict=True)]
    is_right = all(LOWEST <= tally.coverage <= HIGHEST for tally in tallies)
    return Report(table(SECTION.title, header, rows, notes), is_right=is_right)


SECTION = Section(
    name="coverage",
    title="Start intervals: how often the true start is inside what `shoal why` says at submission",
    needs=tuple(log.file for log in LOGS),
    run=run,
)
