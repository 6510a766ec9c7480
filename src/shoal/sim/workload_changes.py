"""Changes to a workload: nodes added or removed, other quotas, or more jobs.

`grown` shows a workload when more work of the same kind arrives each day.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from random import Random

import msgspec

from shoal.control.project_tree import TREE_HINT, check_tree
from shoal.errors import SpecError
from shoal.model.people import DeviceAmounts, Project
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.facts.snapshot import NodeInfo
from shoal.sim.cluster_shapes import ClusterShape, is_pool, looks_like, nodes_of, parse_shape
from shoal.sim.workload import CountedDevice, WorkJob, Workload

ADDED = "added"
MAX_NAMES = 8
"""Names listed in a sentence. Of more nodes only the first are named."""
IS_SHAPE = re.compile(r"\d+(x.*)?")


def with_nodes(workload: Workload, shapes: Iterable[ClusterShape]) -> Workload:
    """More nodes, or more processors in the pool."""
    nodes = workload.nodes
    for shape in shapes:
        nodes = _pool_of(nodes, shape, "--add", +1) if is_pool(nodes) else _joined(nodes, shape)
    return msgspec.structs.replace(workload, nodes=nodes)


def without_nodes(workload: Workload, removed: Iterable[str]) -> Workload:
    """Remove the nodes of these names, or as many as `4xH100:8` counts of the nodes of that shape, the last
    by name.
    """
    nodes = workload.nodes
    gone = set()
    later = {change.name for change in workload.changes if change.view is not None}
    for text in removed:
        if is_pool(nodes):
            nodes = _pool_of(nodes, parse_shape(text, "--remove"), "--remove", -1)
        elif any(node.name == text for node in nodes):
            nodes = tuple(node for node in nodes if node.name != text)
        elif text in later:
            gone.add(text)
        elif IS_SHAPE.fullmatch(text):
            nodes = _less(nodes, parse_shape(text, "--remove"))
        else:
            raise _no_such_node(text, [node.name for node in nodes])
    if not nodes:
        raise SpecError("`--remove`: no node would be left", hint="remove fewer")
    names = gone | {node.name for node in workload.nodes} - {node.name for node in nodes}
    changes = [change for change in workload.changes if change.name not in names]
    return msgspec.structs.replace(workload, nodes=nodes, changes=changes)


def _no_such_node(text: str, names: list[str]) -> SpecError:
    near = get_close_matches(text, names, 1)
    shown = f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"
    there = ", ".join(names) if len(names) <= MAX_NAMES else shown
    return SpecError(
        f"`--remove {text}`: no node has that name; there are {there or 'none left'}",
        hint=f"--remove {near[0]}" if near else "`--remove NAME`, one of those",
    )


def with_quotas(workload: Workload, quotas: Mapping[str, float]) -> Workload:
    """Guarantee this many devices to each of these projects. Their other settings stay."""
    views = {view.name: view for view in workload.projects}
    projects = {job.project for job in workload.jobs} | views.keys()
    for name, amount in quotas.items():
        if name not in projects:
            near = get_close_matches(name, sorted(projects), 1)
            raise SpecError(
                f"`--quota {name}={amount:g}`: no project `{name}`; "
                f"there are {', '.join(sorted(projects)[:8])}",
                hint=f"--quota {near[0] if near else min(projects)}={amount:g}",
            )
        view = views.get(name) or ProjectInfo(name=name)
        if workload.device is CountedDevice.GPU:
            devices = DeviceAmounts(gpus=int(amount), cpus=view.quota.cpus if view.quota else None)
        else:
            devices = DeviceAmounts(gpus=view.quota.gpus if view.quota else None, cpus=amount)
        views[name] = msgspec.structs.replace(view, quota=devices)
    for name, amount in quotas.items():
        _check_quota(views, name, amount)
    return msgspec.structs.replace(workload, projects=tuple(views[name] for name in sorted(views)))


def _check_quota(views: Mapping[str, ProjectInfo], name: str, amount: float) -> None:
    """Refuse what `shoal project update` would refuse."""
    projects = {view.name: Project(uid=0, **msgspec.structs.asdict(view)) for view in views.values()}
    try:
        check_tree(projects.values(), projects[name])
    except SpecError as error:
        raise SpecError(
            f"`--quota {name}={amount:g}`: {error.message}", hint=f"give less, or {TREE_HINT}"
        ) from None


def parse_quotas(texts: Iterable[str]) -> dict[str, float]:
    """Parse texts such as `vision=64`."""
    quotas: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.rpartition("=")
        if not name or not amount.isdigit():
            raise SpecError(f"`--quota {text}`: a quota is PROJECT=DEVICES", hint="--quota vision=64")
        quotas[name] = int(amount)
    return quotas


def _pool_of(
    nodes: tuple[NodeInfo, ...], shape: ClusterShape, option: str, sign: int
) -> tuple[NodeInfo, ...]:
    (pool,) = nodes
    if shape.gpus:
        raise SpecError(
            f"`{option} {shape}`: this trace has {pool.cpus:g} processors in one pool, not nodes",
            hint=f"{option} {shape.devices}",
        )
    left = pool.cpus + sign * shape.count
    if left <= 0:
        raise SpecError(
            f"`{option} {shape}`: there are {pool.cpus:g} processors", hint=f"{option} {pool.cpus / 2:.0f}"
        )
    return (msgspec.structs.replace(pool, cpus=left),)


def _joined(nodes: tuple[NodeInfo, ...], shape: ClusterShape) -> tuple[NodeInfo, ...]:
    """New nodes copy an existing node with the same GPUs, if there is one, except for its name.

    Nodes of a new kind get the memory and disk of the largest existing node.
    """
    if not shape.gpus:
        raise SpecError(f"`--add {shape}`: how many GPUs has a node?", hint=f"--add {shape.count}x8")
    taken = sum(node.name.startswith(f"{ADDED}-") for node in nodes)
    new = nodes_of(shape, prefix=ADDED, first=taken + 1)
    model = next((node for node in nodes if looks_like(node, shape)), None)
    if model is not None:
        model = msgspec.structs.replace(model, closed_because=None, labels={})
        return (*nodes, *(msgspec.structs.replace(model, name=node.name) for node in new))
    memory_bytes = max((node.memory_bytes for node in nodes), default=0)
    disk_bytes = max((node.disk_bytes for node in nodes), default=0)
    sized = (msgspec.structs.replace(node, memory_bytes=memory_bytes, disk_bytes=disk_bytes) for node in new)
    return (*nodes, *sized)


def _less(nodes: tuple[NodeInfo, ...], shape: ClusterShape) -> tuple[NodeInfo, ...]:
    alike = sorted(node.name for node in nodes if looks_like(node, shape))
    if len(alike) < shape.count:
        raise SpecError(
            f"`--remove {shape}`: there are {len(alike)} such nodes",
            hint=f"--remove {shape.of(len(alike))}" if alike else None,
        )
    gone = set(alike[len(alike) - shape.count :])
    return tuple(node for node in nodes if node.name not in gone)


MONTHS = {"month": 1.0, "quarter": 3.0, "year": 12.0}
WORDS = re.compile(r"(?P<percent>\d+(?:\.\d+)?)%(?:/(?P<unit>\w+))?")
JITTER_S = 3600.0
"""A copy arrives up to this much later. Bursts stay bursts, and no two jobs always arrive together."""
JITTER_PART = 1 / 24
"""For a log shorter than a day, the delay is up to this part of the log: more would spread its jobs, not add
to them.
"""
SHORT_S = 86400.0
"""A shorter log has not seen a day and a night."""

MAX_TIMES = 1000.0
MAX_JOBS = 2_000_000
"""The most jobs in a simulation: more would fill the memory of most machines."""


def growth(text: str, horizon_months: float) -> float:
    """`30%/month` over three months is 2.197 times."""
    match = WORDS.fullmatch(text.strip())
    unit = (match["unit"] or "month") if match else ""
    if match is None or unit not in MONTHS:
        raise SpecError(
            f"`--growth {text}`: write a percentage per {', '.join(MONTHS)}", hint="--growth 30%/month"
        )
    if not 0 <= horizon_months < math.inf:
        raise SpecError(f"`--horizon {horizon_months:g}`: months from now, 0 or more", hint="--horizon 3")
    share, units = float(match["percent"]) / 100, horizon_months / MONTHS[unit]
    if math.log1p(share) * units > math.log(MAX_TIMES):
        raise SpecError(
            f"`--growth {text}` over {horizon_months:g} months is more than {MAX_TIMES:,.0f} times the jobs",
            hint="--growth 30%/month --horizon 3",
        )
    return float((1 + share) ** units)


def grown(workload: Workload, times: float, *, seed: int = 1) -> Workload:
    """`times` as many jobs, spread evenly over the log. Each is a job of the log, or a copy of one.

    The same seed gives the same jobs. Requests and run times stay as they are.
    """
    if times == 1:
        return workload
    if len(workload.jobs) * times > MAX_JOBS:
        raise SpecError(
            f"{len(workload.jobs) * times:,.0f} jobs are too many to simulate; at most {MAX_JOBS:,} are",
            hint="use a smaller `--growth`, or give a shorter part of the trace",
        )
    random = Random(seed)
    jitter_s = min(JITTER_S, JITTER_PART * span_s(workload))
    jobs: list[WorkJob] = []
    due = 0.0
    for job in workload.jobs:
        due += times
        jobs += [_copy(job, copy, random.uniform(0.0, jitter_s)) if copy else job for copy in range(int(due))]
        due -= int(due)
    jobs.sort(key=lambda job: job.submitted_at)
    return msgspec.structs.replace(workload, jobs=jobs)


def span_s(workload: Workload) -> float:
    """From the first submission to the last."""
    return workload.jobs[-1].submitted_at - workload.jobs[0].submitted_at if workload.jobs else 0.0


def _copy(job: WorkJob, number: int, later_s: float) -> WorkJob:
    return msgspec.structs.replace(
        job,
        job_id=f"{job.job_id}+{number}",
        submitted_at=job.submitted_at + later_s,
        array_id=job.array_id and f"{job.array_id}+{number}",
        deadline_at=None if job.deadline_at is None else job.deadline_at + later_s,
    )
