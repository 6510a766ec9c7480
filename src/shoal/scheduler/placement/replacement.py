"""Where the task of a lost node continues, while the rest of its attempt stays in place. Pure.

It is a plan for one node, made like any other: from the nodes that are open and free, with the attempt's own
request, exclusions and project. Waiting jobs are not considered, because the attempt's other nodes stand idle
until it has all of its tasks again.
"""

from __future__ import annotations

import msgspec

from shoal.model.attempt import NodeTask
from shoal.model.job import ResourceRequest
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding, NodeInfo, Snapshot
from shoal.scheduler.planner import Planner


def replacement(
    snapshot: Snapshot, policy: Policy, attempt_id: str, lost_node: str, now: float
) -> NodeTask | None:
    """Return a task on another node in place of the one on `lost_node`; None if there is none at once."""
    holding = next((other for other in snapshot.holdings if other.attempt_id == attempt_id), None)
    if holding is None or holding.request is None or lost_node not in _names(holding):
        return None
    others = tuple(task for task in holding.allocation if task.node != lost_node)
    rest = msgspec.structs.replace(holding, allocation=others)
    held = tuple(rest if other is holding else other for other in snapshot.holdings)
    barred = tuple(
        view.name for view in snapshot.nodes if not _is_as_close(view, holding, lost_node, snapshot)
    )
    candidate = _one_node(holding, holding.request, barred, now)
    alone = msgspec.structs.replace(snapshot, holdings=held, candidates=(candidate,))
    result = Planner.of(alone, policy).plan(now)
    return next((start.allocation[0] for start in result.starts), None)


def _names(holding: Holding) -> tuple[str, ...]:
    return tuple(task.node for task in holding.allocation)


def _one_node(holding: Holding, request: ResourceRequest, barred: tuple[str, ...], now: float) -> Candidate:
    """Return a candidate for one node, under an id of its own, because the attempt's id holds the rest."""
    limit_s = request.time_limit_s
    left_s = None if limit_s is None else max(holding.placed_at + limit_s - now, 1.0)
    one_node_request = msgspec.structs.replace(
        request, min_nodes=1, max_nodes=1, topology=None, time_limit_s=left_s
    )
    return Candidate(
        attempt_id=f"{holding.attempt_id}+",
        job_id=holding.job_id,
        project=holding.project,
        priority=holding.priority,
        order=0,
        submitted_at=now,
        request=one_node_request,
        excluded_nodes=(*holding.excluded_nodes, *_names(holding), *barred),
    )


def _is_as_close(view: NodeInfo, holding: Holding, lost_node: str, snapshot: Snapshot) -> bool:
    """Whether the gang stays as close together, or as far apart, as its job requires."""
    topology = holding.request.topology if holding.request is not None else None
    others = [node for node in snapshot.nodes if node.name in _names(holding) and node.name != lost_node]
    if topology is None or not others:
        return True
    near, apart = topology.within if topology.is_required else None, topology.spread
    is_near = near is None or _label(view, near) == _label(others[0], near) is not None
    is_apart = apart is None or _label(view, apart) not in {None, *(_label(node, apart) for node in others)}
    return is_near and is_apart


def _label(view: NodeInfo, name: str) -> str | None:
    """Return the label's value. As in any placement, every node has its pool as the label `pool`."""
    return view.labels.get(name) or (view.pool if name == "pool" else None)
