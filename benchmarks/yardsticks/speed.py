"""What a cycle of the planner costs by the size of the cluster, and how fast whole logs are simulated."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure import percentile, table
from benchmarks.yardsticks.crowd import crowd
from benchmarks.yardsticks.drive import Drive
from benchmarks.yardsticks.logs import LOGS
from benchmarks.yardsticks.policy_logs import played
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.traces.table import ITP, read_table
from shoal.sim.traces.trace import TraceJob

JOBS = "gpu/microsoft-itp-2021.tar.gz"
DAY = 48
"""The day of the log whose jobs ask for 1,441 GPUs, more than one copy's share of the cluster."""
NUM_CYCLES = 2_000
GOAL_MS = 100.0
CURIE_S = 60.0


@dataclass(frozen=True)
class Size:
    """Nodes of 8 GPUs, copies of the log, and jobs that wait all the time."""

    num_nodes: int
    copies: int
    num_waiting: int


SIZES = (Size(125, 1, 500), Size(1_250, 8, 5_000), Size(12_500, 78, 50_000))
SIMULATED = {"KTH": 0.03, "HPC2N": 0.46, "Curie": 5.2}
"""CPU seconds of an event-driven simulator in C, as published with the logs."""
CYCLE_HEADER = [
    *("GPUs", "nodes", "ITP laid over", "waiting", "cycles"),
    *("p50 ms", "p99 ms", "max ms", "growth p50, p99", "facts ms"),
]
CYCLE_NOTES = (
    "CPU milliseconds of `Planner.plan`, measured; one cycle for each moment at which a job comes or ends",
    "facts: telling the planner who came and who ended, stamps and learning included, for each cycle",
    f"the log is laid over itself, {DAY} days in; each copy of each of its 10 clusters is a project",
    "as many wait all the time: whenever fewer do, the next job of the log comes before its time",
    "made up: 20 users a project; limits (the first of 1, 4, 12 h, 1, 3, 7, 30 d that is half as long again",
    "as the run; one job in 5 has none)",
)
LOG_HEADER = ["log", "jobs", "CPU s, ours", "jobs a CPU s, ours", "event-driven C, CPU s", "times as long"]
LOG_NOTES = (
    "ours is the twin with the production planner, stamps and report, in Python; measured",
    "published: Helios 68,503 jobs in about 340 CPU s (201 a second), AccaSim 400 jobs a second, SchedGym",
    "about 10,000 schedulings a second; measured on other machines",
)


def drive(jobs: Sequence[TraceJob], size: Size, num_cycles: int, day: float = DAY) -> Drive:
    """`jobs` in order of submission. It begins on that day of the log."""
    nodes = nodes_of(ClusterShape(size.num_nodes, 8))
    around = crowd(
        jobs,
        nodes,
        copies=size.copies,
        at=jobs[0].submitted_at + day * 86_400.0,
        num_waiting=size.num_waiting,
        num_coming=2 * num_cycles,
    )
    driven = Drive(around, nodes)
    driven.fill()
    driven.run(num_cycles)
    return driven


def cycles(jobs: Sequence[TraceJob], sizes: Sequence[Size], num_cycles: int, day: float = DAY) -> str:
    rows: list[list[str]] = []
    p50 = p99 = 0.0
    for size in sizes:
        began = time.process_time()
        driven = drive(jobs, size, num_cycles, day)
        before = p50, p99
        p50, p99, most = (1000 * percentile(driven.plan_s, share) for share in (0.5, 0.99, 1.0))
        growth = f"{p50 / before[0]:.1f}x, {p99 / before[1]:.1f}x" if rows else "-"
        facts_ms = 1000 * driven.facts_s / len(driven.plan_s)
        numbers = (size.num_nodes * 8, size.num_nodes, size.copies, size.num_waiting, len(driven.plan_s))
        columns = [f"{number:,}" for number in numbers]
        rows.append([*columns, f"{p50:.2f}", f"{p99:.2f}", f"{most:.1f}", growth, f"{facts_ms:.2f}"])
        say(f"{size.num_nodes * 8:,} GPUs: {time.process_time() - began:.1f} CPU s, set-up included")
        del driven
        gc.collect()
    met = f"met, {GOAL_MS / p99:.1f}x below" if p99 < GOAL_MS else f"missed by {p99 / GOAL_MS - 1:.0%}"
    goal = f"goal, p99 under {GOAL_MS:.0f} ms at 12,500 nodes with 50,000 waiting: {met}"
    return table(
        "One cycle of the planner, by the size of the cluster", CYCLE_HEADER, rows, [goal, *CYCLE_NOTES]
    )


def simulators(traces: Traces) -> str:
    rows, notes = [], []
    for log, file, capacity in LOGS:
        if log not in SIMULATED:
            continue
        report, cpu_s = played(traces.path(file), capacity)
        num_jobs, rival_s = report.overall.num_jobs, SIMULATED[log]
        columns = [f"{num_jobs:,}", f"{cpu_s:.1f}", f"{num_jobs / cpu_s:,.0f}", f"{rival_s:g}"]
        rows.append([log, *columns, f"{cpu_s / rival_s:,.0f}x"])
        say(f"{log}: {cpu_s:.1f} CPU s")
        if log == "Curie":
            met = "met" if cpu_s < CURIE_S else f"missed by {cpu_s / CURIE_S - 1:.0%}"
            notes.append(f"goal, Curie in under {CURIE_S:.0f} CPU s: {met}")
    return table("Whole logs simulated with the default policy", LOG_HEADER, rows, [*notes, *LOG_NOTES])


def run(traces: Traces) -> Report:
    jobs = sorted(read_table(traces.path(JOBS), ITP), key=lambda job: job.submitted_at)
    return Report(f"{cycles(jobs, SIZES, NUM_CYCLES)}\n{simulators(traces)}", is_right=True)


SECTION = Section(
    name="speed",
    title="Speed of the planner and the twin",
    needs=(JOBS, *(file for log, file, _ in LOGS if log in SIMULATED)),
    run=run,
)
