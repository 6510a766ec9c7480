"""Write a decision down so that it can be made again, in events of a size that everybody can take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.model.attempt import NodeShare
from shoal.model.window import Window
from shoal.scheduler import Plan, Start
from shoal.scheduler.fair import Usage
from shoal.store import Tx

MAX_EVENT_BYTES = 256 << 10
"""Of one event, unless a single start or stop in it takes more."""


class Basis(NamedTuple):
    """What a plan was made of."""

    at: float
    seen: int
    """The newest event."""
    saved: dict[str, float]
    """Checkpoints heard of since the last plan that stopped somebody, by attempt; empty if this does not."""
    is_all_saved: bool
    """No others were known: what was recorded before was forgotten with the control plane that knew it."""
    usages: tuple[Usage, ...]
    """What all projects had that had any, where that may have decided; else nothing."""
    windows: list[Window]


def record_decision(
    core: Core, tx: Tx, made: Plan, placed: list[str], evicted: list[str], basis: Basis
) -> None:
    """What was decided, from the log up to which event, and what of it was still possible.

    Whoever reads the log to `seen` can make the same decision again: `shoal explain-decision`. What does not
    fit into `plan.made` stands in `plan.part` events right before it.
    """
    fresh = list(core.queue.fresh.values())
    lists: dict[str, Any] = {
        "starts": msgspec.to_builtins(made.starts),
        "placed": placed,
        "evictions": msgspec.to_builtins(made.evictions),
        "evicted": evicted,
        "saved": basis.saved,
        "usages": msgspec.to_builtins(basis.usages),
        "resting": core.queue.resting,
        "stamps": {one.attempt_id: (one.expected_s, one.due_at, one.score) for one in fresh},
    }
    *parts, last = split(lists, MAX_EVENT_BYTES)
    for part in parts:
        note(tx, "plan.part", basis.at, SHOAL, data=part)
    facts = {"waiting": core.planner.num_waiting, "seen": basis.seen}
    if basis.is_all_saved:
        facts["is_all_saved"] = True
    if parts:
        facts |= {"num_placed": len(placed), "num_evicted": len(evicted)}
    note(tx, "plan.made", basis.at, SHOAL, data={**last, **facts})


def record_replacement(
    core: Core, tx: Tx, attempt_id: str, lost: str, share: NodeShare | None, seen: int, at: float
) -> None:
    """Where the share of a lost node goes on, as a decision about one start: it can be made again, too."""
    starts = () if share is None else (Start(attempt_id=attempt_id, allocation=(share,)),)
    data: dict[str, Any] = {
        "starts": msgspec.to_builtins(starts),
        "placed": [attempt_id] if starts else [],
        "replaces": (attempt_id, lost),
        "resting": (),
        "stamps": {},
        "waiting": core.planner.num_waiting,
        "seen": seen,
    }
    note(tx, "plan.made", at, SHOAL, data=data)


def split(lists: dict[str, Any], max_bytes: int) -> list[dict[str, Any]]:
    """Lists and mappings in as many parts as it takes, none larger than that unless one entry is.

    Together, in their order, they are what was given; each part has every key.
    """
    if len(msgspec.json.encode(lists)) <= max_bytes:
        return [lists]
    parts = [_empty(lists)]
    size = empty_bytes = len(msgspec.json.encode(parts[0]))
    for key, index, entry in _entries(lists):
        more = len(msgspec.json.encode((index, entry)))
        if size + more > max_bytes and size > empty_bytes:
            parts.append(_empty(lists))
            size = empty_bytes
        size += more
        if index is None:
            parts[-1][key].append(entry)
        else:
            parts[-1][key][index] = entry
    return parts


def _empty(lists: dict[str, Any]) -> dict[str, Any]:
    return {key: {} if isinstance(value, dict) else [] for key, value in lists.items()}


def _entries(lists: dict[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    for key, value in lists.items():
        if isinstance(value, dict):
            yield from ((key, index, entry) for index, entry in value.items())
        else:
            yield from ((key, None, entry) for entry in value)
