"""Why a candidate that may start does not: the one dominant reason, with the facts behind it.

Speaks about the cluster as it is after the plan's starts. Says anything of another job only inside its own
project: an explanation is read by people who may not know that the other project exists. What they learn is
from when on nodes are not for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from math import floor, inf

import msgspec

from shoal.scheduler.amounts import Demand, Need
from shoal.scheduler.book import Book
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.claims import Claim, Claims
from shoal.scheduler.deadline import with_deadline
from shoal.scheduler.eligible import explain_array, explain_backoff, explain_unmet
from shoal.scheduler.fit import SHORT_OF, fits, shortages
from shoal.scheduler.gang import choose
from shoal.scheduler.impossible import LOOK, never_fits
from shoal.scheduler.policy import Policy
from shoal.scheduler.possible import Suitable, by_domain, can_hold, most_together
from shoal.scheduler.powered import choose_powered
from shoal.scheduler.release import free_at
from shoal.scheduler.rows import RowKey, row_key
from shoal.scheduler.scarce import less_memory, memory_held, short_of_memory
from shoal.scheduler.sharing import explain_refusal
from shoal.scheduler.shut import explain_windows, with_windows
from shoal.scheduler.snapshot import Candidate, NodeView
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.unmoved import with_unmoved
from shoal.scheduler.words import age, amounts, are, clock_time, duration, listed, num_nodes, together

NUM_TOLD = 4
"""So many nodes are named; the facts count them all."""
NUM_LOOKED_AT = 8
"""Busy nodes that are asked when they come back: those on which everything ends first."""


WAITS_FOR_NODES = frozenset({Why.RESOURCES, Why.TOPOLOGY})


class Explainer:
    """Answers for whole rows, remembered: ten thousand equal jobs cost one explanation."""

    def __init__(self, book: Book, claims: Claims, policy: Policy, now: float) -> None:
        """`claims` are those of the last plan."""
        self._book = book
        self._policy = policy
        self._capacity = book.capacity
        self._possible = book.possible
        self._finders = book.finders
        self._claims = claims
        self._rooms = {claim.head.attempt_id: claim for claim in claims.all if claim.stopping}
        self._now = now
        self._said: dict[Demand, Explanation | None] = {}
        self._behind: dict[tuple[RowKey, str], Explanation] = {}
        self._lowest_free = book.capacity.lowest_free()

    def explain(self, candidate: Candidate) -> Explanation:
        """Why it waits."""
        said = self._explain(candidate)
        told = msgspec.structs.replace(said, attempt_id=candidate.attempt_id, job_id=candidate.job_id)
        own = (claim.at for claim in self._claims.all if claim.head.attempt_id == candidate.attempt_id)
        promised_at = next((at for at in own if at < inf), None)
        return with_deadline(told, candidate, promised_at, self._now)

    def _explain(self, candidate: Candidate) -> Explanation:
        if candidate.unmet:
            return explain_unmet(candidate)
        if candidate.not_before > self._now:
            return explain_backoff(candidate, self._now)
        key = row_key(candidate)
        num_holding = self._book.num_of_array(key.array_id)
        if key.at_once is not None and num_holding >= key.at_once:
            return explain_array(candidate, num_holding, key.at_once)
        demand = key.demand
        if candidate.attempt_id in self._rooms:
            return _making_room(self._rooms[candidate.attempt_id])
        refusal = self._book.refusal(candidate.project, demand)
        if refusal is not None:
            return explain_refusal(candidate, refusal)
        demand = self._book.allowed(candidate.project, demand)
        if demand not in self._said:
            self._said[demand] = self._of_cluster(demand)
        said = self._said[demand]
        if said is not None and said.why in WAITS_FOR_NODES:
            if self._book.windows.all:
                said = self._before_windows(said, candidate, key)
            return with_unmoved(said, candidate, demand, self._book, self._policy)
        if said is not None:
            return said
        no_power = self._out_of_power(demand)
        if no_power is not None:
            return no_power
        asked = key, candidate.project
        if asked not in self._behind:
            self._behind[asked] = self._of_order(candidate, key)
        return self._behind[asked]

    def _before_windows(self, said: Explanation, candidate: Candidate, key: RowKey) -> Explanation:
        asked = key, candidate.project
        if asked not in self._behind:
            others = (one for one in self._claims.all if one.head.attempt_id != candidate.attempt_id)
            taken = {name for claim in others for name in claim.spare}
            self._behind[asked] = with_windows(said, candidate.project, key, self._book, taken, self._now)
        return self._behind[asked]

    def _of_cluster(self, demand: Demand) -> Explanation | None:
        """The reason that would hold if nobody else were waiting; None when there is none."""
        if not self._capacity.nodes:
            return _said(Why.NO_NODES, "has nowhere to run: this cluster has no nodes", hint=LOOK)
        never = never_fits(demand, self._possible)
        if never is not None:
            return never
        suitable = self._possible.suitable(demand.need).without(demand.excluded)
        if not can_hold(demand, suitable.nodes):
            return self._excluded(demand, suitable)
        if not self._possible.is_open_for(demand):
            return self._closed(demand, suitable)
        finder = self._finders.of(demand.need)
        if choose(demand, finder, self._capacity, frozenset()):
            return None
        free = [self._capacity.nodes[name] for name in finder.ranked(demand.excluded)]
        if len(free) >= demand.min_nodes:
            return self._scattered(demand, free)
        return self._busy(demand, suitable, free)

    def _excluded(self, demand: Demand, left: Suitable) -> Explanation:
        such = amounts(demand.need, self._possible.telling(demand.need))
        all_nodes = self._possible.suitable(demand.need).nodes
        names = [node.name for node in all_nodes if node.name in demand.excluded]
        return _said(
            Why.NODES_EXCLUDED,
            f"needs {num_nodes(demand)} with {such}{together(demand)}; its `exclude_nodes` or log rules "
            f"leave {listed(names)} out, and {are(len(left.nodes), 'left')}",
            hint="log rules leave nothing out for a new job: `shoal run` it again, without `exclude_nodes`",
            nodes_needed=demand.min_nodes,
            nodes_left=len(left.nodes),
            excluded=names,
        )

    def _closed(self, demand: Demand, suitable: Suitable) -> Explanation:
        such = amounts(demand.need, self._possible.telling(demand.need))
        return _said(
            Why.NODES_CLOSED,
            f"needs {num_nodes(demand)} with {such}{together(demand)}; "
            f"{are(len(suitable.open), 'open')}{_in_pool(suitable)}",
            details=_why_closed(suitable.closed, self._now),
            hint=_reopen(suitable.closed),
            nodes_needed=demand.min_nodes,
            nodes_open=len(suitable.open),
            closed=[node.name for node in suitable.closed],
        )

    def _scattered(self, demand: Demand, free: list[NodeUse]) -> Explanation:
        label = (demand.within if demand.is_close_required else demand.spread) or ""
        domains = sorted(by_domain(label, free).items(), key=lambda item: (-item[1], item[0]))
        most = most_together(demand, free)
        such = amounts(demand.need, self._possible.telling(demand.need), free=True)
        return _said(
            Why.TOPOLOGY,
            f"needs {num_nodes(demand)} with {such}{together(demand)}; {are(len(free), 'free')}, "
            f"at most {most} of them {'so' if demand.spread else 'in one'}",
            details=(f"free: {listed([f'{count} in {domain}' for domain, count in domains])}",)
            if domains
            else (),
            hint="to start without waiting for closeness set `topology.mode: preferred`"
            if demand.can_be_looser
            else f"`nodes: {most}..{demand.max_nodes}` could start on what is free",
            nodes_needed=demand.min_nodes,
            nodes_free=len(free),
            within=label,
            free_by_domain=dict(domains),
        )

    def _busy(self, demand: Demand, suitable: Suitable, free: list[NodeUse]) -> Explanation:
        short = self._short_of(demand.need)
        until = self._soonest(demand.need, suitable)
        scarce = short_of_memory(demand.need, suitable.open) if short == ("memory",) else None
        held = (memory_held(demand.need, scarce),) if scarce else ()
        hint = self._fewer(demand)
        if hint is None and scarce is not None and demand.min_nodes == 1:
            hint = less_memory(demand.need, scarce)
        return _said(
            Why.RESOURCES,
            f"needs {num_nodes(demand)} with {amounts(demand.need, short, free=True)}; "
            f"{are(len(free), 'free')}{_in_pool(suitable)}",
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
        """What would let a gang start on the nodes that are free and kept for nobody."""
        if demand.is_close_required:
            return None
        kept = self._claims.nodes.union(*(window.nodes for window in self._book.windows.all))
        num_free = len(self._finders.of(demand.need).ranked(demand.excluded | kept))
        return f"`nodes: {num_free}..{demand.max_nodes}` could start on what is free" if num_free else None

    def _short_of(self, need: Need) -> tuple[str, ...]:
        """What the nodes that could give `need` lack now."""
        if need.is_exclusive:
            return ("alone",)
        short = {
            name
            for whole, free in self._lowest_free.items()
            if fits(need, whole, whole)
            for name in shortages(need, whole, free)
        }
        if need.memory_bytes is None and len(short) > 1 and not self._lacks_only_memory(need):
            short.discard("memory")  # in proportion: it comes back with the CPUs and GPUs
        return tuple(name for name in SHORT_OF if name in short)

    def _lacks_only_memory(self, need: Need) -> bool:
        return any(shortages(need, group.whole, group.free) == ("memory",) for group in self._capacity.groups)

    def _soonest(self, need: Need, suitable: Suitable) -> list[tuple[float, str]]:
        """Busy nodes that could serve and when they can, of the first `NUM_LOOKED_AT` to fall quiet."""
        busy = (node for node in suitable.open if not fits(need, node.whole, node.free))
        quiet_first = nsmallest(NUM_LOOKED_AT, busy, key=_quiet_at)
        return sorted((max(free_at(need, node), self._now), node.name) for node in quiet_first)

    def _until(self, soonest: list[tuple[float, str]], num_missing: int) -> tuple[str, ...]:
        """The nodes it waits for, by time: as many as are missing, and those that come at the same time."""
        last = soonest[:num_missing][-1][0]
        by_time: dict[str, list[str]] = {}
        for at, name in [end for end in soonest if end[0] <= last][:NUM_TOLD]:
            told = None if at == inf else clock_time(at, self._now)
            by_time.setdefault(f"until about {told}" if told else "with no known end", []).append(name)
        return tuple(f"{', '.join(names)} busy {told}" for told, names in by_time.items())

    def _out_of_power(self, demand: Demand) -> Explanation | None:
        """Where racks may not draw what the nodes that are free would."""
        power = self._book.power
        if not power.has_caps:
            return None
        free = self._finders.of(demand.need).ranked(demand.excluded)
        over = power.over(demand.need, free)
        nodes = self._capacity.nodes
        if over is None or choose_powered(demand, free, nodes, power, power.left()):
            return None
        hint = "it starts when jobs in the rack end; an operator sets `power_caps` in the policy file"
        if not self._book.has_power_for(demand):
            hint = "it never starts so: ask for less on each node, or an operator raises `power_caps`"
        return _said(
            Why.POWER,
            f"needs {num_nodes(demand)}, and {are(len(free), 'free')}, but rack `{over.rack}` may not draw "
            f"more: {over.drawn_watts:,.0f} of {over.cap_watts:,.0f} W are taken",
            hint=hint,
            rack=over.rack,
            cap_watts=over.cap_watts,
            drawn_watts=over.drawn_watts,
            nodes_free=len(free),
        )

    def _of_order(self, candidate: Candidate, key: RowKey) -> Explanation:
        window = explain_windows(candidate, key, self._book, self._claims, self._now)
        if window is not None:
            return window
        claim = self._keeper(key)
        if claim is None:
            return _said(Why.BEHIND, "is about to be looked at: there is room for it since the last plan")
        head = claim.head
        is_ours = head.project == candidate.project
        name = f"`{head.label or head.job_id}`" if is_ours else "a job of another project"
        at = None if claim.at == inf else claim.at
        told = None if at is None else clock_time(at, self._now)
        kept = (f"it is kept from {told}",) if told else ()
        if is_ours:
            waited = duration(self._now - max(head.submitted_at, head.not_before))
            kept = (f"{name} has waited {waited}" + (f" and is to start by {told}" if told else ""),)
        if is_ours and head.attempt_id in self._book.stakes.leaving:
            kept = (f"{name} is stopping, and goes on with more nodes",)
        minutes = 0 if at is None else max(floor((at - self._now - candidate.request.grace_s) / 60), 0)
        return _said(
            Why.BEHIND,
            f"waits behind {name}: what it needs is free, but kept for that job, which comes first",
            details=kept,
            hint=f"`time_limit: {minutes}m` or less could start now" if minutes else None,
            behind_job_id=head.job_id if is_ours else None,
            queue=candidate.queue,
            kept_from=at,
        )

    def _keeper(self, key: RowKey) -> Claim | None:
        """The first claim on a node that the row could start on."""
        usable = set(self._finders.of(key.demand.need).ranked(key.demand.excluded))
        ends_at = self._now + key.limit_s
        closed = (claim for claim in self._claims.all if not claim.admits(ends_at))
        racks = {self._book.power.racks.get(name) for name in usable}
        return next(
            (
                claim
                for claim in closed
                if not usable.isdisjoint(claim.spare) or not racks.isdisjoint(claim.draw.watts)
            ),
            None,
        )


def _said(
    why: Why, sentence: str, details: tuple[str, ...] = (), hint: str | None = None, **facts: object
) -> Explanation:
    return Explanation(
        attempt_id="", job_id="", why=why, sentence=sentence, details=details, hint=hint, facts=facts
    )


def _making_room(claim: Claim) -> Explanation:
    count, names = len(claim.stopping), sorted(claim.spare)
    who = "1 job is stopping" if count == 1 else f"{count} jobs are stopping"
    return _said(
        Why.MAKING_ROOM,
        f"is making room: {who}, and what they leave on {listed(names)} is kept for it",
        details=("each has its `grace` to save its work and end",),
        stopping=count,
        nodes=names,
    )


def _in_pool(suitable: Suitable) -> str:
    """Names the pool when there is only one to wait for and somebody gave it a name."""
    pools = suitable.pools
    return f" in `{min(pools)}`" if len(pools) == 1 and pools != {"default"} else ""


def _quiet_at(node: NodeUse) -> tuple[float, str]:
    """When all that runs on a node has certainly ended."""
    return node.ends[-1][0] if node.ends else -inf, node.name


def _reopen(nodes: Iterable[NodeUse]) -> str:
    """What was not closed by a person is not opened by one."""
    decided = next((node.name for node in nodes if node.view.closed_at is not None), None)
    return f"an operator reopens a node with `shoal resume {decided}`" if decided else LOOK


def _why_closed(nodes: Iterable[NodeUse], now: float) -> tuple[str, ...]:
    by_reason: dict[str, list[str]] = {}
    for node in nodes:
        by_reason.setdefault(_closed(node.view, now), []).append(node.name)
    told = [f"{listed(names)} {because}" for because, names in by_reason.items()]
    return tuple(told[:NUM_TOLD])


def _closed(view: NodeView, now: float) -> str:
    """`drained by ana 2 h ago ("bad NVLink")`."""
    ago = "" if view.closed_at is None else f" {age(now - view.closed_at)} ago"
    note = f' ("{view.closed_note}")' if view.closed_note else ""
    return f"{view.closed_because or ''}{ago}{note}"
