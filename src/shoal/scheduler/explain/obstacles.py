"""Explain three obstacles: memory shortage, maintenance and reservation windows, and eviction limits.

People often overlook memory, because a job that does not ask for memory takes it in proportion to its CPUs or
GPUs. So these messages say how much a node has left, what took most of it, and what to type. They name no
job, because people of every project read them. `shoal nodes NODE` shows each reader the jobs that they may
see.

Window messages say what would let the job start before the window. Eviction limits explain why a job that may
evict others still waits: those jobs were evicted often enough and keep running.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import islice
from math import floor, inf

import msgspec

from shoal.model.node import Window, WindowKind
from shoal.scheduler.explain.text import bytes_text, clock_time, duration, listed, node_count_text, number_of
from shoal.scheduler.facts.amounts import Demand, Need
from shoal.scheduler.facts.capacity import NodeUse
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.plan import Explanation, WaitReason
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding
from shoal.scheduler.order.queue import ShapeKey
from shoal.scheduler.placement.fit import fits, shortages
from shoal.scheduler.placement.gang import choose_nodes
from shoal.scheduler.placement.reservations import CapacityReservations
from shoal.scheduler.preemption.rights import eviction_ground

MIB = 1 << 20
MAX_NODES_EXAMINED = 256
"""Nodes. An explanation must not cost more than a plan."""


def short_of_memory(need: Need, nodes: Iterable[NodeUse]) -> NodeUse | None:
    """Return, of the nodes that lack only memory for `need`, the one with the most left."""
    examined = islice(nodes, MAX_NODES_EXAMINED)
    lacking = [node for node in examined if shortages(need, node.whole, node.free) == ("memory",)]
    return max(lacking, key=lambda node: (node.free.memory_bytes, node.name), default=None)


def memory_held(need: Need, node: NodeUse) -> str:
    """Say what is left of the node's memory, and where most of the rest is."""
    tasks = [task for _, _, task in node.ends]
    largest = max(tasks, key=lambda task: (task.memory_bytes, len(task.gpu_ids)))
    gpus = f"with {number_of(len(largest.gpu_ids), 'GPU')} " if largest.gpu_ids else ""
    took = f"{bytes_text(largest.memory_bytes)} went {gpus}to one job"
    whole = f"{_left(node)} of {bytes_text(node.whole.memory_bytes)} of memory is free, {took}"
    return f"{node.name}: {whole}; this job needs {bytes_text(need.memory_on(node.whole))}"


def less_memory_hint(need: Need, node: NodeUse) -> str:
    """Say what to type to start on the node, or where to look if nothing is left to ask for."""
    left = max(node.free.memory_bytes, 0) // MIB
    if left and need.memory_bytes is None:
        return f"`memory: {left}MiB` could start on {node.name}: left out, it goes with the CPUs and GPUs"
    whose = f"`shoal nodes {node.name}` shows whose it is"
    return f"{whose}; a job that leaves `memory` out takes it with its CPUs and GPUs"


def _left(node: NodeUse) -> str:
    left = max(node.free.memory_bytes, 0)
    return bytes_text(left) if left else "none"


MAX_WINDOWS_NAMED = 4
IS_THEN = {WindowKind.MAINTENANCE: "in maintenance", WindowKind.RESERVATION: "reserved"}


def explain_windows(
    candidate: Candidate, key: ShapeKey, state: ClusterState, reservations: CapacityReservations, now: float
) -> Explanation | None:
    """Return None if it could start now if no job were promised anything."""
    blocking = state.windows.blocking(candidate.project, now, now + key.limit_s)
    demand, finder = key.demand, state.finders.of(key.demand.need)
    if not blocking or choose_nodes(demand, finder, state.capacity, state.windows.nodes_of(blocking)):
        return None
    free = set(finder.ranked(demand.excluded))
    windows = (state.windows.all[number] for number in blocking)
    met = [window for window in windows if not free.isdisjoint(window.nodes)]
    window_texts = [_window_text(window, free, now) for window in met]
    return Explanation(
        attempt_id="",
        job_id="",
        why=WaitReason.WINDOW,
        sentence=f"{_conflict_text(key, met, now)}; {window_texts[0]}",
        details=tuple(window_texts[1:MAX_WINDOWS_NAMED]),
        hint=_shorter_limit_hint(candidate, key, state, reservations, met, now),
        facts={
            "nodes_needed": demand.min_nodes,
            "nodes_free": len(free),
            "nodes_open": len(free - state.windows.nodes_of(blocking)),
            "time_limit_s": None if key.limit_s == inf else key.limit_s,
            "windows": [_fact(window, free) for window in met],
        },
    )


