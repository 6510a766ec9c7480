"""The twin is right: the production scheduler, given nothing but time limits, is EASY with shortest-first.

Nothing of the reference policies runs here: nodes, planner, promises and the twin's clock are the product's.
"""

from __future__ import annotations

import time

from benchmarks.yardsticks.gate import Gate, report
from benchmarks.yardsticks.logs import LOGS, RULES, VARIANTS
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.scheduler import Policy
from shoal.sim.assumptions import LimitStamper
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.from_trace import workload_of
from shoal.sim.report import build_report as report_of
from shoal.sim.traces.swf import read_swf
from shoal.sim.twin import simulate_workload

SHORTEST = VARIANTS[1]


def run(traces: Traces) -> Report:
    gates = []
    for place, (log, file, capacity) in enumerate(LOGS):
        jobs = list(read_swf(traces.path(file), RULES))
        began = time.process_time()
        workload = workload_of(jobs, nodes_of(ClusterShape(capacity)))
        result = report_of(simulate_workload(workload, Policy(), stamper=LimitStamper()))
        say(f"{log}: {len(jobs):,} jobs in {time.process_time() - began:.1f} CPU s")
        gates.append(Gate(log, SHORTEST.name, SHORTEST.means[place], result.overall.slowdown.mean))
    return report(SECTION.title, gates)


SECTION = Section(
    name="twin",
    title="The production scheduler with limits alone: mean bounded slowdown, as EASY shortest-first",
    needs=tuple(file for _, file, _ in LOGS),
    run=run,
)
