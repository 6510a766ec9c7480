"""Reading an attempt's logs: the nodes' own files merged by time, in pages that a cursor continues exactly.

A cursor is `EPOCH.OFFSET-OFFSET-...`, an offset for each node in the attempt's order.
"""

from __future__ import annotations

import re
from collections import deque
from heapq import merge
from itertools import islice
from typing import Any, Protocol

import msgspec

from shoal.api.views import LineView
from shoal.engines.base import LogChunk
from shoal.errors import SpecError
from shoal.model.attempt import Attempt

CHUNK = 128 << 10
TAIL_CHUNK = 1 << 20
MAX_TEXT = 64 << 10
_CURSOR = re.compile(r"(?P<epoch>[1-9][0-9]{0,17})\.(?P<offsets>[0-9]{1,18}(?:-[0-9]{1,18})*)?", re.ASCII)


class SupportsLogs(Protocol):
    """The one verb of an engine that is needed here."""

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk: ...


class Position(msgspec.Struct, frozen=True):
    """How far each node's log of one attempt was read. No offsets: not begun."""

    epoch: int
    offsets: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.epoch}.{'-'.join(map(str, self.offsets))}"

    def offsets_for(self, attempt: Attempt) -> tuple[int, ...]:
        """One offset a node. Raises `SpecError` for a cursor that is not about this attempt."""
        if not self.offsets:
            return (0,) * len(attempt.node_names)
        if len(self.offsets) != len(attempt.node_names):
            raise SpecError("the cursor is not one of this attempt's", hint="begin without a cursor")
        return self.offsets


def parse_position(text: str) -> Position:
    """The position a cursor stands for. Raises `SpecError`."""
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise SpecError("the cursor is not one that this route gave out", hint="begin without a cursor")
    offsets = match["offsets"]
    return Position(int(match["epoch"]), tuple(map(int, offsets.split("-"))) if offsets else ())


class Line(msgspec.Struct, frozen=True):
    """One line, where its node's log goes on after it, and its place in time.

    `order` never goes back within a node, as clocks do, so a merge keeps each node's own order.
    """

    view: LineView
    node_index: int
    next_offset: int
    order: float


class Page(msgspec.Struct, frozen=True):
    """`is_complete`: every node says that nothing will follow `position`."""

    lines: list[Line]
    position: Position
    is_complete: bool


async def read_page(
    engine: SupportsLogs, attempt: Attempt, position: Position, limit: int, rank: int | None = None
) -> Page:
    """The next lines of all nodes, oldest first, and the position after the last of them.

    At most `limit` lines are looked at; those of other ranks are passed over.
    """
    after = list(position.offsets_for(attempt))
    by_node: list[list[Line]] = []
    is_complete = True
    horizon = float("inf")
    for index, node in enumerate(attempt.node_names):
        chunk = await engine.read_log(attempt.attempt_id, node, after[index], CHUNK)
        mine = parse_chunk(chunk.data, node, index, after[index])
        by_node.append(mine)
        is_complete = is_complete and chunk.is_complete and not mine
        if mine and len(chunk.data) >= CHUNK // 2:
            # There may be more of this node: what others wrote after its last line must wait.
            horizon = min(horizon, mine[-1].order)
    lines = []
    for line in islice(merge(*by_node, key=lambda line: line.order), limit):
        if line.order > horizon:
            break
        after[line.node_index] = line.next_offset
        if rank is None or line.view["rank"] == rank:
            lines.append(line)
    return Page(lines, Position(attempt.epoch, tuple(after)), is_complete)


async def read_tail(engine: SupportsLogs, attempt: Attempt, rank: int | None, count: int) -> Page:
    """The last `count` lines (of `rank`, if given) and the position at the end of what was there."""
    kept: list[Line] = []
    offsets = []
    is_complete = True
    for index, node in enumerate(attempt.node_names):
        last: deque[Line] = deque(maxlen=count)
        offset = 0
        while True:
            chunk = await engine.read_log(attempt.attempt_id, node, offset, TAIL_CHUNK)
            if not chunk.data:
                break
            mine = parse_chunk(chunk.data, node, index, offset)
            last.extend(line for line in mine if rank is None or line.view["rank"] == rank)
            offset = chunk.next_offset
        is_complete = is_complete and chunk.is_complete
        offsets.append(offset)
        kept += last
    kept.sort(key=lambda line: line.order)
    lines = kept[-count:] if count else []
    return Page(lines, Position(attempt.epoch, tuple(offsets)), is_complete)


def parse_chunk(data: bytes, node: str, index: int, offset: int) -> list[Line]:
    """Lines of `UNIXTIME RANK STREAM TEXT`, each with the offset after it."""
    found = []
    order = 0.0
    end = offset + len(data)
    for raw in data.removesuffix(b"\n").split(b"\n") if data else ():
        offset = min(offset + len(raw) + 1, end)
        view = _view(raw, node)
        order = max(order, view["at"])
        found.append(Line(view, index, offset, order))
    return found


def _view(raw: bytes, node: str) -> LineView:
    parts: list[Any] = raw.split(b" ", 3)
    try:
        at, rank = float(parts[0]), None if parts[1] == b"-" else int(parts[1])
        stream, text = parts[2].decode("ascii"), parts[3] if len(parts) > 3 else b""
    except (ValueError, IndexError):
        at, rank, stream, text = 0.0, None, "s", raw
    return {
        "at": at,
        "node": node,
        "rank": rank,
        "stream": stream,
        "text": text[:MAX_TEXT].decode("utf-8", "replace"),
    }
