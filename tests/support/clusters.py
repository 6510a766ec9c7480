"""Small clusters and waiting jobs for tests of the scheduler: a test spells out only what it cares about."""

from __future__ import annotations

from typing import Any

from shoal.model.attempt import NodeTask
from shoal.model.job import GpuRequest, ResourceRequest, TopologyRequest
from shoal.model.node import Window, WindowKind
from shoal.scheduler import (
    Candidate,
    Explanation,
    GpuInfo,
    Holding,
    NodeInfo,
    Plan,
    Policy,
    Snapshot,
    plan,
)

GIB = 1 << 30
NOW = 1_800_000_000.0
"""2027-01-15 08:00 UTC."""


def node(name: str, *, gpus: int = 8, kind: str = "A100", rack: str | None = None, **fields: Any) -> NodeInfo:
    given = {
        "pool": "a100",
        "cpus": 64.0,
        "memory_bytes": 512 * GIB,
        "disk_bytes": 1000 * GIB,
        "labels": {} if rack is None else {"rack": rack},
    }
    devices = tuple(GpuInfo(index, kind) for index in range(gpus))
    return NodeInfo(name=name, gpus=devices, **{**given, **fields})


def nodes(count: int, **fields: Any) -> tuple[NodeInfo, ...]:
    return tuple(node(f"node-{number:02}", **fields) for number in range(1, count + 1))


def request(
    *, gpus: int = 0, kind: str | None = None, nodes: int | tuple[int, int] = 1, **fields: Any
) -> ResourceRequest:
    least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
    asked = GpuRequest(count=gpus, kind=kind) if gpus else None
    return ResourceRequest(
        gpus=asked, min_nodes=least, max_nodes=most, **{"cpus": float(gpus or 1), **fields}
    )


def within_label(label: str, *, required: bool = True) -> TopologyRequest:
    return TopologyRequest(within=label, is_required=required)


def candidate(number: int, wanted: ResourceRequest, **fields: Any) -> Candidate:
    given = {"project": "vision", "order": number, "submitted_at": NOW - 60.0}
    return Candidate(
        attempt_id=f"att-{number}",
        job_id=f"job-{number}",
        label=f"vision/{number}",
        request=wanted,
        **{**given, **fields},
    )


def holding(number: int, shares: dict[str, tuple[int, ...]], **fields: Any) -> Holding:
    """Holds the named GPUs of each node, with one CPU and one GiB for each of them."""
    allocation = tuple(
        NodeTask(node=name, cpus=float(len(ids)), memory_bytes=len(ids) * GIB, gpu_ids=ids)
        for name, ids in shares.items()
    )
    given = {"project": "vision", "priority": 0, "placed_at": NOW - 600.0, "allocation": allocation}
    return Holding(attempt_id=f"held-{number}", job_id=f"held-job-{number}", **{**given, **fields})


ALL_GPUS = tuple(range(8))


def window(names: tuple[str, ...], begins_s: float, ends_s: float, **fields: Any) -> Window:
    """From so many seconds after now until so many. For a project: a reservation, else maintenance."""
    kind = WindowKind.RESERVATION if fields.get("project") else WindowKind.MAINTENANCE
    given = {"window_id": f"win-{begins_s:.0f}", "kind": kind}
    return Window(nodes=names, from_at=NOW + begins_s, until_at=NOW + ends_s, **{**given, **fields})


def snapshot(
    cluster: tuple[NodeInfo, ...],
    waiting: tuple[Candidate, ...],
    held: tuple[Holding, ...] = (),
    windows: tuple[Window, ...] = (),
) -> Snapshot:
    return Snapshot(nodes=cluster, holdings=held, candidates=waiting, windows=windows)


def make_plan(
    cluster: tuple[NodeInfo, ...],
    *waiting: Candidate,
    held: tuple[Holding, ...] = (),
    policy: Policy | None = None,
    windows: tuple[Window, ...] = (),
) -> Plan:
    return plan(snapshot(cluster, waiting, held, windows), policy or Policy(), NOW)


def placements(result: Plan) -> dict[str, list[str]]:
    """Which nodes each start was given."""
    return {start.attempt_id: [share.node for share in start.allocation] for start in result.starts}


def explanation_of(result: Plan, attempt_id: str) -> Explanation:
    return next(said for said in result.explanations if said.attempt_id == attempt_id)
