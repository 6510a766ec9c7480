"""The ranks that save and load together, in a group of their own beside training's.

Files from the memory of one node to that of another, between ranks of a group, each checked by its hash.

A file that cannot be read is sent as zeros and one that cannot be written is received all the same: both ends
know how much is on its way, and neither may leave the other waiting. The hash tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.runtime.rank.checkpoint.manifest import FileRecord

TIMEOUT = timedelta(minutes=10)
"""Ranks wait for the slowest writer."""

Value = TypeVar("Value")


class Peers:
    """Alone where no group was made. Used by one thread at a time; every call is a collective.

    Groups are held weakly: one that outlives its destruction by the program aborts the process at its end.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        world = _world()
        self._world = self._group = None
        if world is not None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._world, self._group = weakref.ref(world), weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: there never was one. `RuntimeError`: it is gone."""
        if self._group is None:
            return None
        group: dist.ProcessGroup | None = self._group()
        if group is None:
            raise RuntimeError("the group of ranks is gone")
        return group

    def is_current(self) -> bool:
        """Whether the process is still in the group that these are the ranks of."""
        return _world() is (None if self._world is None else self._world() or self)

    def gather(self, value: Value) -> list[Value]:
        """Everyone's value, by rank."""
        values: list[Any] = [value] * self.world_size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_rank_zero(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes; the others make nothing."""
        values: list[Any] = [make() if self.rank == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        result: Value = values[0]
        return result


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


CHUNK_BYTES = 4 << 20

Files = list[tuple[str, FileRecord]]
"""Paths, and what is in them."""


class FileSink:
    """A file that grows by what comes."""

    def __init__(self, path: str, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._digest = hashlib.sha256()
        self._file: Any = None
        self.problem: str | None = None
        try:
            self._file = open(path, "wb")  # noqa: SIM115 - closed in `close`, whatever happened
        except OSError as error:
            self.problem = _write_problem(path, error)

    def write(self, piece: torch.Tensor) -> None:
        data = piece.numpy().data
        self._digest.update(data)
        if self.problem is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.problem = _write_problem(self._path, error)

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
    sinks = [FileSink(path, record) for path, record in incoming]
    coming = (
        (sink, length)
        for sink, (_, record) in zip(sinks, incoming, strict=True)
        for length in _lengths(record)
    )
    for piece, slot in zip_longest(_chunks(outgoing), coming):
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
            slot[0].write(buffer)
    return _close_all(sinks)


def hand_over(
    peers: Peers, sender: int, path: str, receiver: int, target: str, record: FileRecord
) -> str | None:
    """One file from one rank to another; the others do nothing. Returns what the receiver found wrong."""
    if peers.rank == sender:
        for piece in _chunks([(path, record)]):
            dist.send(piece, dst=receiver, group=peers.group)
    if peers.rank != receiver:
        return None
    sink = FileSink(target, record)
    for length in _lengths(record):
        buffer = torch.empty(length, dtype=torch.uint8)
        dist.recv(buffer, src=sender, group=peers.group)
        sink.write(buffer)
    return _close_all([sink])


def _close_all(sinks: list[FileSink]) -> str | None:
    for sink in sinks:
        sink.close()
    return next((sink.problem for sink in sinks if sink.problem is not None), None)


def _chunks(files: Files) -> Iterator[torch.Tensor]:
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
    for start in range(0, record.num_bytes, CHUNK_BYTES):
        yield min(CHUNK_BYTES, record.num_bytes - start)


def _write_problem(path: str, error: OSError) -> str:
    return f"{os.path.basename(path)} cannot be kept: {error.strerror}"