def with_windows(
    explanation: Explanation,
    project: str,
    key: ShapeKey,
    state: ClusterState,
    reserved: AbstractSet[str],
    now: float,
) -> Explanation:
    """Name the windows that a job which waits for nodes would meet on the nodes it could have first.

    They too decide when it starts. `reserved`: nodes that are reserved for other jobs.
    """
    earliest = state.earliest_starts.earliest_start(state.allowed(project, key.demand), reserved, now)
    if earliest is None:
        return explanation
    at, names = (now if earliest.at == inf else earliest.at), set(earliest.nodes)
    blocking = (state.windows.all[number] for number in state.windows.blocking(project, at, at + key.limit_s))
    met = [window for window in blocking if not names.isdisjoint(window.nodes)]
    if not met:
        return explanation
    return msgspec.structs.replace(
        explanation,
        details=(
            *explanation.details,
            *(_window_text(window, names, now) for window in met[:MAX_WINDOWS_NAMED]),
        ),
        facts={**explanation.facts, "windows": [_fact(window, names) for window in met]},
    )


def _conflict_text(key: ShapeKey, met: list[Window], now: float) -> str:
    """Say which property of the job conflicts with the windows."""
    if all(window.from_at <= now for window in met):
        return f"needs {node_count_text(key.demand)}"
    return "has no time limit" if key.limit_s == inf else f"may run {duration(key.limit_s)} by its time limit"


def _window_text(window: Window, free: set[str], now: float) -> str:
    """Describe the window. Do not say for which project a reservation is: the reader may not know that it
    exists.
    """
    names = [name for name in window.nodes if name in free]
    verb = "is" if len(names) == 1 else "are"
    when = f"until {_time(window.until_at, now)}"
    if window.from_at > now:
        # Rounded down, as `shoal reserve` shows it: by then no job may be there.
        when = f"from {_time(floor(window.from_at / 60) * 60, now)} {when}"
    because = f' ("{window.because}")' if window.because and window.kind is WindowKind.MAINTENANCE else ""
    return f"{listed(names)} {verb} {IS_THEN[window.kind]} {when}{because}"


def _time(at: float, now: float) -> str:
    return clock_time(at, now) or "a day in more than a year"


def _fact(window: Window, free: set[str]) -> dict[str, object]:
    return {
        "id": window.window_id,
        "kind": str(window.kind),
        "from_at": window.from_at,
        "until_at": window.until_at,
        "nodes": [name for name in window.nodes if name in free],
    }


def _shorter_limit_hint(
    candidate: Candidate,
    key: ShapeKey,
    state: ClusterState,
    reservations: CapacityReservations,
    met: list[Window],
    now: float,
) -> str | None:
    """Suggest the longest time limit, in whole minutes, with which it could start at once."""
    demand, finder = key.demand, state.finders.of(key.demand.need)
    for begins in sorted({window.from_at for window in met if window.from_at > now}, reverse=True):
        grace_s = candidate.request.grace_s
        minutes = max(floor((begins - now - grace_s) / 60), 0)
        blockers = reservations.blockers(candidate.project, now, now + minutes * 60 + grace_s)
        barred = reservations.barred(demand.need, blockers)
        if minutes and choose_nodes(demand, finder, state.capacity, barred):
            return f"`time_limit: {minutes}m` or less could start now"
    return None


def with_eviction_limit(
    explanation: Explanation, candidate: Candidate, demand: Demand, state: ClusterState, policy: Policy
) -> Explanation:
    """Count the jobs on suitable nodes that it could evict if they had not been evicted so often."""
    if not state.preemption_costs.eviction_exhausted:
        return explanation
    amount = state.required_devices(demand)
    count = sum(
        _runs_on_suitable_node(holding, demand, state)
        and eviction_ground(candidate, amount, holding.priority, holding.project, state.tree, policy)
        is not None
        for holding in state.preemption_costs.eviction_exhausted.values()
    )
    if not count:
        return explanation
    facts = {**explanation.facts, "unmoved": count, "max_evictions": policy.max_evictions}
    jobs, were, on = (
        ("1 job", "was", "keeps running until it ends")
        if count == 1
        else (f"{count} jobs", "were", "keep running until they end")
    )
    times = number_of(policy.max_evictions, "time")
    line = f"{jobs} that it could evict {were} evicted {times} already, and {on}"
    if not policy.max_evictions:
        line = f"no job is evicted here (`max_evictions: 0`): {jobs} that it could evict {on}"
    return msgspec.structs.replace(explanation, details=(*explanation.details, line), facts=facts)


def _runs_on_suitable_node(holding: Holding, demand: Demand, state: ClusterState) -> bool:
    nodes = (state.capacity.nodes.get(task.node) for task in holding.allocation)
    return any(node is not None and fits(demand.need, node.whole, node.whole) for node in nodes)
