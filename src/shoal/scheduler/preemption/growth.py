"""Let a job that took fewer nodes than it could use restart on more, if those would otherwise be idle.

The job is stopped at its last checkpoint and started again. So it is asked only while no job waits that could
run here, only if its checkpoints are known, and only if it gains `grow_gain` times the work that is repeated.
While it stops, the nodes that it will take are reserved for it.

`explain_no_growth` says why such a job gets no more nodes. It decides nothing and names no other job.
"""

from __future__ import annotations

from math import inf

from shoal.model.job import ResourceRequest
from shoal.scheduler.explain.text import availability_text, clock_time, duration, number_of
from shoal.scheduler.facts.amounts import NodeResources, demand_of, need_of, remaining_after
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Eviction, EvictionGround, Explanation, WaitReason
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding
from shoal.scheduler.placement.earliest import free_without
from shoal.scheduler.placement.reservations import CapacityReservation, CapacityReservations, PowerDraw
from shoal.scheduler.preemption.costs import RESTART_S, lost_device_s, lost_s


def choose_growth(
    state: ClusterState, reservations: CapacityReservations, policy: Policy, now: float
) -> Eviction | None:
    """Return the growth that gains most; None if no job would gain or a job waits."""
    if not state.elastic or num_runnable_waiting(state):
        return None
    options = [
        _worth(state, reservations, policy, state.holdings[attempt_id], now)
        for attempt_id in sorted(state.elastic)
    ]
    profitable = [attempt_id for attempt_id in options if attempt_id is not None]
    return max(
        profitable, key=lambda attempt_id: (attempt_id[0], attempt_id[1].attempt_id), default=(0.0, None)
    )[1]


def num_runnable_waiting(state: ClusterState) -> int:
    """Count the waiting jobs that the open nodes could hold. Idle nodes are for them first, whatever they
    wait for.
    """
    groups = (group for lane in state.queue.lanes.values() for group in lane.groups.values())
    return sum(len(group.by_score) for group in groups if state.feasibility.fits_open_nodes(group.key.demand))


def num_attainable_nodes(
    state: ClusterState, reservations: CapacityReservations, holding: Holding, now: float
) -> int:
    """Return how many nodes it would have with those that are idle."""
    has = len(holding.allocation)
    return has + len(
        _idle_nodes(
            state, reservations, holding, holding.request.max_nodes - has if holding.request else 0, now
        )
    )


def gained_s(holding: Holding, num_nodes: int, now: float) -> float:
    """Return by how many seconds it ends sooner with this many nodes.

    A job is expected to run as long again as it has run, and to speed up in proportion to its nodes.
    """
    elapsed_s = now - holding.placed_at
    left_s = elapsed_s if holding.time_limit_s is None else min(elapsed_s, holding.time_limit_s - elapsed_s)
    return left_s * (1 - len(holding.allocation) / num_nodes)


def _worth(
    state: ClusterState, reservations: CapacityReservations, policy: Policy, holding: Holding, now: float
) -> tuple[float, Eviction] | None:
    """Return the device-seconds gained beyond what is lost, if it pays."""
    if holding.checkpoint_at is None or holding.is_stopping:
        return None
    has, gets = len(holding.allocation), num_attainable_nodes(state, reservations, holding, now)
    gained = gained_s(holding, gets, now)
    if gets == has or gained < policy.grow_gain * lost_s(holding, now):
        return None
    eviction = Eviction(
        attempt_id=holding.attempt_id,
        for_attempt_id=holding.attempt_id,
        ground=EvictionGround.GROWTH,
        lost_s=lost_s(holding, now),
        lost_device_s=lost_device_s(holding, now),
        saved_at=holding.checkpoint_at,
        likely_device_s=lost_device_s(holding, now),
        num_nodes=gets,
    )
    return gained * has, eviction


def reserve_for_growth(
    state: ClusterState, reservations: CapacityReservations, least: float, now: float
) -> bool:
    """Reserve nodes for attempts of at least this priority that are stopping to restart on more nodes. Return
    whether any attempt is, whatever its priority.
    """
    stopping = state.preemption_costs.stopping
    growing = [holding for holding in stopping.values() if holding.grows_to is not None] if stopping else []
    reserved = {reservation.head.attempt_id for reservation in reservations.all} if growing else set()
    for holding in sorted(growing, key=lambda holding: (-holding.priority, holding.attempt_id)):
        if holding.priority >= least and holding.attempt_id not in reserved:
            reservation = growth_reservation(state, reservations, holding, now)
            if reservation is not None:
                reservations.add(reservation)
    return bool(growing)


