"""Why a candidate that may start does not: the one dominant reason, with the facts behind it.

Explanations describe the cluster after the plan's starts. They name another job only inside the candidate's
own project, because the reader may not know that the other project exists. Of other projects the reader
learns only from when on nodes are reserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from math import floor, inf

import msgspec

from shoal.scheduler.explain.impossible import NODES_HINT, never_fits
from shoal.scheduler.explain.limits import explain_array, explain_backoff, explain_refusal, explain_unmet
from shoal.scheduler.explain.obstacles import (
    explain_windows,
    less_memory_hint,
    memory_held,
    short_of_memory,
    with_eviction_limit,
    with_windows,
)
from shoal.scheduler.explain.text import (
    age,
    availability_text,
    clock_time,
    duration,
    listed,
    need_text,
    node_count_text,
    topology_text,
)
from shoal.scheduler.facts.amounts import Demand, Need
from shoal.scheduler.facts.capacity import NodeUse
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Explanation, WaitReason
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, NodeInfo
from shoal.scheduler.order.due import with_deadline
from shoal.scheduler.order.queue import ShapeKey, shape_key
from shoal.scheduler.placement.earliest import free_at
from shoal.scheduler.placement.feasibility import SuitableNodes, can_hold, count_by_domain, largest_gang
from shoal.scheduler.placement.fit import SHORTAGE_KINDS, fits, shortages
from shoal.scheduler.placement.gang import choose_nodes
from shoal.scheduler.placement.power import choose_within_power
from shoal.scheduler.placement.reservations import CapacityReservation, CapacityReservations

MAX_NAMED = 4
"""Nodes that are named. The facts count all of them."""
MAX_EXAMINED = 8
"""Busy nodes for which the end time is computed: those on which everything ends first."""


WAITS_FOR_NODES = frozenset({WaitReason.RESOURCES, WaitReason.TOPOLOGY})


class Explainer:
    """Answers for whole shape groups and caches the answers: ten thousand equal jobs cost one explanation."""

    def __init__(
        self, state: ClusterState, reservations: CapacityReservations, policy: Policy, now: float
    ) -> None:
        """`reservations` are those of the last plan."""
        self._state = state
        self._policy = policy
        self._capacity = state.capacity
        self._feasibility = state.feasibility
        self._finders = state.finders
        self._reservations = reservations
        self._rooms = {
            reservation.head.attempt_id: reservation
            for reservation in reservations.all
            if reservation.stopping
        }
        self._now = now
        self._by_demand: dict[Demand, Explanation | None] = {}
        self._behind: dict[tuple[ShapeKey, str], Explanation] = {}
        self._lowest_free = state.capacity.lowest_free()

    def explain(self, candidate: Candidate) -> Explanation:
        """Return why the candidate waits."""
        shared_explanation = self._explain(candidate)
        explanation = msgspec.structs.replace(
            shared_explanation, attempt_id=candidate.attempt_id, job_id=candidate.job_id
        )
        promised_times = (
            reservation.at
            for reservation in self._reservations.all
            if reservation.head.attempt_id == candidate.attempt_id
        )
        promised_at = next((at for at in promised_times if at < inf), None)
        return with_deadline(explanation, candidate, promised_at, self._now)

    def _explain(self, candidate: Candidate) -> Explanation:
        if candidate.unmet:
            return explain_unmet(candidate)
        if candidate.not_before > self._now:
            return explain_backoff(candidate, self._now)
        key = shape_key(candidate)
        num_holding = self._state.num_of_array(key.array_id)
        if key.at_once is not None and num_holding >= key.at_once:
            return explain_array(candidate, num_holding, key.at_once)
        demand = key.demand
        if candidate.attempt_id in self._rooms:
            return _making_room(self._rooms[candidate.attempt_id])
        refusal = self._state.refusal(candidate.project, demand)
        if refusal is not None:
            return explain_refusal(candidate, refusal)
        demand = self._state.allowed(candidate.project, demand)
        if demand not in self._by_demand:
            self._by_demand[demand] = self._of_cluster(demand)
        explanation = self._by_demand[demand]
        if explanation is not None and explanation.why in WAITS_FOR_NODES:
            if self._state.windows.all:
                explanation = self._before_windows(explanation, candidate, key)
            return with_eviction_limit(explanation, candidate, demand, self._state, self._policy)
        if explanation is not None:
            return explanation
        no_power = self._out_of_power(demand)
        if no_power is not None:
            return no_power
        order_key = key, candidate.project
        if order_key not in self._behind:
            self._behind[order_key] = self._of_order(candidate, key)
        return self._behind[order_key]

    def _before_windows(self, explanation: Explanation, candidate: Candidate, key: ShapeKey) -> Explanation:
        order_key = key, candidate.project
        if order_key not in self._behind:
            others = (
                other for other in self._reservations.all if other.head.attempt_id != candidate.attempt_id
            )
            reserved = {name for reservation in others for name in reservation.spare}
            self._behind[order_key] = with_windows(
                explanation, candidate.project, key, self._state, reserved, self._now
            )
        return self._behind[order_key]

    def _of_cluster(self, demand: Demand) -> Explanation | None:
        """Return the reason that would hold if no other job were waiting; None if there is none."""
        if not self._capacity.nodes:
            return _explanation(
                WaitReason.NO_NODES, "has nowhere to run: this cluster has no nodes", hint=NODES_HINT
            )
        never = never_fits(demand, self._feasibility)
        if never is not None:
            return never
        suitable = self._feasibility.suitable(demand.need).without(demand.excluded)
        if not can_hold(demand, suitable.nodes):
            return self._excluded(demand, suitable)
        if not self._feasibility.fits_open_nodes(demand):
            return self._closed(demand, suitable)
        finder = self._finders.of(demand.need)
        if choose_nodes(demand, finder, self._capacity, frozenset()):
            return None
        free = [self._capacity.nodes[name] for name in finder.ranked(demand.excluded)]
        if len(free) >= demand.min_nodes:
            return self._scattered(demand, free)
        return self._busy(demand, suitable, free)

    def _excluded(self, demand: Demand, left: SuitableNodes) -> Explanation:
        need = need_text(demand.need, self._feasibility.distinguishing_amounts(demand.need))
        all_nodes = self._feasibility.suitable(demand.need).nodes
        names = [node.name for node in all_nodes if node.name in demand.excluded]
        return _explanation(
            WaitReason.NODES_EXCLUDED,
            f"needs {node_count_text(demand)} with {need}{topology_text(demand)}; its "
            "`exclude_nodes` or log rules "
            f"leave {listed(names)} out, and {availability_text(len(left.nodes), 'left')}",
            hint="log rules leave nothing out for a new job: `shoal run` it again, without `exclude_nodes`",
            nodes_needed=demand.min_nodes,
            nodes_left=len(left.nodes),
            excluded=names,
        )

    def _closed(self, demand: Demand, suitable: SuitableNodes) -> Explanation:
        need = need_text(demand.need, self._feasibility.distinguishing_amounts(demand.need))
        return _explanation(
            WaitReason.NODES_CLOSED,
            f"needs {node_count_text(demand)} with {need}{topology_text(demand)}; "
            f"{availability_text(len(suitable.open), 'open')}{_in_pool(suitable)}",
            details=_why_closed(suitable.closed, self._now),
            hint=_reopen(suitable.closed),
            nodes_needed=demand.min_nodes,
            nodes_open=len(suitable.open),
            closed=[node.name for node in suitable.closed],
        )

    def _scattered(self, demand: Demand, free: list[NodeUse]) -> Explanation:
        label = (demand.within if demand.is_close_required else demand.spread) or ""
        domains = sorted(count_by_domain(label, free).items(), key=lambda item: (-item[1], item[0]))
        largest = largest_gang(demand, free)
        need = need_text(demand.need, self._feasibility.distinguishing_amounts(demand.need), free=True)
        return _explanation(
            WaitReason.TOPOLOGY,
            f"needs {node_count_text(demand)} with {need}{topology_text(demand)}; "
            f"{availability_text(len(free), 'free')}, "
            f"at most {largest} of them {'so' if demand.spread else 'in one'}",
            details=(f"free: {listed([f'{count} in {domain}' for domain, count in domains])}",)
            if domains
            else (),
            hint="to start without waiting for closeness set `topology.mode: preferred`"
            if demand.can_be_looser
            else f"`nodes: {largest}..{demand.max_nodes}` could start on what is free",
            nodes_needed=demand.min_nodes,
            nodes_free=len(free),
            within=label,
            free_by_domain=dict(domains),
        )

    def _busy(self, demand: Demand, suitable: SuitableNodes, free: list[NodeUse]) -> Explanation:
        short = self._short_of(demand.need)
        until = self._soonest(demand.need, suitable)
        scarce = short_of_memory(demand.need, suitable.open) if short == ("memory",) else None
        held = (memory_held(demand.need, scarce),) if scarce else ()
        hint = self._fewer(demand)
        if hint is None and scarce is not None and demand.min_nodes == 1:
            hint = less_memory_hint(demand.need, scarce)
        return _explanation(
            WaitReason.RESOURCES,
            f"needs {node_count_text(demand)} with {need_text(demand.need, short, free=True)}; "
            f"{availability_text(len(free), 'free')}{_in_pool(suitable)}",
            details=(
                *held,
                *_why_closed(suitable.closed, self._now),
                *self._until(until, demand.min_nodes - len(free)),
            ),
            hint=hint,
            nodes_needed=demand.min_nodes,
            nodes_free=len(free),
            short_of=list(short),
            closed=[node.name for node in suitable.closed],
            busy_until={name: None if at == inf else at for at, name in until},
        )

    def _fewer(self, demand: Demand) -> str | None:
        """Return what would let a gang start on the nodes that are free and not reserved."""
        if demand.is_close_required:
            return None
        reserved = self._reservations.nodes.union(*(window.nodes for window in self._state.windows.all))
        num_free = len(self._finders.of(demand.need).ranked(demand.excluded | reserved))
        return f"`nodes: {num_free}..{demand.max_nodes}` could start on what is free" if num_free else None

    def _short_of(self, need: Need) -> tuple[str, ...]:
        """Return what the nodes that could give `need` lack now."""
        if need.is_exclusive:
            return ("alone",)
        short = {
            name
            for whole, free in self._lowest_free.items()
            if fits(need, whole, whole)
            for name in shortages(need, whole, free)
        }
        if need.memory_bytes is None and len(short) > 1 and not self._lacks_only_memory(need):
            short.discard("memory")  # in proportion: it becomes free with the CPUs and GPUs
        return tuple(name for name in SHORTAGE_KINDS if name in short)

    def _lacks_only_memory(self, need: Need) -> bool:
        return any(shortages(need, group.whole, group.free) == ("memory",) for group in self._capacity.groups)

    def _soonest(self, need: Need, suitable: SuitableNodes) -> list[tuple[float, str]]:
        """Return busy nodes that could serve and when they can: the first `MAX_EXAMINED` to become idle."""
        busy = (node for node in suitable.open if not fits(need, node.whole, node.free))
        quiet_first = nsmallest(MAX_EXAMINED, busy, key=_quiet_at)
        return sorted((max(free_at(need, node), self._now), node.name) for node in quiet_first)

    def _until(self, soonest: list[tuple[float, str]], num_missing: int) -> tuple[str, ...]:
        """Return the nodes it waits for, by time: as many as are missing, and those that become free at the
        same time.
        """
        last = soonest[:num_missing][-1][0]
        by_time: dict[str, list[str]] = {}
        for at, name in [end for end in soonest if end[0] <= last][:MAX_NAMED]:
            clock = None if at == inf else clock_time(at, self._now)
            by_time.setdefault(f"until about {clock}" if clock else "with no known end", []).append(name)
        return tuple(f"{', '.join(names)} busy {clock}" for clock, names in by_time.items())

    def _out_of_power(self, demand: Demand) -> Explanation | None:
        """Explain a demand for which racks may not draw what the free nodes would need."""
        power = self._state.power
        if not power.has_caps:
            return None
        free = self._finders.of(demand.need).ranked(demand.excluded)
        capped = power.over(demand.need, free)
        nodes = self._capacity.nodes
        if capped is None or choose_within_power(demand, free, nodes, power, power.left()):
            return None
        hint = "it starts when jobs in the rack end; an operator sets `power_caps` in the policy file"
        if not self._state.has_power_for(demand):
            hint = (
                "it cannot start with this request: "
                "ask for less on each node, or an operator raises `power_caps`"
            )
        return _explanation(
            WaitReason.POWER,
            f"needs {node_count_text(demand)}, and "
            f"{availability_text(len(free), 'free')}, but rack `{capped.rack}` may not draw "
            f"more: {capped.drawn_watts:,.0f} of {capped.cap_watts:,.0f} W are taken",
            hint=hint,
            rack=capped.rack,
            cap_watts=capped.cap_watts,
            drawn_watts=capped.drawn_watts,
            nodes_free=len(free),
        )

    def _of_order(self, candidate: Candidate, key: ShapeKey) -> Explanation:
        window = explain_windows(candidate, key, self._state, self._reservations, self._now)
        if window is not None:
            return window
        reservation = self._blocking_reservation(key)
        if reservation is None:
            return _explanation(
                WaitReason.BEHIND, "is about to be looked at: there is room for it since the last plan"
            )
        head = reservation.head
        is_ours = head.project == candidate.project
        name = f"`{head.label or head.job_id}`" if is_ours else "a job of another project"
        at = None if reservation.at == inf else reservation.at
        clock = None if at is None else clock_time(at, self._now)
        details = (f"it is kept from {clock}",) if clock else ()
        if is_ours:
            waited = duration(self._now - max(head.submitted_at, head.not_before))
            details = (f"{name} has waited {waited}" + (f" and is to start by {clock}" if clock else ""),)
        if is_ours and head.attempt_id in self._state.preemption_costs.stopping:
            details = (f"{name} is stopping, and goes on with more nodes",)
        minutes = 0 if at is None else max(floor((at - self._now - candidate.request.grace_s) / 60), 0)
        return _explanation(
            WaitReason.BEHIND,
            f"waits behind {name}: what it needs is free, but kept for that job, which comes first",
            details=details,
            hint=f"`time_limit: {minutes}m` or less could start now" if minutes else None,
            behind_job_id=head.job_id if is_ours else None,
            queue=candidate.queue,
            kept_from=at,
        )

    def _blocking_reservation(self, key: ShapeKey) -> CapacityReservation | None:
        """Return the first reservation on a node that the group could start on."""
        usable = set(self._finders.of(key.demand.need).ranked(key.demand.excluded))
        ends_at = self._now + key.limit_s
        closed = (reservation for reservation in self._reservations.all if not reservation.admits(ends_at))
        racks = {self._state.power.racks.get(name) for name in usable}
        return next(
            (
                reservation
                for reservation in closed
                if not usable.isdisjoint(reservation.spare) or not racks.isdisjoint(reservation.draw.watts)
            ),
            None,
        )


def _explanation(
    why: WaitReason, sentence: str, details: tuple[str, ...] = (), hint: str | None = None, **facts: object
) -> Explanation:
    return Explanation(
        attempt_id="", job_id="", why=why, sentence=sentence, details=details, hint=hint, facts=facts
    )


def _making_room(reservation: CapacityReservation) -> Explanation:
    count, names = len(reservation.stopping), sorted(reservation.spare)
    stopping = "1 job is stopping" if count == 1 else f"{count} jobs are stopping"
    return _explanation(
        WaitReason.MAKING_ROOM,
        f"is making room: {stopping}, and what they leave on {listed(names)} is kept for it",
        details=("each has its `grace` to save its work and end",),
        stopping=count,
        nodes=names,
    )


def _in_pool(suitable: SuitableNodes) -> str:
    """Name the pool if there is only one to wait for and it has a name."""
    pools = suitable.pools
    return f" in `{min(pools)}`" if len(pools) == 1 and pools != {"default"} else ""


def _quiet_at(node: NodeUse) -> tuple[float, str]:
    """Return when everything that runs on a node has certainly ended."""
    return node.ends[-1][0] if node.ends else -inf, node.name


def _reopen(nodes: Iterable[NodeUse]) -> str:
    """A node that no person closed is not reopened by a person."""
    decided = next((node.name for node in nodes if node.view.closed_at is not None), None)
    return f"an operator reopens a node with `shoal resume {decided}`" if decided else NODES_HINT


def _why_closed(nodes: Iterable[NodeUse], now: float) -> tuple[str, ...]:
    by_reason: dict[str, list[str]] = {}
    for node in nodes:
        by_reason.setdefault(_closed(node.view, now), []).append(node.name)
    lines = [f"{listed(names)} {because}" for because, names in by_reason.items()]
    return tuple(lines[:MAX_NAMED])


def _closed(view: NodeInfo, now: float) -> str:
    """`drained by ana 2 h ago ("bad NVLink")`."""
    ago = "" if view.closed_at is None else f" {age(now - view.closed_at)} ago"
    note = f' ("{view.closed_note}")' if view.closed_note else ""
    return f"{view.closed_because or ''}{ago}{note}"
