"""What a spec asks of the cluster, in the model's terms: defaults filled in, ranges settled.

CPUs, memory and disk are allocated at the lower end of their range; the number of nodes keeps both ends.
"""

from __future__ import annotations

import re

from shoal.model.job import RetryPolicy
from shoal.model.request import GpuRequest, Request, TopologyRequest
from shoal.spec import JobSpec
from shoal.spec.clauses import TopologySpec
from shoal.spec.job import MAX_RANKS
from shoal.spec.resources import GpuSpec
from shoal.wire import LogRule, Mount, RuleAction

_PER_NODE = re.compile(
    r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|deepspeed)\s[^\n;&|]*"
    r"--(?:nproc[-_]per[-_]node|num_gpus)[= ](\d{1,4})\b"
)
_IN_ALL = re.compile(
    r"(?:^|[\s;&|])(?:mpirun|mpiexec|orterun|prterun)(?:\.\w+)?\s+(?:-\S+\s+)*?"
    r"(?:-n|-np|--n|--np)[= ](\d{1,6})\s"
)
"""No option with a value may stand before it: `-n` may as well be the program's own."""
WHOLE = 1000
"""Parts of one GPU."""


def request_of(spec: JobSpec) -> Request:
    asked = spec.resources
    gpus = _gpus_of(asked.gpus) if asked.gpus else None
    ranks = spec.ranks_per_node or ranks_in(spec.run) or _ranks_of_mpi(spec) or (gpus.count if gpus else 1)
    return Request(
        min_nodes=asked.nodes.min,
        max_nodes=asked.nodes.max,
        cpus=asked.cpus.min if asked.cpus else float(ranks),
        memory_bytes=asked.memory.min if asked.memory else None,
        disk_bytes=asked.disk.min if asked.disk else 0,
        gpus=gpus,
        ranks_per_node=ranks,
        is_exclusive=asked.exclusive,
        exclude=tuple(sorted(set(asked.exclude))),
        require=tuple(sorted(asked.require.items())),
        topology=_topology_of(spec.topology) if spec.topology else None,
        time_limit_s=spec.time_limit,
        grace_s=spec.grace if spec.time_limit is not None else 0.0,
    )


def ranks_in(run: str) -> int | None:
    """How many processes on a node a launcher in the script asks for; Shoal starts them in its place."""
    match = _PER_NODE.search(run)
    count = int(match[1]) if match is not None else 0
    return count if 1 <= count <= MAX_RANKS else None


def _ranks_of_mpi(spec: JobSpec) -> int | None:
    """How many processes on a node `mpirun -n` asks for, where a job of several nodes says no number itself.
    On one node `mpirun` may start them in a single rank.
    """
    nodes, match = spec.resources.nodes, _IN_ALL.search(spec.run)
    if match is None or nodes.min != nodes.max or nodes.min == 1:
        return None
    each, rest = divmod(int(match[1]), nodes.min)
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
