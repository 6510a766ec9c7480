"""What Shoal's own fit leaves unused of Alibaba's GPU-sharing cluster, beside FGD's published runs.

FGD knows beforehand how often each kind of pod is requested. The scheduler sees only what runs and waits.
"""

from __future__ import annotations

import time
from math import inf
from random import Random
from statistics import fmean

from benchmarks.yardsticks.beat import Beat, report
from benchmarks.yardsticks.packing import NODES, PUBLISHED, RATIO, SEEDS, pods_file
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.scheduler.facts.amounts import Need
from shoal.scheduler.facts.capacity import Capacity
from shoal.scheduler.facts.snapshot import GpuInfo, NodeInfo
from shoal.scheduler.placement.fit import NodeFinders, task_on
from shoal.scheduler.placement.packing import needed_shape
from shoal.sim.references.pod_packing import overfilled
from shoal.sim.traces.openb import MILLI, GpuNode, Pod, read_nodes, read_pods

MIB = 1 << 20


def view_of(node: GpuNode) -> NodeInfo:
    return NodeInfo(
        name=node.name,
        cpus=node.cpu_milli / MILLI,
        memory_bytes=node.memory_mib * MIB,
        gpus=tuple(GpuInfo(index, node.model or "GPU") for index in range(node.num_gpus)),
    )


def need_of(pod: Pod) -> Need:
    return Need(
        millicpus=pod.cpu_milli,
        memory_bytes=pod.memory_mib * MIB,
        disk_bytes=0,
        num_gpus=pod.num_gpus,
        gpu_kind="|".join(pod.models) if pod.models and pod.num_gpus else None,
        gpu_milli=pod.gpu_milli or MILLI,
    )


def unused(views: list[NodeInfo], pods: list[Pod]) -> float:
    """The share of all GPUs that is free when every pod has arrived, in this order, and has started
    or waits.
    """
    capacity = Capacity(views)
    finders, total, given = NodeFinders(capacity), sum(len(view.gpus) for view in views) * MILLI, 0
    for pod in pods:
        need = need_of(pod)
        capacity.packing.learn(capacity.shape_counts.profile())
        names = finders.of(need).ranked(frozenset(), 1)
        if names:
            capacity.take(task_on(need, capacity.nodes[names[0]]), inf)
            given += pod.total_gpu_milli
        else:
            capacity.shape_counts.count(needed_shape(need), 1)
    return 1 - given / total


def run(traces: Traces) -> Report:
    nodes = read_nodes(traces.path(NODES))
    views, total = [view_of(node) for node in nodes], sum(node.num_gpus for node in nodes) * MILLI
    rows = []
    for workload, (*_, published) in PUBLISHED.items():
        pods, began = read_pods(traces.path(pods_file(workload))), time.process_time()
        ours = [100 * unused(views, overfilled(pods, total, RATIO, Random(seed))) for seed in SEEDS]
        say(f"{workload}: {len(ours)} runs, {time.process_time() - began:.1f} CPU s")
        rows.append(Beat(workload, "% unused", "FGD", 100 - float(published), fmean(ours)))
    return report(SECTION.title, rows)


SECTION = Section(
    name="policy-packing",
    title="Shoal's fit on openb: % of 6,212 GPUs left unused, mean of 10 orders",
    needs=(NODES, *map(pods_file, PUBLISHED)),
    run=run,
)
