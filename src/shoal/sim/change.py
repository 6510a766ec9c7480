"""What if: a workload, with nodes added or taken away, or more guaranteed to a project."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import msgspec

from shoal.control.tree import LOOK, check_tree
from shoal.errors import SpecError
from shoal.model.people import Devices, Project
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.snapshot import NodeView
from shoal.sim.machines import Shape, is_pool, looks_like, nodes_of, parse_shape
from shoal.sim.workload import Device, Workload

ADDED = "added"
MAX_NAMES = 8
"""In a sentence; of more nodes the first are named."""
IS_SHAPE = re.compile(r"\d+(x.*)?")


def with_nodes(workload: Workload, shapes: Iterable[Shape]) -> Workload:
    """More nodes, or more processors in the pool."""
    nodes = workload.nodes
    for shape in shapes:
        nodes = _pool_of(nodes, shape, "--add", +1) if is_pool(nodes) else _joined(nodes, shape)
    return msgspec.structs.replace(workload, nodes=nodes)


def without_nodes(workload: Workload, removed: Iterable[str]) -> Workload:
    """Without the nodes of these names, or without so many that look like `4xH100:8`, the last by name."""
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
    """So many devices guaranteed to each of these projects; what else is set for them stays."""
    views = {view.name: view for view in workload.projects}
    known = {job.project for job in workload.jobs} | views.keys()
    for name, amount in quotas.items():
        if name not in known:
            near = get_close_matches(name, sorted(known), 1)
            raise SpecError(
                f"`--quota {name}={amount:g}`: no project `{name}`; there are {', '.join(sorted(known)[:8])}",
                hint=f"--quota {near[0] if near else min(known)}={amount:g}",
            )
        view = views.get(name) or ProjectView(name=name)
        if workload.device is Device.GPU:
            devices = Devices(gpus=int(amount), cpus=view.quota.cpus if view.quota else None)
        else:
            devices = Devices(gpus=view.quota.gpus if view.quota else None, cpus=amount)
        views[name] = msgspec.structs.replace(view, quota=devices)
    for name, amount in quotas.items():
        _check_quota(views, name, amount)
    return msgspec.structs.replace(workload, projects=tuple(views[name] for name in sorted(views)))


def _check_quota(views: Mapping[str, ProjectView], name: str, amount: float) -> None:
    """What `shoal project update` would refuse is not simulated either."""
    projects = {view.name: Project(uid=0, **msgspec.structs.asdict(view)) for view in views.values()}
    try:
        check_tree(projects.values(), projects[name])
    except SpecError as error:
        raise SpecError(
            f"`--quota {name}={amount:g}`: {error.message}", hint=f"say less, or {LOOK}"
        ) from None


def parse_quotas(texts: Iterable[str]) -> dict[str, float]:
    """`vision=64`."""
    quotas: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.rpartition("=")
        if not name or not amount.isdigit():
            raise SpecError(f"`--quota {text}`: a quota is PROJECT=DEVICES", hint="--quota vision=64")
        quotas[name] = int(amount)
    return quotas


def _pool_of(nodes: tuple[NodeView, ...], shape: Shape, option: str, sign: int) -> tuple[NodeView, ...]:
    (pool,) = nodes
    if shape.gpus:
        raise SpecError(
            f"`{option} {shape}`: this trace runs on {pool.cpus:g} processors in one pool, not on nodes",
            hint=f"{option} {shape.devices}",
        )
    left = pool.cpus + sign * shape.count
    if left <= 0:
        raise SpecError(
            f"`{option} {shape}`: there are {pool.cpus:g} processors", hint=f"{option} {pool.cpus / 2:.0f}"
        )
    return (msgspec.structs.replace(pool, cpus=left),)


def _joined(nodes: tuple[NodeView, ...], shape: Shape) -> tuple[NodeView, ...]:
    """New nodes are like the ones of the same GPUs that are there, where there are any, but for the name.

    Of a kind that is not there yet they have the memory and disk of the largest that is.
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


def _less(nodes: tuple[NodeView, ...], shape: Shape) -> tuple[NodeView, ...]:
    alike = sorted(node.name for node in nodes if looks_like(node, shape))
    if len(alike) < shape.count:
        raise SpecError(
            f"`--remove {shape}`: there are {len(alike)} such nodes",
            hint=f"--remove {shape.of(len(alike))}" if alike else None,
        )
    gone = set(alike[len(alike) - shape.count :])
    return tuple(node for node in nodes if node.name not in gone)
