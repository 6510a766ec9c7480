"""Where the share of a lost node goes on, while the rest of its attempt stays where it is. Pure.

It is a plan for one node, made as any other is: of the nodes that are open and free, with the attempt's own
request, exclusions and project. Nobody who waits is asked, since the other nodes of the attempt stand idle
until it has all of its shares again.
"""

from __future__ import annotations

import msgspec

from shoal.model.attempt import NodeShare
from shoal.model.request import Request
from shoal.scheduler.planner import Planner
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate, Holding, NodeView, Snapshot


def replacement(
    snapshot: Snapshot, policy: Policy, attempt_id: str, lost: str, now: float
) -> NodeShare | None:
    """A share on another node, in place of the one on `lost`; None where none can be had at once."""
    holding = next((one for one in snapshot.holdings if one.attempt_id == attempt_id), None)
    if holding is None or holding.request is None or lost not in _names(holding):
        return None
    others = tuple(share for share in holding.allocation if share.node != lost)
    rest = msgspec.structs.replace(holding, allocation=others)
    held = tuple(rest if one is holding else one for one in snapshot.holdings)
    barred = tuple(view.name for view in snapshot.nodes if not _is_as_close(view, holding, lost, snapshot))
    candidate = _one_node(holding, holding.request, barred, now)
    alone = msgspec.structs.replace(snapshot, holdings=held, candidates=(candidate,))
    made = Planner.of(alone, policy).plan(now)
    return next((start.allocation[0] for start in made.starts), None)


def _names(holding: Holding) -> tuple[str, ...]:
    return tuple(share.node for share in holding.allocation)


def _one_node(holding: Holding, request: Request, barred: tuple[str, ...], now: float) -> Candidate:
    """What is asked for, under a name of its own: the attempt's holds the rest."""
    limit_s = request.time_limit_s
    left_s = None if limit_s is None else max(holding.placed_at + limit_s - now, 1.0)
    one = msgspec.structs.replace(request, min_nodes=1, max_nodes=1, topology=None, time_limit_s=left_s)
    return Candidate(
        attempt_id=f"{holding.attempt_id}+",
        job_id=holding.job_id,
        project=holding.project,
        priority=holding.priority,
        order=0,
        submitted_at=now,
        request=one,
        excluded_nodes=(*holding.excluded_nodes, *_names(holding), *barred),
    )


def _is_as_close(view: NodeView, holding: Holding, lost: str, snapshot: Snapshot) -> bool:
    """Whether the gang stays as close together, or as far apart, as its job requires."""
    topology = holding.request.topology if holding.request is not None else None
    others = [one for one in snapshot.nodes if one.name in _names(holding) and one.name != lost]
    if topology is None or not others:
        return True
    near, apart = topology.within if topology.is_required else None, topology.spread
    is_near = near is None or _label(view, near) == _label(others[0], near) is not None
    is_apart = apart is None or _label(view, apart) not in {None, *(_label(one, apart) for one in others)}
    return is_near and is_apart


def _label(view: NodeView, name: str) -> str | None:
    """As for any placement: every node has its pool as the label `pool`."""
    return view.labels.get(name) or (view.pool if name == "pool" else None)
