"""A trace as a workload: its format, its jobs' requests, and its nodes."""

from __future__ import annotations

import csv
import tarfile
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from math import ceil
from pathlib import Path

from shoal.model.job import GpuRequest, ResourceRequest
from shoal.scheduler.facts.snapshot import NodeInfo
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.traces.swf import MissingLimit, SwfRules, read_header, read_swf
from shoal.sim.traces.table import ITP, PHILLY, REQUIRED, SHOAL, Columns, read_table
from shoal.sim.traces.trace import TraceError, TraceJob, open_text, tables_in
from shoal.sim.workload import WorkJob, Workload

SWF_RULES = SwfRules(missing_limit=MissingLimit.RUN, is_limit_raised_to_run=True)
TABLES: tuple[Columns, ...] = (SHOAL, ITP, PHILLY)
COLUMNS_HINT = "docs/guides/yardsticks.md lists the columns of a trace"


def read_workload(path: Path, shape: ClusterShape | None = None) -> Workload:
    """The trace on `shape`. A log in SWF may itself contain the number of processors.

    The content determines the format. `TraceError`: the format or the size of the cluster is unknown.
    """
    columns = _columns(path)
    if columns is None:
        jobs = list(read_swf(path, SWF_RULES))
        shape = shape or _written_in(path)
    else:
        jobs = list(read_table(path, columns))
    if not jobs:
        raise TraceError(f"{path}: no jobs")
    if shape is None:
        example = "160x8" if any(job.num_gpus for job in jobs) else "1024"
        raise TraceError(f"{path} does not contain the size of the cluster", hint=f"--nodes {example}")
    if shape.gpus and not any(job.num_gpus for job in jobs):
        widest = max(job.num_processors for job in jobs)
        raise TraceError(
            f"no job of {path} asks for a GPU: on nodes of {shape.gpus} GPUs nothing would be in use",
            hint=_pool_of(widest) if widest else f"the column is `num_gpus`; {COLUMNS_HINT}",
        )
    return workload_of(jobs, nodes_of(shape), has_our_queues=columns is SHOAL)


def _pool_of(num_processors: int) -> str:
    return f"processors in one pool, at least {num_processors:,}: --nodes {num_processors}"


def workload_of(
    jobs: Sequence[TraceJob], nodes: tuple[NodeInfo, ...], *, has_our_queues: bool = False
) -> Workload:
    """Jobs in any order, on these nodes.

    Queues of other systems stand for limits and rights that ours do not have, so all jobs wait in one queue.
    """
    widest = max((len(node.gpus) for node in nodes), default=0)
    ordered = sorted(jobs, key=lambda job: job.submitted_at)
    return Workload(nodes=nodes, jobs=[_work(job, widest, has_our_queues=has_our_queues) for job in ordered])


def _work(job: TraceJob, widest: int, *, has_our_queues: bool) -> WorkJob:
    return WorkJob(
        job_id=job.job_id,
        submitted_at=job.submitted_at,
        run_s=job.run_s,
        request=_request(job, widest),
        project=job.project or "default",
        user=job.user or "",
        name=job.name or "",
        queue=(has_our_queues and job.queue) or "default",
    )


def _request(job: TraceJob, widest: int) -> ResourceRequest:
    """The request of a job. If it needs more GPUs than a node has, it asks for the fewest nodes with equal
    GPUs on each.

    A limit below the run time is raised to it: a scheduler that plans by limits must never see an overrun.
    """
    limit_s = None if job.limit_s is None else max(job.limit_s, job.run_s)
    if not job.num_gpus:
        nodes = job.num_nodes or 1
        return _alike(nodes, (job.num_cpus or job.num_processors or 1) / nodes, 0, limit_s)
    nodes = job.num_nodes or (ceil(job.num_gpus / widest) if widest else 1)
    gpus = ceil(job.num_gpus / nodes)
    return _alike(nodes, job.num_cpus / nodes if job.num_cpus else gpus, gpus, limit_s)


@lru_cache(maxsize=1 << 16)
def _alike(nodes: int, cpus: float, gpus: int, limit_s: float | None) -> ResourceRequest:
    return ResourceRequest(
        min_nodes=nodes,
        max_nodes=nodes,
        cpus=cpus,
        gpus=GpuRequest(count=gpus) if gpus else None,
        time_limit_s=limit_s,
    )


def _written_in(path: Path) -> ClusterShape | None:
    facts = read_header(path)
    limits = (facts.get("MaxProcs") or facts.get("MaxNodes") or "").split()
    return ClusterShape(int(limits[0])) if limits and limits[0].isdigit() and int(limits[0]) else None


def _columns(path: Path) -> Columns | None:
    """The kind of table. None for SWF, whose lines are numbers or begin with a semicolon."""
    header = _first_line(path)
    if header.startswith(";") or all(_is_number(word) for word in header.split()):
        return None
    names = {name.strip() for name in next(csv.reader([header]))}
    for columns in TABLES:
        if all(getattr(columns, field) in names for field in REQUIRED):
            return columns
    raise TraceError(
        f"{path}: neither SWF nor a table with `submitted_at` and `run_s`: it begins `{header[:80]}`",
        hint=COLUMNS_HINT,
    )


def unread_columns(path: Path) -> list[str]:
    """Unknown columns of a table with our names, each with the nearest known one. Tables of other sources may
    have any columns.
    """
    if _columns(path) is not SHOAL:
        return []
    names = [name.strip() for name in next(csv.reader([_first_line(path)]))]
    columns = Columns.__struct_fields__
    near = {name: get_close_matches(name, columns, 1) for name in names if name not in columns}
    return [
        f"`{name}`" + (f" (did you mean `{matches[0]}`?)" if matches else "")
        for name, matches in near.items()
    ]


def _first_line(path: Path) -> str:
    if path.is_file() and tarfile.is_tarfile(path):
        return next((lines.readline().strip() for _, lines in tables_in(path)), "")
    with open_text(path) as lines:
        return next((line.strip() for line in lines if line.strip()), "")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
