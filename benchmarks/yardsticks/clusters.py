"""Two months of Microsoft's Philly on its virtual clusters, first in, first out: completion and queueing
times.
"""

from __future__ import annotations

import csv
from datetime import UTC, datetime

import numpy as np

from benchmarks.yardsticks.gate import Gate, report
from benchmarks.yardsticks.section import Report, Section, Traces
from shoal.sim.loop import GpuNodes, simulate
from shoal.sim.references.virtual_clusters import FifoInClusters
from shoal.sim.traces.table import PHILLY, read_table

JOBS, CLUSTERS = "gpu/philly_pass_82247.csv.gz", "gpu/philly_vc.csv"
GPUS_PER_NODE = 8
BEGIN = datetime(2017, 10, 1, tzinfo=UTC).timestamp()
END = datetime(2017, 12, 1, tzinfo=UTC).timestamp()
NUM_JOBS = "68503"
PUBLISHED = {
    "6214e9": ("5454.62", "5.76"),
    "11cb48": ("3110.67", "240.98"),
    "2869ce": ("97749.20", "11343.37"),
    "103959": ("24783.52", "246.21"),
    "all": ("11585", "105"),
}


def clusters(traces: Traces) -> dict[str, range]:
    """The nodes of each virtual cluster: consecutive numbers."""
    nodes: dict[str, range] = {}
    with traces.path(CLUSTERS).open(newline="") as lines:
        for row in csv.DictReader(lines):
            begin = sum(map(len, nodes.values()))
            nodes[row["vc"]] = range(begin, begin + int(row["node num"]))
    return nodes


def run(traces: Traces) -> Report:
    nodes_of = clusters(traces)
    jobs = [
        job
        for job in read_table(traces.path(JOBS), PHILLY)
        if BEGIN <= job.submitted_at < END and job.project in nodes_of
    ]
    jobs.sort(key=lambda job: job.submitted_at)
    machine = GpuNodes([GPUS_PER_NODE] * sum(map(len, nodes_of.values())))
    schedule = simulate(jobs, machine, FifoInClusters(nodes_of))
    queued = np.array(schedule.starts) - np.array([job.submitted_at for job in jobs])
    finished = queued + np.array([job.run_s for job in jobs])
    gates = [Gate("all", "jobs", NUM_JOBS, len(jobs))]
    for name, (completion, queue) in PUBLISHED.items():
        chosen = np.array([name in {"all", job.project} for job in jobs])
        gates.append(Gate(name, "FIFO, completion s", completion, float(finished[chosen].mean())))
        gates.append(Gate(name, "FIFO, queue s", queue, float(queued[chosen].mean())))
    return report(SECTION.title, gates)


SECTION = Section(
    name="clusters",
    title="Philly, October and November 2017: FIFO in 11 virtual clusters of nodes with 8 GPUs",
    needs=(JOBS, CLUSTERS),
    run=run,
)
