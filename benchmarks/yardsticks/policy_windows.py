"""The default policy in RLScheduler's ten windows, through the twin, beside the best published policy."""

from __future__ import annotations

import time
from statistics import fmean

from benchmarks.yardsticks.beat import Beat, report
from benchmarks.yardsticks.section import Report, Section, Traces
from benchmarks.yardsticks.windows import LENGTH, LOGS, RULES, STARTS
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.from_trace import workload_of
from shoal.sim.report import build_report as report_of
from shoal.sim.scenario import Scenario, play
from shoal.sim.traces.swf import read_swf

BEST = {"Lublin-1": 58.64, "HPC2N": 71.95}


def run(traces: Traces) -> Report:
    rows, notes = [], []
    for log, file, capacity in LOGS:
        jobs = list(read_swf(traces.path(file), RULES))
        began = time.process_time()
        means = []
        for start in STARTS:
            workload = workload_of(jobs[start : start + LENGTH], nodes_of(ClusterShape(capacity)))
            means.append(report_of(play(Scenario(workload=workload))).overall.slowdown.mean)
        rows.append(Beat(log, "mean slowdown", "best published", BEST[log], fmean(means)))
        each = " ".join(f"{mean:.0f}" for mean in means)
        notes.append(f"{log}: windows {each}; {time.process_time() - began:.1f} CPU s")
        missing = sum(job.limit_s == job.run_s for job in jobs)
        notes.append(
            f"{log}: {missing / len(jobs):.0%} of the limits are the run time itself, for all on its row"
        )
    notes.append("each window begins with nothing learned, as it begins with an empty machine")
    return report(SECTION.title, rows, notes)


SECTION = Section(
    name="policy-windows",
    title="Default policy, 10 windows of 1,024 jobs: mean bounded slowdown beside the best published",
    needs=tuple(file for _, file, _ in LOGS),
    run=run,
)
