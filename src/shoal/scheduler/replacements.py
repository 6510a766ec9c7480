"""Find other nodes for lost tasks of running attempts: the first part of a cycle.

A replacement is a candidate for one node, with the attempt's request, project, exclusions and remaining time.
It comes before all waiting candidates, because the other nodes of its attempt stand idle until it starts. It
evicts no attempt, and it leaves alone the nodes that are kept for growing attempts of at least its priority.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from shoal.model.attempt import NodeTask
from shoal.model.job import ResourceRequest
from shoal.scheduler.explain.lost_task import explain_lost_task
from shoal.scheduler.facts.amounts import DeviceAmount
from shoal.scheduler.facts.capacity import NodeUse
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Explanation, PlannedReplacement
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding
from shoal.scheduler.order.queue import shape_key
from shoal.scheduler.placement.reservations import CapacityReservations
from shoal.scheduler.placement.search import PlacementSearch
from shoal.scheduler.preemption.growth import reserve_for_growth

SHORTEST_LIMIT_S = 1.0
"""Time limit of a replacement whose attempt should have ended already: its supervisor stops it."""


class Replacements(NamedTuple):
    planned: list[PlannedReplacement]
    """One for each lost task, in the order of the decisions."""
    explanations: dict[str, Explanation]
    """By attempt, why no other node can take its task."""


def replace_lost_tasks(state: ClusterState, policy: Policy, now: float) -> Replacements:
    """Move each lost task to another node in the cluster state, or explain why there is none.

    The reservations are dropped afterwards. The cycle makes those for growth again, each at its own place in
    the order, because waiting candidates of a higher priority come before them.
    """
    reservations = CapacityReservations(state.capacity, state.windows, state.power)
    search = PlacementSearch(state, reservations, _is_left_for_nobody)
    replacements = Replacements([], {})
    for holding, request, lost in state.losses_in_order(now):
        reserve_for_growth(state, reservations, holding.priority, now)
        candidate = replacement_candidate(holding, request, lost, state.capacity.nodes, now)
        key = shape_key(candidate)
        with state.without_task(holding, lost):
            tasks = search.tasks_for(holding.project, key.demand, now, now + key.limit_s)
            if not tasks:
                explanation = explain_lost_task(candidate, lost, state, reservations, policy, now)
                replacements.explanations[holding.attempt_id] = explanation
        if tasks:
            reservations.take(key.demand.need, tasks, now + key.limit_s)
            state.move(holding, lost, tasks[0])
        task = tasks[0] if tasks else None
        replacements.planned.append(
            PlannedReplacement(attempt_id=holding.attempt_id, lost_node=lost.node, task=task)
        )
    return replacements


def replacement_candidate(
    holding: Holding, request: ResourceRequest, lost: NodeTask, nodes: Mapping[str, NodeUse], now: float
) -> Candidate:
    """Return what looks for a node in place of the lost one."""
    limit_s = request.time_limit_s
    left_s = None if limit_s is None else max(holding.placed_at + limit_s - now, SHORTEST_LIMIT_S)
    own_nodes = [task.node for task in holding.allocation]
    return Candidate(
        attempt_id=holding.attempt_id,
        job_id=holding.job_id,
        project=holding.project,
        label=holding.label,
        priority=holding.priority,
        order=0,
        submitted_at=now,
        request=msgspec.structs.replace(
            request, min_nodes=1, max_nodes=1, topology=None, time_limit_s=left_s
        ),
        excluded_nodes=(*holding.excluded_nodes, *own_nodes, *_misplaced(holding, request, lost, nodes)),
        avoided_nodes=holding.avoided_nodes,
    )


def _misplaced(
    holding: Holding, request: ResourceRequest, lost: NodeTask, nodes: Mapping[str, NodeUse]
) -> list[str]:
    """Return the nodes on which the gang would not be as close together, or as far apart, as its job
    requires.
    """
    topology = request.topology
    others = [nodes[task.node] for task in holding.allocation if task != lost and task.node in nodes]
    if topology is None or not others:
        return []
    near, apart = topology.within if topology.is_required else None, topology.spread
    domain = others[0].label(near) if near is not None else None
    taken = {None, *(node.label(apart) for node in others)} if apart is not None else frozenset()
    return [
        node.name
        for node in nodes.values()
        if (near is not None and (domain is None or node.label(near) != domain))
        or (apart is not None and node.label(apart) in taken)
    ]


def _is_left_for_nobody(project: str, amount: DeviceAmount) -> bool:
    """No attempt is stopping for another candidate before the replacements are planned."""
    return True
