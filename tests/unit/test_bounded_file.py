"""Files and folders that another process changes while they are read."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import bounded_file
from shoal.bounded_file import UnreadableFile, list_names, read_end, read_fd, read_start, read_whole

HUGE = 16 << 40
MOST = 1 << 20


class Reads:
    """Counts the bytes read, and changes the file right before the first chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before_first: object = None) -> None:
        self.num_bytes, self._do = 0, before_first
        self._read = os.read
        monkeypatch.setattr(os, "read", self)

    def __call__(self, fd: int, count: int) -> bytes:
        if self._do is not None:
            do, self._do = self._do, None
            assert callable(do)
            do()
        piece = self._read(fd, count)
        self.num_bytes += len(piece)
        return piece


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"{}")
    return path


def test_a_file_is_read_whole_up_to_the_bound(file: Path) -> None:
    file.write_bytes(b"x" * MOST)
    assert read_whole(file, MOST) == b"x" * MOST
    file.write_bytes(b"x" * (MOST + 1))
    with pytest.raises(UnreadableFile, match=f"longer than {MOST} bytes"):
        read_whole(file, MOST)


@pytest.mark.parametrize("size", [3 << 30, 1 << 40])
def test_a_file_that_grows_when_it_is_read_costs_no_more_than_the_bound(
    file: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch, lambda: os.truncate(file, size))
    with pytest.raises(UnreadableFile):
        read_whole(file, MOST)
    assert reads.num_bytes == MOST + 1


def test_a_file_that_grows_with_every_piece_ends_at_the_bound(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    grown = reads.__call__

    def grow(fd: int, count: int) -> bytes:
        with file.open("ab") as more:
            more.write(b"y" * count)
        return grown(fd, count)

    monkeypatch.setattr(os, "read", grow)
    with pytest.raises(UnreadableFile):
        read_whole(file, MOST)
    assert reads.num_bytes == MOST + 1
    assert len(read_end(file, 100)) == 100


def test_a_file_that_shrinks_when_it_is_read_is_what_is_left(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_bytes(b"x" * 1000)
    Reads(monkeypatch, lambda: os.truncate(file, 10))
    assert read_whole(file, MOST) == b"x" * 10


def test_a_file_that_is_replaced_when_it_is_read_is_read_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = file.with_name("other")
    other.write_bytes(b"z" * (2 * MOST))
    Reads(monkeypatch, lambda: other.rename(file))
    assert read_whole(file, MOST) == b"{}"


def test_the_start_and_the_end_of_a_huge_file_cost_what_is_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(file, 1 << 40)
    reads = Reads(monkeypatch)
    assert read_start(file, 4) == b"{}\0\0"
    assert read_end(file, 4) == b"\0" * 4
    assert reads.num_bytes == 8


def test_file_that_is_not_plain_is_refused_without_waiting(tmp_path: Path, file: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(file)
    for name in ("fifo", "folder"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(UnreadableFile, match="not a plain file"):
            read_whole(tmp_path / name, MOST)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        read_whole(tmp_path / "link", MOST)
    with pytest.raises(UnreadableFile, match="its name is none"):
        read_whole("a\0b", MOST)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none", MOST)


def test_lease_on_the_file_delays_no_reader(file: Path) -> None:
    """The kernel would make a blocking open wait for the lease holder for up to 45 s."""
    with file.open("r+b") as held:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from shoal.bounded_file import read_whole; read_whole({str(file)!r}, 9)",
            ],
            capture_output=True,
            timeout=30,
            check=False,
        )
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    assert b"BlockingIOError" in done.stderr


def test_callback_runs_before_each_chunk(file: Path) -> None:
    file.write_bytes(b"x" * (3 * bounded_file.CHUNK_BYTES))
    pieces: list[int] = []

    def look_on() -> None:
        pieces.append(1)
        if len(pieces) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        read_whole(file, 10 * bounded_file.CHUNK_BYTES, before_read=look_on)


def test_of_a_folder_with_many_names_only_some_are_listed(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert len(list_names(tmp_path, 5)) == 5
    assert len(list_names(tmp_path, 50)) == 20


def test_a_pipe_that_goes_on_is_read_up_to_the_bound() -> None:
    out, into = os.pipe()
    os.write(into, b"x" * 5000)
    assert read_fd(out, 1000) == b"x" * 1000
    os.close(out)
    os.close(into)
