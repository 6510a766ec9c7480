"""The attempt's state machine as a page of documentation, found by trying every move of the table.

Pure: the page is returned, not written. A test keeps the copy under `docs/` equal to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from shoal.model.attempt import Attempt, AttemptState, EndReason, NodeShare
from shoal.model.moves import (
    TABLE,
    Accepted,
    AttemptEvent,
    FencePassed,
    NodeEnded,
    OrphanCleared,
    Orphaned,
    Placed,
    Refused,
    Started,
    StopAsked,
    step,
)
from shoal.wire import EndKind, NodeOutcome

HOLDS = {
    AttemptState.QUEUED: "nothing",
    AttemptState.STARTING: "its allocation; the engine may or may not have it yet",
    AttemptState.RUNNING: "its allocation; every supervisor reported its ranks started",
    AttemptState.STOPPING: "its allocation, until there is evidence that nothing of it runs any more",
    AttemptState.ENDED: "nothing, for ever",
}

HEAD = """\
# States of an attempt

Generated from the table in `src/shoal/model/moves.py`; after a change there type
`SHOAL_GOLDEN=write pytest tests/golden/test_attempt_states.py` and read the difference.
"""


class Move(NamedTuple):
    state: AttemptState
    event: type
    next_state: AttemptState


def moves() -> list[Move]:
    """Every change the table can make, in its order. An event that is ignored or cannot happen is no move."""
    found = dict.fromkeys(
        Move(attempt.state, type(event), after.state)
        for attempt in _attempts()
        for event in _events()
        if TABLE[attempt.state, type(event)] is not None
        for after, _ in [step(attempt, event, 1.0)]
        if after is not attempt
    )
    order = {key: place for place, key in enumerate(TABLE)}
    return sorted(found, key=lambda move: (order[move.state, move.event], move.next_state))


def page() -> str:
    return f"{HEAD}\n{_holds()}\n{_mermaid()}\n{_table()}"


def _holds() -> str:
    rows = [f"| `{state}` | {held} |" for state, held in HOLDS.items()]
    return "\n".join(["| state | holds |", "|---|---|", *rows, ""])


def _mermaid() -> str:
    arrows: dict[tuple[AttemptState, AttemptState], list[str]] = {}
    for move in moves():
        arrows.setdefault((move.state, move.next_state), []).append(move.event.__name__)
    lines = [f"    {old} --> {new}: {', '.join(names)}" for (old, new), names in arrows.items()]
    ends = f"    {AttemptState.ENDED} --> [*]"
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> queued", *lines, ends, "```", ""])


def _table() -> str:
    """Every state against every event: where it leads, `-` where it is ignored, empty where it cannot be."""
    leads: dict[tuple[AttemptState, type], list[str]] = {}
    for move in moves():
        leads.setdefault((move.state, move.event), []).append(move.next_state)
    events = list(dict.fromkeys(event for _, event in TABLE))
    lines = [f"| event | {' | '.join(AttemptState)} |", "|---|" + "---|" * len(AttemptState)]
    for event in events:
        cells = [
            "" if TABLE[state, event] is None else ", ".join(leads.get((state, event), ["-"]))
            for state in AttemptState
        ]
        lines.append(f"| `{event.__name__}` | {' | '.join(cells)} |")
    note = "`-`: late or repeated, ignored. Empty: cannot happen, and is reported as a bug of ours."
    return "\n".join([*lines, "", note, ""])


def _attempts() -> Iterator[Attempt]:
    """One of each state, on two nodes: nothing is reported yet, or one node started, is orphaned or over."""
    fresh = Attempt(attempt_id="a", job_id="j", project="p", epoch=1, queued_at=0.0)
    yield fresh
    shares = tuple(NodeShare(node=name, cpus=1.0, memory_bytes=1) for name in ("n1", "n2"))
    for state in AttemptState:
        if state is not AttemptState.QUEUED:
            held = msgspec.structs.replace(fresh, state=state, allocation=shares)
            yield held
            yield msgspec.structs.replace(held, started_nodes=("n1",))
            yield msgspec.structs.replace(held, orphaned_nodes=("n2",))
            yield msgspec.structs.replace(held, outcomes=(_outcome("n1", EndKind.SUCCEEDED),))


def _events() -> Iterator[AttemptEvent]:
    yield Placed((NodeShare(node="n1", cpus=1.0, memory_bytes=1),))
    yield Accepted("native")
    yield Refused("no")
    yield Started("n2")
    yield from (NodeEnded(_outcome("n2", kind)) for kind in EndKind)
    yield Orphaned("n2", "something of it does not die")
    yield Orphaned("n2", "something of it does not die", is_to_stop=True)
    yield OrphanCleared("n2")
    yield StopAsked(EndReason.CANCELLED, "ana")
    yield FencePassed()


def _outcome(node: str, kind: EndKind) -> NodeOutcome:
    return NodeOutcome(attempt_id="a", epoch=1, node=node, kind=kind, ended_at=0.0)
