"""Lines of the log: split, bounded, and with a note about lost lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.clock import SystemClock
from shoal.runtime.process.log import MAX_LINE, LineSplitter, LogFile


def lines_of(path: Path) -> list[bytes]:
    return [line.split(b" ", 1)[1] for line in path.read_bytes().split(b"\n")[:-1]]


@given(st.lists(st.binary(max_size=40).map(lambda chunk: chunk.replace(b"\r", b"")), max_size=20))
def test_lines_do_not_depend_on_the_chunks_of_the_stream(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk, 0.0)] + splitter.finish()
    whole = b"".join(chunks).split(b"\n")
    assert lines == (whole if whole[-1] else whole[:-1])


def test_huge_line_comes_in_pieces_and_loses_nothing() -> None:
    splitter = LineSplitter()
    line = bytes(range(1, 10)) * 40_000
    steps = range(0, len(line), 50_000)
    lines = [piece for at in steps for piece in splitter.feed(line[at : at + 50_000], 0.0)]
    lines += splitter.feed(b"\nnext\n", 0.0) + splitter.finish()
    assert b"".join(lines[:-1]) == line
    assert lines[-1] == b"next"
    assert max(map(len, lines)) == MAX_LINE


@given(st.lists(st.tuples(st.text("a\r\n ", max_size=6), st.floats(0, 3)), max_size=30))
def test_redrawn_lines_lose_no_text(chunks: list[tuple[str, float]]) -> None:
    splitter = LineSplitter()
    lines, now = [], 0.0
    for chunk, pause_s in chunks:
        lines += splitter.feed(chunk.encode(), now)
        now += pause_s
        lines += splitter.settled(now)
    lines += splitter.finish()
    assert b"".join(lines).decode() == "".join(text for text, _ in chunks).replace("\n", "")


def test_progress_bar_is_seen_about_once_a_second_and_ends_as_one_line() -> None:
    splitter = LineSplitter()
    pieces = [(tenth, splitter.feed(b"\r%3d%%" % tenth, tenth / 10)) for tenth in range(101)]
    seen = [(tenth, lines) for tenth, lines in pieces if lines]
    assert len(seen) == 10
    assert all(len(lines) == 1 and lines[0].endswith(b"%3d%%\r" % (tenth - 1)) for tenth, lines in seen)
    assert splitter.settled(10.5) == []
    assert splitter.settled(11.1)[-1].endswith(b"\r100%")
    assert splitter.feed(b"\nnext\n", 12.0) == [b"next"]


def test_empty_states_of_a_redrawn_line_make_no_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r", 0.0) == splitter.settled(5.0) == splitter.feed(b"   \r", 9.0) == []
    assert splitter.feed(b"done\n", 10.0) == [b"\r   \rdone"]


def test_carriage_return_and_newline_make_no_empty_lines() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\r", 0.0) + splitter.feed(b"\ntwo\r\n", 0.1) == [b"one\r", b"two\r"]


def test_log_line_has_time_rank_stream_and_the_raw_text(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), 1 << 20, SystemClock())
    log.add(3, "o", [b"one", b"\x1b[31mtwo\xff"])
    log.add_message("mine")
    assert log.finish()
    assert lines_of(tmp_path / "log") == [b"3 o one", b"3 o \x1b[31mtwo\xff", b"- e mine"]
    assert b"." in (tmp_path / "log").read_bytes().split(b" ")[0]


def test_full_log_ends_with_one_note(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), 200, SystemClock())
    for _ in range(50):
        log.add(0, "o", [b"x" * 20])
    assert log.finish()
    lines = lines_of(tmp_path / "log")
    assert lines[:-1] == [b"0 o " + b"x" * 20] * (len(lines) - 1)
    assert b"limit of 200 bytes" in lines[-1]
    assert len(lines) > 2


def test_lines_lost_to_a_full_disk_are_counted_in_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogFile(str(tmp_path / "log"), 1 << 20, SystemClock())
    log.add(0, "o", [b"before"])
    really_write = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "no space")
        return really_write(fd, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        log.add(0, "o", [b"lost", b"lost too"])
        log.add(0, "e", [b"also lost"])
    log.add(0, "o", [b"after"])
    assert log.finish()
    lines = lines_of(tmp_path / "log")
    assert lines[0] == b"0 o before"
    assert lines[1].startswith(b"- e 3 lines were lost here")
    assert lines[2:] == [b"0 o after"]
