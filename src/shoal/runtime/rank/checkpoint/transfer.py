"""Files from the memory of one node to that of another, between ranks of a group, each checked by its hash.

A file that cannot be read is sent as zeros and one that cannot be written is received all the same: both ends
know how much is on its way, and neither may leave the other waiting. The hash tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from shoal.runtime.rank.checkpoint.manifest import FileRecord
from shoal.runtime.rank.checkpoint.peers import Peers

PIECE = 4 << 20

Files = list[tuple[str, FileRecord]]
"""Paths, and what is in them."""


class Sink:
    """A file that grows by what comes."""

    def __init__(self, path: str, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._digest = hashlib.sha256()
        self._file: Any = None
        self.problem: str | None = None
        try:
            self._file = open(path, "wb")  # noqa: SIM115 - closed in `close`, whatever happened
        except OSError as error:
            self.problem = _told(path, error)

    def take(self, piece: torch.Tensor) -> None:
        data = piece.numpy().data
        self._digest.update(data)
        if self.problem is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.problem = _told(self._path, error)

    def close(self) -> None:
        """Everything has come. What is wrong with it is not kept."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if self.problem is None and self._digest.hexdigest() != self._record.sha256:
            self.problem = f"{os.path.basename(self._path)} did not arrive as it was written"
        if self.problem is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def exchange(peers: Peers, to: int, outgoing: Files, source: int, incoming: Files) -> str | None:
    """Send to one rank while receiving from another. All ranks call it at once, in a ring.

    Returns what is wrong with what came. `RuntimeError`: a peer is gone.
    """
    sinks = [Sink(path, record) for path, record in incoming]
    coming = (
        (sink, length)
        for sink, (_, record) in zip(sinks, incoming, strict=True)
        for length in _lengths(record)
    )
    for piece, slot in zip_longest(_pieces(outgoing), coming):
        works: list[Any] = []
        buffer = None
        if slot is not None:
            buffer = torch.empty(slot[1], dtype=torch.uint8)
            works.append(dist.irecv(buffer, src=source, group=peers.group))
        if piece is not None:
            works.append(dist.isend(piece, dst=to, group=peers.group))
        for work in works:
            work.wait()
        if slot is not None and buffer is not None:
            slot[0].take(buffer)
    return _closed(sinks)


def hand_over(
    peers: Peers, sender: int, path: str, receiver: int, target: str, record: FileRecord
) -> str | None:
    """One file from one rank to another; the others do nothing. Returns what the receiver found wrong."""
    if peers.rank == sender:
        for piece in _pieces([(path, record)]):
            dist.send(piece, dst=receiver, group=peers.group)
    if peers.rank != receiver:
        return None
    sink = Sink(target, record)
    for length in _lengths(record):
        buffer = torch.empty(length, dtype=torch.uint8)
        dist.recv(buffer, src=sender, group=peers.group)
        sink.take(buffer)
    return _closed([sink])


def _closed(sinks: list[Sink]) -> str | None:
    for sink in sinks:
        sink.close()
    return next((sink.problem for sink in sinks if sink.problem is not None), None)


def _pieces(files: Files) -> Iterator[torch.Tensor]:
    for path, record in files:
        with contextlib.ExitStack() as stack:
            file: Any = None
            with contextlib.suppress(OSError):
                file = stack.enter_context(open(path, "rb"))
            for length in _lengths(record):
                yield _piece(file, length)


def _piece(file: Any, length: int) -> torch.Tensor:
    data = bytearray(length)
    with contextlib.suppress(OSError):
        if file is not None:
            file.readinto(data)
    return torch.frombuffer(data, dtype=torch.uint8)


def _lengths(record: FileRecord) -> Iterator[int]:
    for start in range(0, record.num_bytes, PIECE):
        yield min(PIECE, record.num_bytes - start)


def _told(path: str, error: OSError) -> str:
    return f"{os.path.basename(path)} cannot be kept: {error.strerror}"
