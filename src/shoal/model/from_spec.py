"""What a spec asks of the cluster, in the model's terms: defaults filled in, ranges settled.

CPUs, memory and disk are allocated at the lower end of their range; the number of nodes keeps both ends.
"""

from __future__ import annotations

from shoal.model.job import RetryPolicy
from shoal.model.request import GpuRequest, Request, TopologyRequest
from shoal.spec import JobSpec
from shoal.spec.clauses import TopologySpec
from shoal.spec.job import MAX_RANKS
from shoal.spec.launchers import Asked, asked_in
from shoal.spec.resources import MAX_NODES, GpuSpec
from shoal.wire import LogRule, Mount, RuleAction

WHOLE = 1000
"""Parts of one GPU."""


def request_of(spec: JobSpec) -> Request:
    asked = spec.resources
    gpus = _gpus_of(asked.gpus) if asked.gpus else None
    launched = asked_in(spec.run)
    min_nodes, max_nodes = _nodes_of(spec, launched)
    started = launched.ranks_on(max_nodes)
    started = started if started is not None and started <= MAX_RANKS else None
    ranks = spec.ranks_per_node or started or _ranks_of_mpi(spec, launched) or (gpus.count if gpus else 1)
    return Request(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        cpus=asked.cpus.min if asked.cpus else float(ranks),
        memory_bytes=asked.memory.min if asked.memory else None,
        disk_bytes=asked.disk.min if asked.disk else 0,
        gpus=gpus,
        ranks_per_node=ranks,
        is_exclusive=asked.exclusive,
        exclude=tuple(sorted(set(asked.exclude_nodes))),
        require=tuple(sorted(asked.require.items())),
        topology=_topology_of(spec.topology) if spec.topology else None,
        time_limit_s=spec.time_limit,
        grace_s=spec.grace if spec.time_limit is not None else 0.0,
    )


def _nodes_of(spec: JobSpec, asked: Asked) -> tuple[int, int]:
    """At least and at most. A launcher in `run` says it where the job has no more than the one by default."""
    own = spec.resources.nodes
    low, high = asked.nodes or (own.min, own.max)
    if (own.min, own.max) == (1, 1):
        return (low, min(high, MAX_NODES)) if low > 1 else (1, 1)
    return max(own.min, low), min(own.max, high)


def _ranks_of_mpi(spec: JobSpec, asked: Asked) -> int | None:
    """How many processes on a node `mpirun -n` asks for, where a job of several nodes says no number."""
    nodes = spec.resources.nodes
    if asked.mpi_in_all is None or nodes.min != nodes.max or nodes.min == 1:
        return None
    each, rest = divmod(asked.mpi_in_all, nodes.min)
    return each if rest == 0 and 1 <= each <= MAX_RANKS else None


def _gpus_of(asked: GpuSpec) -> GpuRequest:
    milli = WHOLE if asked.share is None else round(asked.share * WHOLE)
    return GpuRequest(count=asked.count, kind=asked.kind, milli=milli)


def _topology_of(asked: TopologySpec) -> TopologyRequest:
    is_required = asked.within is not None and asked.mode == "required"
    return TopologyRequest(within=asked.within, is_required=is_required, spread=asked.spread)


def retry_of(spec: JobSpec) -> RetryPolicy:
    retry = spec.retry
    return RetryPolicy(
        max_retries=retry.max, on=frozenset(retry.on), backoff_s=retry.backoff, in_place=retry.in_place
    )


def mounts_of(spec: JobSpec) -> tuple[Mount, ...]:
    return tuple(Mount(source=m.source, target=m.target, is_read_only=m.read_only) for m in spec.mounts)


def log_rules_of(spec: JobSpec) -> tuple[LogRule, ...]:
    return tuple(LogRule(match=rule.match, action=RuleAction(rule.action)) for rule in spec.log_rules)