def growth_reservation(
    state: ClusterState, reservations: CapacityReservations, holding: Holding, now: float
) -> CapacityReservation | None:
    """Return the reservation for an attempt that was stopped to grow: its own nodes, and idle ones.

    Until it has stopped, no other job may take them unless it comes before it in the order.
    """
    if holding.request is None or holding.grows_to is None:
        return None
    need, nodes = need_of(holding.request), state.capacity.nodes
    spare: dict[str, NodeResources | None] = {}
    for task in holding.allocation:
        node = nodes.get(task.node)
        if node is not None:
            spare[task.node] = remaining_after(free_without(node, [task]), need, node.whole)
    more = _idle_nodes(state, reservations, holding, holding.grows_to - len(holding.allocation), now)
    spare.update((name, remaining_after(nodes[name].free, need, nodes[name].whole)) for name in more)
    draw = None
    if state.power.has_caps:
        # Include its own draw, because a job that others stop for counts this one as gone.
        left, reserved, watts = state.power.left(), reservations.watts(), state.power.of_nodes(need, spare)
        back = state.power.of_tasks(holding.allocation)
        draw = PowerDraw(
            watts, {rack: left[rack] + back[rack] - reserved[rack] - watts[rack] for rack in watts}
        )
    return CapacityReservation(
        _as_candidate(holding, holding.request), inf, spare, (holding.attempt_id,), draw
    )


def _as_candidate(holding: Holding, request: ResourceRequest) -> Candidate:
    return Candidate(
        attempt_id=holding.attempt_id,
        job_id=holding.job_id,
        project=holding.project,
        label=holding.label,
        priority=holding.priority,
        order=0,
        submitted_at=holding.placed_at,
        request=request,
    )


def _idle_nodes(
    state: ClusterState, reservations: CapacityReservations, holding: Holding, count: int, now: float
) -> list[str]:
    """Return up to `count` nodes besides its own that it could start on now.

    Nodes with work from outside Shoal are left out: the job is running now, and there it might have to wait.
    """
    request = holding.request
    if request is None or request.topology is not None or count <= 0:
        return []  # whether other nodes are close enough is known only once it has left its own
    demand = demand_of(request, holding.excluded_nodes)
    ends_at = now + (inf if holding.time_limit_s is None else holding.time_limit_s)
    own_nodes = {task.node for task in holding.allocation}
    blockers = reservations.blockers(holding.project, now, ends_at)
    barred = reservations.barred(demand.need, blockers) | own_nodes | demand.excluded
    ranked = state.finders.of(demand.need).ranked(barred, count)
    more = [name for name in ranked if not state.capacity.nodes[name].view.is_busy]
    if state.power.has_caps:
        more = state.power.within(more, demand.need, reservations.power_left(blockers))
    while more and state.refusal(holding.project, demand._replace(min_nodes=len(more))) is not None:
        more.pop()
    return more


CHECKPOINT_HINT = (
    "say `checkpoint: {}`, save to `$SHOAL_CHECKPOINT_DIR` now and then, and begin from what is there"
)


def explain_no_growth(
    state: ClusterState, reservations: CapacityReservations, policy: Policy, holding: Holding, now: float
) -> Explanation:
    """Explain a job that holds fewer nodes than its maximum."""
    has, most = len(holding.allocation), holding.request.max_nodes if holding.request else 0
    gets = num_attainable_nodes(state, reservations, holding, now)
    reason, hint = _reason(state, policy, holding, gets, now)
    return Explanation(
        attempt_id=holding.attempt_id,
        job_id=holding.job_id,
        why=WaitReason.FEWER_NODES,
        sentence=f"runs on {number_of(has, 'node')} and could use {most}: {reason}",
        hint=hint,
        facts={
            "nodes": has,
            "nodes_most": most,
            "nodes_idle": gets - has,
            "saved_at": holding.checkpoint_at,
            "lost_s": lost_s(holding, now),
            "won_s": gained_s(holding, gets, now),
            "grow_gain": policy.grow_gain,
        },
    )


def _reason(
    state: ClusterState, policy: Policy, holding: Holding, gets: int, now: float
) -> tuple[str, str | None]:
    has, waiting = len(holding.allocation), num_runnable_waiting(state)
    if holding.is_stopping:
        return f"it is stopping, and goes on with {holding.grows_to or 'what is free then'}", None
    if holding.request is not None and holding.request.topology is not None:
        return "a job with `topology` is not moved to grow", None
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        return f"{number_of(waiting, 'job')} {verb}, and a job grows only while none does", None
    if gets == has:
        return "no other node is idle that it could have", None
    idle = availability_text(gets - has, "idle")
    if holding.checkpoint_at is None:
        return f"{idle}, but no checkpoint of it was seen, so all it has done would be lost", CHECKPOINT_HINT
    lost, won = lost_s(holding, now), gained_s(holding, gets, now)
    if won >= policy.grow_gain * lost:
        return f"{idle}, and it is about to be stopped to go on with {gets}", None
    rule = f"{policy.grow_gain:g} times what it would do again ({duration(lost)})"
    return f"{idle}, and {gets} nodes would win it {duration(won)}, not yet {rule}", _when(
        policy, holding, gets, now
    )


def _when(policy: Policy, holding: Holding, gets: int, now: float) -> str | None:
    """Return the first time at which growing could pay if the job had just saved; None if that is after half
    of its limit.
    """
    least_s = policy.grow_gain * RESTART_S / (1 - len(holding.allocation) / gets)
    limit_s = holding.time_limit_s
    clock = clock_time(holding.placed_at + least_s, now)
    if clock is None or now >= holding.placed_at + least_s or (limit_s is not None and least_s > limit_s / 2):
        return None
    return f"it grows after {clock} at the earliest, soon after a checkpoint"
