"""The default policy over whole logs of the Parallel Workloads Archive, through the twin, beside EASY."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from benchmarks.yardsticks.beat import Beat, report
from benchmarks.yardsticks.logs import LOGS, RULES, VARIANTS, replay
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.from_trace import workload_of
from shoal.sim.report import SimulationReport as Played
from shoal.sim.report import build_report as report_of
from shoal.sim.scenario import Scenario, play
from shoal.sim.traces.swf import read_swf

EASY, SHORTEST, _, TRUE = VARIANTS[:4]


@lru_cache(maxsize=len(LOGS))
def played(path: Path, capacity: int) -> tuple[Played, float]:
    """Play a whole log through the twin, and return the CPU seconds. Cached, because the speed table shows it
    too.
    """
    jobs = list(read_swf(path, RULES))
    began = time.process_time()
    report = report_of(play(Scenario(workload=workload_of(jobs, nodes_of(ClusterShape(capacity))))))
    return report, time.process_time() - began


def run(traces: Traces) -> Report:
    rows: list[Beat] = []
    notes = []
    for place, (log, file, capacity) in enumerate(LOGS):
        jobs = list(read_swf(traces.path(file), RULES))
        result, cpu_s = played(traces.path(file), capacity)
        say(f"{log}: {len(jobs):,} jobs in {cpu_s:.1f} CPU s")
        easy = replay(jobs, capacity, EASY)
        shortest, true = SHORTEST.means[place], TRUE.means[place]
        slowdown = result.overall.slowdown
        rows += [
            Beat(log, "mean slowdown", SHORTEST.name, float(shortest), slowdown.mean),
            Beat(log, "worst job", EASY.name, easy.slowdown.max, slowdown.max),
            Beat(log, "p99.9 slowdown", EASY.name, easy.slowdown.p99_9, slowdown.p99_9, is_goal=False),
            Beat(log, "mean slowdown", TRUE.name, float(true), slowdown.mean, is_goal=False),
        ]
        notes.append(
            f"{log}: mean {slowdown.mean:,.2f}, p99.9 {slowdown.p99_9:,.0f}, max {slowdown.max:,.0f}; "
            f"{len(jobs):,} jobs in {cpu_s:.1f} CPU s, report included"
        )
    notes.append("limits below the run time are raised to it, for EASY and for us")
    return report(SECTION.title, rows, notes)


SECTION = Section(
    name="policy-logs",
    title="Default policy, whole logs: bounded slowdown beside EASY",
    needs=tuple(file for _, file, _ in LOGS),
    run=run,
)
