"""The state machine of an exchange as a page of documentation, made by trying every move of the table."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.serving.exchange.states import ExchangeEvent, ExchangeState
from shoal.serving.exchange.table import TABLE
from tests.support.serving.exchange_walk import Move

MEANINGS = {
    ExchangeState.READING: ("the body so far", "yes: nothing has been sent"),
    ExchangeState.QUEUED: ("its body, and a place in the queue", "yes: nothing has been sent"),
    ExchangeState.CONNECTING: ("its body, and a slot in a replica", "yes: nothing has been sent"),
    ExchangeState.SENDING: ("a slot and a connection", "no: its body was passed on as it came"),
    ExchangeState.AWAITING: (
        "a slot, a connection, and its body if it was sent whole",
        "if its body was kept, repeating is safe, and the budget allows it",
    ),
    ExchangeState.REPLYING: ("a slot and a connection", "no: the caller has a part of the reply"),
    ExchangeState.TUNNEL: ("a slot and a connection", "no"),
    ExchangeState.ENDED: ("nothing, for ever", "no"),
}

HEAD = """\
# States of a request in the data plane

An exchange is one request in the data plane, from its head to the end of its reply, in all replicas that it
visits. This page is generated from the table in `src/shoal/serving/exchange/table.py`. After a change there
type `SHOAL_GOLDEN=write pytest tests/golden/test_exchange_states.py` and read the difference.
"""


def render_page(moves: Sequence[Move]) -> str:
    return f"{HEAD}\n{_meanings()}\n{_mermaid(moves)}\n{_table(moves)}"


def _meanings() -> str:
    rows = [f"| `{state}` | {holds} | {another} |" for state, (holds, another) in MEANINGS.items()]
    title = "| state | holds | may it go to another replica? |"
    return "\n".join([title, "|---|---|---|", *rows, ""])


def _mermaid(moves: Sequence[Move]) -> str:
    """Draw the changes of state. Events that leave the state as it is are in the table alone."""
    arrows: dict[tuple[ExchangeState, ExchangeState], list[str]] = {}
    for move in moves:
        if move.next_state is not move.state:
            arrows.setdefault((move.state, move.next_state), []).append(move.event)
    lines = [f"    {old} --> {new}: {', '.join(events)}" for (old, new), events in arrows.items()]
    first, last = f"    [*] --> {ExchangeState.READING}", f"    {ExchangeState.ENDED} --> [*]"
    return "\n".join(["```mermaid", "stateDiagram-v2", first, *lines, last, "```", ""])


def _table(moves: Sequence[Move]) -> str:
    """Every event in every state: the states it can lead to."""
    leads: dict[tuple[ExchangeState, ExchangeEvent], list[str]] = {}
    for move in moves:
        leads.setdefault((move.state, move.event), []).append(move.next_state)
    lines = [f"| event | {' | '.join(ExchangeState)} |", "|---|" + "---|" * len(ExchangeState)]
    for event in ExchangeEvent:
        cells = [_cell(leads.get((state, event), []), state, event) for state in ExchangeState]
        lines.append(f"| {event} | {' | '.join(cells)} |")
    note = "`-`: the state stays. Empty: the event cannot come; the connection is aborted and the bug logged."
    return "\n".join([*lines, "", note, ""])


def _cell(next_states: list[str], state: ExchangeState, event: ExchangeEvent) -> str:
    if TABLE[state, event] is None:
        return ""
    return ", ".join(next_states) if next_states and next_states != [state] else "-"
