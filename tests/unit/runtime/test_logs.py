"""Lines of the log: cut, bounded, and honest about what was lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.clock import SystemClock
from shoal.runtime.logs import MAX_LINE, LineSplitter, LogFile, Tail


def lines_of(path: Path) -> list[bytes]:
    return [line.split(b" ", 1)[1] for line in path.read_bytes().split(b"\n")[:-1]]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_are_the_same_however_the_stream_is_cut(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    found = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()
    whole = b"".join(chunks).split(b"\n")
    assert found == (whole if whole[-1] else whole[:-1])


def test_huge_line_comes_in_pieces_and_loses_nothing() -> None:
    splitter = LineSplitter()
    line = bytes(range(1, 10)) * 40_000
    found = [piece for at in range(0, len(line), 50_000) for piece in splitter.feed(line[at : at + 50_000])]
    found += splitter.feed(b"\nnext\n") + splitter.finish()
    assert b"".join(found[:-1]) == line
    assert found[-1] == b"next"
    assert max(map(len, found)) == MAX_LINE


def test_log_line_has_time_rank_stream_and_the_raw_text(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), 1 << 20, SystemClock())
    log.add(3, "o", [b"one", b"\x1b[31mtwo\xff"])
    log.say("mine")
    assert log.finish()
    assert lines_of(tmp_path / "log") == [b"3 o one", b"3 o \x1b[31mtwo\xff", b"- e mine"]
    assert b"." in (tmp_path / "log").read_bytes().split(b" ")[0]


def test_full_log_ends_with_one_line_that_says_so(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"), 200, SystemClock())
    for _ in range(50):
        log.add(0, "o", [b"x" * 20])
    assert log.finish()
    found = lines_of(tmp_path / "log")
    assert found[:-1] == [b"0 o " + b"x" * 20] * (len(found) - 1)
    assert b"limit of 200 bytes" in found[-1]
    assert len(found) > 2


def test_lines_lost_to_a_full_disk_are_counted_and_said(
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
    found = lines_of(tmp_path / "log")
    assert found[0] == b"0 o before"
    assert found[1].startswith(b"- e shoal: 3 lines were lost here")
    assert found[2:] == [b"0 o after"]


def test_tail_keeps_the_last_lines_that_say_something() -> None:
    tail = Tail()
    tail.add([f"line {number}".encode() for number in range(20)] + [b"", b"  "])
    assert tail.text().splitlines()[-1] == "line 19"
    assert len(tail.text().splitlines()) <= 5
