"""Turn a spec into the model's resource request: defaults filled in, ranges settled.

CPUs, memory and disk are allocated at the lower end of their range. The number of nodes keeps both ends.
"""

from __future__ import annotations

from shoal.model.job import GpuRequest, ResourceRequest, RetryPolicy, TopologyRequest
from shoal.spec import JobSpec
from shoal.spec.job import MAX_RANKS
from shoal.spec.job_fields import TopologySpec
from shoal.spec.launchers import LauncherRequest, launcher_request
from shoal.spec.resources import MAX_NODES, GpuSpec
from shoal.wire import LogRule, Mount, RuleAction

WHOLE = 1000
"""Thousandths in one GPU."""


def request_of(spec: JobSpec) -> ResourceRequest:
    resources = spec.resources
    gpus = _gpus_of(resources.gpus) if resources.gpus else None
    launched = launcher_request(spec.run)
    min_nodes, max_nodes = _nodes_of(spec, launched)
    started = launched.ranks_on(max_nodes)
    started = started if started is not None and started <= MAX_RANKS else None
    ranks = spec.ranks_per_node or started or _ranks_of_mpi(spec, launched) or (gpus.count if gpus else 1)
    return ResourceRequest(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        cpus=resources.cpus.min if resources.cpus else float(ranks),
        memory_bytes=resources.memory.min if resources.memory else None,
        disk_bytes=resources.disk.min if resources.disk else 0,
        gpus=gpus,
        ranks_per_node=ranks,
        is_exclusive=resources.exclusive,
        exclude=tuple(sorted(set(resources.exclude_nodes))),
        require=tuple(sorted(resources.require.items())),
        topology=_topology_of(spec.topology) if spec.topology else None,
        time_limit_s=spec.time_limit,
        grace_s=spec.grace if spec.time_limit is not None else 0.0,
    )


def _nodes_of(spec: JobSpec, launch: LauncherRequest) -> tuple[int, int]:
    """The least and the most nodes. If the job leaves the default of one node, a launcher in
    `run` sets them.
    """
    node_range = spec.resources.nodes
    low, high = launch.nodes or (node_range.min, node_range.max)
    if (node_range.min, node_range.max) == (1, 1):
        return (low, min(high, MAX_NODES)) if low > 1 else (1, 1)
    return max(node_range.min, low), min(node_range.max, high)


def _ranks_of_mpi(spec: JobSpec, launch: LauncherRequest) -> int | None:
    """Processes per node that `mpirun -n` asks for, if a job on several nodes sets no number itself."""
    nodes = spec.resources.nodes
    if launch.mpi_in_all is None or nodes.min != nodes.max or nodes.min == 1:
        return None
    each, rest = divmod(launch.mpi_in_all, nodes.min)
    return each if rest == 0 and 1 <= each <= MAX_RANKS else None


def _gpus_of(gpus: GpuSpec) -> GpuRequest:
    milli = WHOLE if gpus.share is None else round(gpus.share * WHOLE)
    return GpuRequest(count=gpus.count, kind=gpus.kind, milli=milli)


def _topology_of(topology: TopologySpec) -> TopologyRequest:
    is_required = topology.within is not None and topology.mode == "required"
    return TopologyRequest(within=topology.within, is_required=is_required, spread=topology.spread)


def retry_of(spec: JobSpec) -> RetryPolicy:
    retry = spec.retry
    return RetryPolicy(
        max_retries=retry.max, on=frozenset(retry.on), backoff_s=retry.backoff, in_place=retry.in_place
    )


def mounts_of(spec: JobSpec) -> tuple[Mount, ...]:
    return tuple(Mount(source=m.source, target=m.target, is_read_only=m.read_only) for m in spec.mounts)


def log_rules_of(spec: JobSpec) -> tuple[LogRule, ...]:
    return tuple(LogRule(match=rule.match, action=RuleAction(rule.action)) for rule in spec.log_rules)
