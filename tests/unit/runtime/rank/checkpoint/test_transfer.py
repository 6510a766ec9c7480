"""Pieces of files on their way: exact, bounded, and never fewer than were promised."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from shoal.runtime.rank.checkpoint import peers
from shoal.runtime.rank.checkpoint.manifest import FileRecord
from shoal.runtime.rank.checkpoint.peers import FileSink, _chunks


def record(data: bytes) -> FileRecord:
    return FileRecord(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("size", [0, 1, 8, 17])
def test_file_arrives_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(peers, "CHUNK_BYTES", 8)
    data = bytes(range(size))
    (tmp_path / "a").write_bytes(data)
    sink = FileSink(str(tmp_path / "b"), record(data))
    for piece in _chunks([(str(tmp_path / "a"), record(data))]):
        sink.write(piece)
    sink.close()
    assert sink.problem is None
    assert (tmp_path / "b").read_bytes() == data


@pytest.mark.parametrize("left", [None, b"short"])
def test_file_that_is_gone_or_short_is_sent_in_full_length_and_refused_by_its_hash(
    tmp_path: Path, left: bytes | None
) -> None:
    promised = record(b"what was written")
    if left is not None:
        (tmp_path / "a").write_bytes(left)
    pieces = list(_chunks([(str(tmp_path / "a"), promised)]))
    assert sum(len(piece) for piece in pieces) == promised.num_bytes
    sink = FileSink(str(tmp_path / "b"), promised)
    for piece in pieces:
        sink.write(piece)
    sink.close()
    assert sink.problem == "b did not arrive as it was written"
    assert not (tmp_path / "b").exists()


def test_what_cannot_be_kept_is_taken_all_the_same(tmp_path: Path) -> None:
    sink = FileSink(str(tmp_path / "missing" / "b"), record(b"x"))
    sink.write(torch.zeros(1, dtype=torch.uint8))
    sink.close()
    assert sink.problem == "b cannot be kept: No such file or directory"
