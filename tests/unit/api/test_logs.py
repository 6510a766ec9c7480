"""Logs of several nodes as one: merged by time and paged exactly, even if clocks jump."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api import log_pages
from shoal.api.log_pages import (
    ALL,
    JobLogPage,
    LogFilter,
    LogPosition,
    parse_chunk,
    parse_position,
    read_page,
    read_tail,
)
from shoal.api.views.schema import LineView
from shoal.engines.base import LogChunk
from shoal.errors import SpecError
from shoal.fair_threads import CALLER, FairThreads
from shoal.model.attempt import Attempt, NodeTask


class Files:
    """An engine that has logs and nothing else; gives at most `at_once` bytes."""

    name = "files"

    def __init__(self, logs: dict[str, bytes], at_once: int = 1 << 20) -> None:
        self.logs = logs
        self._at_once = at_once
        self.bytes_read = 0

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        rest = self.logs[node][offset:]
        data = rest[: min(limit, self._at_once)]
        data = data[: data.rfind(b"\n") + 1] or rest[: rest.find(b"\n") + 1]
        self.bytes_read += len(data)
        return LogChunk(
            data=data,
            next_offset=offset + len(data),
            size=len(self.logs[node]),
            is_complete=len(data) == len(rest),
        )


def attempt_on(*names: str) -> Attempt:
    shares = tuple(NodeTask(node=name, cpus=1, memory_bytes=1) for name in names)
    return Attempt(
        attempt_id="att_1", job_id="job_1", project="vision", epoch=3, queued_at=0.0, allocation=shares
    )


def read_all(engine: Files, attempt: Attempt, limit: int, rank: int | None = None) -> list[str]:
    """Read page by page, each from the text of the previous cursor."""

    async def pages() -> list[str]:
        lines: list[str] = []
        cursor = f"{attempt.epoch}."
        for _ in range(10_000):
            page: JobLogPage = await read_page(
                engine, attempt, parse_position(cursor), limit, LogFilter(rank)
            )
            lines += [line.view["text"] for line in page.lines]
            if page.is_complete:
                return lines
            cursor = str(page.position)
        raise AssertionError("the log never ends")

    return anyio.run(pages)


TIMES = st.lists(st.floats(min_value=0, max_value=100), max_size=30)


@given(st.lists(TIMES, min_size=1, max_size=4), st.integers(1, 7), st.integers(20, 200))
def test_every_line_comes_once_and_in_its_nodes_order(
    logs: list[list[float]], limit: int, at_once: int
) -> None:
    names = [f"n{index}" for index in range(len(logs))]
    files = {
        name: "".join(f"{at:.6f} 0 o {name}-{count}\n" for count, at in enumerate(times)).encode()
        for name, times in zip(names, logs, strict=True)
    }
    texts = read_all(Files(files, at_once), attempt_on(*names), limit)
    for name, times in zip(names, logs, strict=True):
        assert [text for text in texts if text.startswith(f"{name}-")] == [
            f"{name}-{count}" for count in range(len(times))
        ]


def test_lines_of_several_nodes_are_merged_by_time() -> None:
    files = {"a": b"1.0 0 o first\n3.0 0 e third\n", "b": b"2.0 1 o second\n4.0 1 o fourth\n"}
    assert read_all(Files(files), attempt_on("a", "b"), 100) == ["first", "second", "third", "fourth"]


def test_one_rank_can_be_picked_without_losing_the_place() -> None:
    files = {"a": b"".join(b"%d.0 %d o line-%d\n" % (n, n % 3, n) for n in range(30))}
    assert read_all(Files(files), attempt_on("a"), 4, rank=1) == [f"line-{n}" for n in range(1, 30, 3)]


def test_the_tail_is_the_last_lines_of_all_nodes_together() -> None:
    files = {"a": b"1.0 0 o one\n4.0 0 o four\n", "b": b"2.0 1 o two\n3.0 1 o three\n"}
    page = anyio.run(read_tail, Files(files), attempt_on("a", "b"), ALL, 3)
    assert [line.view["text"] for line in page.lines] == ["two", "three", "four"]
    assert page.position == LogPosition(3, (len(files["a"]), len(files["b"])))
    assert anyio.run(read_tail, Files(files), attempt_on("a", "b"), ALL, 0).lines == []


def test_the_tail_of_a_large_log_reads_only_its_end() -> None:
    log = b"".join(b"%d.0 0 o line-%d\n" % (n, n) for n in range(400_000))
    engine = Files({"a": log})
    page = anyio.run(read_tail, engine, attempt_on("a"), ALL, 3)
    assert [line.view["text"] for line in page.lines] == ["line-399997", "line-399998", "line-399999"]
    assert page.position == LogPosition(3, (len(log),))
    assert engine.bytes_read < 1 << 20 < len(log)


@pytest.mark.parametrize("wanted", [LogFilter(999), LogFilter(is_stacks=True)])
def test_a_tail_that_finds_nothing_looks_at_a_bounded_part_of_the_logs(
    wanted: LogFilter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pages, "TAIL_BLOCK", 1 << 10)
    monkeypatch.setattr(log_pages, "MAX_TAIL", 8 << 10)
    text = b"".join(b"%d.0 0 o line-%d 999 t\n" % (n, n) for n in range(10_000))
    engine = Files({"a": b"1.0 999 o early\n" + text, "b": text})
    page = anyio.run(read_tail, engine, attempt_on("a", "b"), wanted, 1)
    assert page.lines == []
    assert page.position == LogPosition(3, (len(engine.logs["a"]), len(text)))
    assert engine.bytes_read < 12 << 10


def test_a_tail_reads_no_line_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"".join(b"%d.0 %d o line-%d 999 t\n" % (n, n % 3, n) for n in range(1000))
    files = Files({"a": b"0.5 7 o early\n0.6 7 t stack\n" + text})
    views: list[bytes] = []
    view = log_pages._view

    def seen(raw: bytes, node: str) -> LineView:
        views.append(raw)
        return view(raw, node)

    monkeypatch.setattr(log_pages, "_view", seen)
    page = anyio.run(read_tail, files, attempt_on("a"), LogFilter(7), 5)
    assert [line.view["text"] for line in page.lines] == ["early"]
    assert len(views) == 2


def test_logs_are_parsed_in_the_turns_of_their_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []
    submit = FairThreads.submit

    def seen(self: FairThreads, fn: Any) -> Any:
        callers.append(CALLER.get())
        return submit(self, fn)

    async def read() -> None:
        CALLER.set("user usr_1")
        await read_tail(Files({"a": text}), attempt_on("a"), LogFilter(7), 5)
        await read_page(Files({"a": text}), attempt_on("a"), LogPosition(3), 100)

    text = b"".join(b"%d.0 0 o line-%d\n" % (n, n) for n in range(1000))
    monkeypatch.setattr(FairThreads, "submit", seen)
    anyio.run(read)
    assert callers == ["user usr_1"] * 2


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(0, 45), st.integers(30, 200))
def test_the_tail_is_what_the_whole_log_ends_with(lengths: list[int], count: int, block: int) -> None:
    texts = [f"{number}-{'x' * length}" for number, length in enumerate(lengths)]
    log = "".join(f"{at}.0 {at % 2} o {text}\n" for at, text in enumerate(texts)).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_pages, "TAIL_BLOCK", block)
        page = anyio.run(read_tail, Files({"a": log}, at_once=50), attempt_on("a"), ALL, count)
        of_one = anyio.run(read_tail, Files({"a": log}), attempt_on("a"), LogFilter(1), count)
    shown = [line.view["text"] for line in page.lines]
    if block > 110:
        assert shown == (texts[-count:] if count else [])
        odd = texts[1::2]
        assert [line.view["text"] for line in of_one.lines] == (odd[-count:] if count else [])
    assert page.position == LogPosition(3, (len(log),))


def test_a_damaged_line_is_shown_as_it_is() -> None:
    views = [line.view for line in parse_chunk(b"nonsense\n1.5 x o y\n\n2.0 - s ok\n", "a", 0, 0)]
    assert [view["text"] for view in views] == ["nonsense", "1.5 x o y", "", "ok"]
    assert views[-1] == {"at": 2.0, "node": "a", "rank": None, "stream": "s", "text": "ok"}


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    (line,) = parse_chunk(b"1.0 0 o \xff\xfe hi\n", "a", 0, 0)
    assert line.view["text"] == "\ufffd\ufffd hi"


@pytest.mark.parametrize("text", ["", "1", "0.1", "x.1", "1.-1", "1.1-", "1.1--2", "1." + "9" * 30, "1.1 "])
def test_a_cursor_that_was_not_given_out_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_position(text)


def test_a_cursor_of_another_shape_of_attempt_is_refused() -> None:
    with pytest.raises(SpecError):
        LogPosition(3, (1, 2, 3)).offsets_for(attempt_on("a", "b"))
