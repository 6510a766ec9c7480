"""Reading an attempt's logs: the nodes' own files merged by time, in pages that a cursor continues exactly.

A cursor is `EPOCH.OFFSET-OFFSET-...`, an offset for each node in the order in which nodes joined the attempt.
"""

from __future__ import annotations

import asyncio
import re
from heapq import merge
from itertools import accumulate, islice
from typing import Any, Protocol

import msgspec

from shoal.api.views.schema import LineView
from shoal.engines.base import LogChunk
from shoal.errors import SpecError
from shoal.fair_threads import FairThreads
from shoal.model.attempt import Attempt

CHUNK = 128 << 10
TAIL_BLOCK = 256 << 10
MAX_PAGE = 16 << 20
MAX_TAIL = 64 << 20
"""Bytes that one tail reads, of the ends of all nodes' logs together: about 600,000 lines."""
PARSED_AT_ONCE = 4 << 10
"""Below this many bytes, parsing costs less than handing them to a thread."""
MAX_TEXT = 64 << 10
STACKS = "t"
"""The stream of stacks: beside what ranks wrote, and shown only on request."""
_threads = FairThreads(2, "shoal-api-logs")
_CURSOR = re.compile(r"(?P<epoch>[1-9][0-9]{0,17})\.(?P<offsets>[0-9]{1,18}(?:-[0-9]{1,18})*)?", re.ASCII)


class LogFilter(msgspec.Struct, frozen=True):
    """Which lines: of one rank or of all; written output, or the stacks of ranks that hung."""

    rank: int | None = None
    is_stacks: bool = False

    def has(self, line: LineView) -> bool:
        return (self.rank is None or line["rank"] == self.rank) and (
            line["stream"] == STACKS
        ) is self.is_stacks

    def may_have(self, raw: bytes) -> bool:
        """Whether the raw line can match, at a tenth of the cost of parsing it."""
        if self.rank is None and not self.is_stacks:
            return True
        parts = raw.split(b" ", 3)
        has_rank = self.rank is None or parts[1:2] == [b"%d" % self.rank]
        return has_rank and (not self.is_stacks or parts[2:3] == [STACKS.encode()])


ALL = LogFilter()


class SupportsLogs(Protocol):
    """The one method of an engine that is needed here."""

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk: ...


class LogPosition(msgspec.Struct, frozen=True):
    """How far each node's log of one attempt was read. No offsets: nothing was read."""

    epoch: int
    offsets: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.epoch}.{'-'.join(map(str, self.offsets))}"

    def offsets_for(self, attempt: Attempt) -> tuple[int, ...]:
        """One offset per node. Raises `SpecError` for a cursor of another attempt."""
        num_new = len(attempt.logged_nodes) - len(self.offsets)
        if num_new < 0 or (self.offsets and num_new > len(attempt.replacements)):
            raise SpecError("the cursor is not from this attempt", hint="begin without a cursor")
        return self.offsets + (0,) * num_new


def parse_position(text: str) -> LogPosition:
    """The position of a cursor. Raises `SpecError`."""
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise SpecError("the cursor is not from this route", hint="begin without a cursor")
    offsets = match["offsets"]
    return LogPosition(int(match["epoch"]), tuple(map(int, offsets.split("-"))) if offsets else ())


class JobLogLine(msgspec.Struct, frozen=True):
    """One line, the offset after it in its node's log, and its place in time.

    Clocks can go back, but `order` never goes back within a node, so a merge keeps each node's own order.
    """

    view: LineView
    node_index: int
    next_offset: int
    order: float


class JobLogPage(msgspec.Struct, frozen=True):
    """`is_complete`: every node has reported that nothing will follow `position`."""

    lines: list[JobLogLine]
    position: LogPosition
    is_complete: bool


