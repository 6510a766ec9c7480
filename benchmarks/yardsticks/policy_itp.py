"""The default policy over Microsoft's ITP, ten clusters pooled, through the twin: how long jobs queue."""

from __future__ import annotations

import time

import msgspec

from benchmarks.yardsticks.beat import Beat, report
from benchmarks.yardsticks.section import Report, Section, Traces
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.from_trace import workload_of
from shoal.sim.report import build_report as report_of
from shoal.sim.scenario import Scenario, play
from shoal.sim.traces.table import ITP, read_table

JOBS = "gpu/microsoft-itp-2021.tar.gz"
MACHINE = ClusterShape(160, 8)
RIVALS = (
    ("blocking FIFO", 26_790, True),
    ("skipping FIFO", 4_780, True),
    ("SJF, true durations", 1_875, False),
)


def run(traces: Traces) -> Report:
    """Run it twice. The log names no users, so fair share knows either no projects or the ten clusters."""
    apart = list(read_table(traces.path(JOBS), ITP))
    pooled = [msgspec.structs.replace(job, project=None) for job in apart]
    rows, notes = [], []
    for case, jobs in (("ITP, one project", pooled), ("ITP, a project each", apart)):
        began = time.process_time()
        result = report_of(play(Scenario(workload=workload_of(jobs, nodes_of(MACHINE)))))
        cpu_s = time.process_time() - began
        wait = result.overall.wait_s
        rows += [Beat(case, "mean queue s", name, bound, wait.mean, goal) for name, bound, goal in RIVALS]
        notes.append(
            f"{case}: {len(jobs):,} jobs in {cpu_s:.1f} CPU s; wait p50 {wait.p50:,.0f}, "
            f"p95 {wait.p95:,.0f}, p99.9 {wait.p99_9:,.0f}, max {wait.max:,.0f} s; "
            f"utilisation {result.utilisation:.1%}"
        )
    return report(SECTION.title, rows, notes)


SECTION = Section(
    name="policy-itp",
    title="Default policy, ITP pooled on 160 nodes of 8 GPUs: mean queueing time",
    needs=(JOBS,),
    run=run,
)
