"""The anchor file: written whole, never moved back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import StateError
from shoal.store import LogHead, read_anchor, write_anchor

KEY = bytes(range(32))


def test_anchor_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "events.anchor"
    assert read_anchor(path, KEY) is None
    for head in (LogHead(5, "ab" * 32), LogHead(5, "ab" * 32), LogHead(9, "cd" * 32)):
        write_anchor(path, head, KEY)
        assert read_anchor(path, KEY) == head
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["events.anchor"]


@pytest.mark.parametrize("head", [LogHead(4, "ab" * 32), LogHead(5, "cd" * 32), LogHead(0, "0" * 64)])
def test_anchor_is_not_replaced_by_an_earlier_or_different_entry(tmp_path: Path, head: LogHead) -> None:
    path = tmp_path / "events.anchor"
    write_anchor(path, LogHead(5, "ab" * 32), KEY)
    with pytest.raises(StateError, match="entry 5"):
        write_anchor(path, head, KEY)
    assert read_anchor(path, KEY) == LogHead(5, "ab" * 32)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'["x","y"]', b"\xff"])
def test_damaged_anchor_is_an_error_not_an_absence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events.anchor"
    path.write_bytes(content)
    with pytest.raises(StateError, match="damaged"):
        read_anchor(path, KEY)


def test_unsigned_or_foreign_anchor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.anchor"
    write_anchor(path, LogHead(5, "ab" * 32), bytes(32))
    with pytest.raises(StateError, match="forged"):
        read_anchor(path, KEY)
    with pytest.raises(StateError, match="forged"):
        write_anchor(path, LogHead(9, "cd" * 32), KEY)
    path.unlink()
    write_anchor(path, LogHead(5, "ab" * 32), KEY)
    path.write_bytes(path.read_bytes().replace(b'"seq":5', b'"seq":4'))
    with pytest.raises(StateError, match="forged"):
        read_anchor(path, KEY)