async def read_page(
    engine: SupportsLogs, attempt: Attempt, position: LogPosition, limit: int, wanted: LogFilter = ALL
) -> JobLogPage:
    """The next lines of all nodes, oldest first, and the position after the last of them.

    Reads at most `limit` lines and at most `MAX_PAGE` bytes, and skips lines that do not match.
    """
    after = list(position.offsets_for(attempt))
    chunk_bytes = min(CHUNK, max(MAX_PAGE // max(len(after), 1), 1))
    kept: list[JobLogLine] = []
    is_complete = True
    horizon = float("inf")
    for index, node in enumerate(attempt.logged_nodes):
        chunk = await engine.read_log(attempt.attempt_id, node, after[index], chunk_bytes)
        mine = await _parse(chunk.data, node, index, after[index])
        is_complete = is_complete and chunk.is_complete and not mine
        if mine and chunk.next_offset < chunk.size:
            # This node has more: lines of other nodes after its last line must wait.
            horizon = min(horizon, mine[-1].order)
        kept = list(islice(merge(kept, mine, key=lambda line: line.order), limit))
    lines = []
    for line in kept:
        if line.order > horizon:
            break
        after[line.node_index] = line.next_offset
        if wanted.has(line.view):
            lines.append(line)
    return JobLogPage(lines, LogPosition(attempt.epoch, tuple(after)), is_complete)


async def read_tail(engine: SupportsLogs, attempt: Attempt, wanted: LogFilter, count: int) -> JobLogPage:
    """The last `count` matching lines, and the position at the end of the logs.

    Reads backwards and stops once it has them, or once their text passes `MAX_PAGE`. Of each log it reads at
    most an equal part of `MAX_TAIL`.
    """
    most_bytes = MAX_TAIL // max(len(attempt.logged_nodes), 1)
    kept: list[JobLogLine] = []
    offsets = []
    is_complete = True
    for index, node in enumerate(attempt.logged_nodes):
        end = await _last_block(engine, attempt.attempt_id, node)
        offsets.append(end.stop)
        is_complete = is_complete and end.is_complete
        mine = await _last_lines(engine, attempt.attempt_id, index, node, end, wanted, count, most_bytes)
        kept = list(merge(kept, mine, key=lambda line: line.order))[-count:] if count else []
    return JobLogPage(kept, LogPosition(attempt.epoch, tuple(offsets)), is_complete)


class _Block(msgspec.Struct, frozen=True):
    """Whole lines of one log, from `start` to `stop`."""

    data: bytes
    start: int
    stop: int
    is_complete: bool


async def _last_block(engine: SupportsLogs, attempt_id: str, node: str) -> _Block:
    size = (await engine.read_log(attempt_id, node, 0, 1)).size
    return await _block_before(engine, attempt_id, node, size)


async def _block_before(engine: SupportsLogs, attempt_id: str, node: str, stop: int) -> _Block:
    """The whole lines among the bytes before `stop`. Of a line longer than a block, its rest."""
    begin = max(stop - TAIL_BLOCK, 0)
    # The byte before shows whether a line begins exactly here.
    offset = max(begin - 1, 0)
    parts = []
    while True:
        chunk = await engine.read_log(attempt_id, node, offset, max(stop - offset, 1))
        parts.append(chunk.data)
        offset = chunk.next_offset
        if not chunk.data or offset >= stop:
            break
    data = b"".join(parts)
    cut = data.find(b"\n", 0, -1) + 1 if begin else 0
    start = max(begin - 1, 0) + cut if cut else begin
    return _Block(data[cut:], start, offset, chunk.is_complete)


async def _last_lines(
    engine: SupportsLogs,
    attempt_id: str,
    index: int,
    node: str,
    block: _Block,
    wanted: LogFilter,
    count: int,
    most_bytes: int,
) -> list[JobLogLine]:
    collected: list[JobLogLine] = []
    room = MAX_PAGE
    lowest = block.stop - most_bytes
    while True:
        lines = await _parse(block.data, node, index, block.start, wanted)
        mine = [line for line in lines if wanted.has(line.view)]
        room -= sum(len(line.view["text"]) for line in mine)
        collected = mine + collected
        if len(collected) >= count or block.start <= max(lowest, 0) or room <= 0:
            return _in_order(collected[-count:] if count else [])
        block = await _block_before(engine, attempt_id, node, block.start)


def _in_order(lines: list[JobLogLine]) -> list[JobLogLine]:
    """Sort across blocks: each block is already in order."""
    orders = accumulate((line.order for line in lines), max)
    return [msgspec.structs.replace(line, order=order) for line, order in zip(lines, orders, strict=True)]


async def _parse(
    data: bytes, node: str, index: int, offset: int, wanted: LogFilter = ALL
) -> list[JobLogLine]:
    """Run `parse_chunk`. A large page is parsed on a thread, in its caller's turn."""
    if len(data) < PARSED_AT_ONCE:
        return parse_chunk(data, node, index, offset, wanted)
    parsing = _threads.submit(lambda: parse_chunk(data, node, index, offset, wanted))
    return await asyncio.wrap_future(parsing)


def parse_chunk(data: bytes, node: str, index: int, offset: int, wanted: LogFilter = ALL) -> list[JobLogLine]:
    """Lines of `UNIXTIME RANK STREAM TEXT`, each with the offset after it: those that match, and maybe
    others.
    """
    parsed = []
    order = 0.0
    end = offset + len(data)
    for raw in data.removesuffix(b"\n").split(b"\n") if data else ():
        offset = min(offset + len(raw) + 1, end)
        if not wanted.may_have(raw):
            continue
        view = _view(raw, node)
        order = max(order, view["at"])
        parsed.append(JobLogLine(view, index, offset, order))
    return parsed


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
