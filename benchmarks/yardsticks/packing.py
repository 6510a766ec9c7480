"""Share of GPUs allocated in Alibaba's GPU-sharing cluster: random, best fit and FGD (Weng et al., ATC'23).

The published runs shuffle with Go's generator, ours with Python's. The ten orders differ, so means are
compared with the standard error of their difference. As published, a random number comes before each node's
name: among nodes with equal scores the first name wins.
"""

from __future__ import annotations

import csv
import time
from collections import defaultdict
from math import sqrt
from random import Random
from statistics import fmean, stdev

import msgspec

from benchmarks.yardsticks.gate import Gate, report
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.sim.references.fragmentation import Fgd, Fragments
from shoal.sim.references.pod_packing import BestFit, Packer, PackingCluster, RandomFit, fill, overfilled
from shoal.sim.traces.openb import GpuNode, Pod, read_nodes, read_pods
from shoal.sim.traces.trace import open_text

NODES, RUNS = "openb/openb_node_list_gpu_node.csv.gz", "openb/fgd_published_allocation.csv.gz"
SEEDS = range(42, 52)
RATIO = 1.3
POLICIES = {"random": "01-Random", "best fit": "05-BestFit", "FGD": "06-FGD"}
"""Our name, and the name in the published runs."""
PUBLISHED = {
    "default": ("87.47", "93.08", "95.39"),
    "cpu050": ("91.24", "93.79", "95.21"),
    "gpushare40": ("86.00", "91.69", "94.15"),
    "gpuspec25": ("86.94", "93.23", "94.74"),
    "multigpu30": ("89.27", "94.72", "96.46"),
}


def packer(policy: str, cluster: PackingCluster, pods: list[Pod], random: Random) -> Packer:
    if policy == "FGD":
        return Fgd(cluster, Fragments(pods))
    return RandomFit(random) if policy == "random" else BestFit()


def pods_file(workload: str) -> str:
    return f"openb/openb_pod_list_{workload}.csv.gz"


def renamed(nodes: list[GpuNode], random: Random) -> list[GpuNode]:
    order = random.sample(range(len(nodes)), len(nodes))
    return [
        msgspec.structs.replace(node, name=f"{number:06}-{node.name}")
        for number, node in zip(order, nodes, strict=True)
    ]


def published_runs(traces: Traces) -> dict[tuple[str, str], list[float]]:
    """Return, per workload and policy, what each published run had allocated in the end."""
    runs = defaultdict(list)
    with open_text(traces.path(RUNS)) as lines:
        for row in csv.DictReader(lines):
            workload = row["workload"].removeprefix("openb_pod_list_")
            runs[workload, row["sc_policy"]].append(float(row["130"]))
    return runs


def run(traces: Traces) -> Report:
    nodes = read_nodes(traces.path(NODES))
    theirs = published_runs(traces)
    gates = []
    for workload, row in PUBLISHED.items():
        pods = read_pods(traces.path(pods_file(workload)))
        for (policy, label), published in zip(POLICIES.items(), row, strict=True):
            began, ours = time.process_time(), []
            for seed in SEEDS:
                random = Random(seed)
                cluster = PackingCluster(renamed(nodes, Random(f"names {seed}")))
                order = overfilled(pods, cluster.capacity_milli, RATIO, random)
                ours.append(100 * fill(cluster, order, packer(policy, cluster, pods, random)))
            say(f"{workload}, {policy}: {len(ours)} runs, {time.process_time() - began:.1f} CPU s")
            spread = [stdev(runs) ** 2 / len(runs) for runs in (ours, theirs[workload, label])]
            gates.append(Gate(workload, policy, published, fmean(ours), sqrt(sum(spread))))
    return report(
        SECTION.title, gates, ["counted as published: within three standard errors of the difference"]
    )


SECTION = Section(
    name="packing",
    title="Packing on openb: % of 6,212 GPUs allocated, mean of 10 orders",
    needs=(NODES, RUNS, *map(pods_file, PUBLISHED)),
    run=run,
)
