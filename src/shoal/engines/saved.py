"""Look into a job's checkpoint directory from outside, without trusting what the job left there.

Links are not followed, what is no plain file is not opened, and what is read is bounded: for each file, and
for all of a look. Changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal import bounded_file
from shoal.engines.base import SavedCheckpoint, SavedCheckpoints, SaveDecision, SavedState
from shoal.engines.own_saves import FOLDER, Walk
from shoal.engines.refusal import is_name
from shoal.runtime.rank.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    Name,
    parse_name,
    read_manifest,
)
from shoal.runtime.rank.checkpoint.status import STATUS, Status, read_status

UNFINISHED = ".unfinished-"
MAX_SHOWN = 200
MAX_ENTRIES = 10_000
MAX_FILES = 10_000
"""Of all checkpoints of one look."""
MAX_MANIFEST = 16 << 20
MAX_STATUS = 1 << 20
MAX_READ = 64 << 20
"""Bytes of all manifests of one look."""
MAX_PLACE = 200
PIECE = 1 << 20
MAX_NUMBER = (1 << 53) - 1

MayGoOn = Callable[[], bool]


class Damaged(Exception):
    """What is wrong, as the end of a sentence."""


class Unchecked(Exception):
    """One look may cost no more."""


class Budget:
    """What one look may cost. Once it is spent, all that is older stays unchecked."""

    def __init__(self, may_hash: MayGoOn, may_look: MayGoOn) -> None:
        self.may_hash = may_hash
        self._may_look = may_look
        self._files_left = MAX_FILES
        self._bytes_left = MAX_READ

    def take(self, num_files: int) -> None:
        """So many will be looked at. `Unchecked`: that is more than are left, or time is up."""
        self._files_left -= num_files
        self.look_on()

    def read(self, num_bytes: int) -> None:
        """So many were read and are to be parsed, which nothing interrupts."""
        self._bytes_left -= num_bytes

    def look_on(self) -> None:
        """`Unchecked`: it is spent."""
        if min(self._files_left, self._bytes_left) < 0 or not self._may_look():
            self._files_left = -1
            raise Unchecked


def look(
    folder: Path, job_id: str, may_hash: MayGoOn = lambda: False, may_look: MayGoOn = lambda: True
) -> SavedCheckpoints:
    """What is there, the newest first. `may_hash`: asked before each piece that is read to be verified.
    `may_look`: before each file; what is left when it says no, or after too many files, is `unchecked`.
    """
    if not is_name(job_id):
        return SavedCheckpoints()
    try:
        directory = os.open(folder / job_id, FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return SavedCheckpoints()
    try:
        budget = Budget(may_hash, may_look)
        status = _status(directory, budget)
        names = sorted(_names(directory), key=lambda one: one[0], reverse=True)[:MAX_SHOWN]
        items = tuple(_one(directory, name, entry, status, budget) for name, entry in names)
        walk = Walk(may_look)
        own, num_own = walk.saves(directory, _is_ours)
        return SavedCheckpoints(
            items=items, decision=_decision(status), own=own, num_own=num_own, is_own_cut=walk.is_cut
        )
    finally:
        os.close(directory)


def _names(directory: int) -> Iterator[tuple[Name, str]]:
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_ENTRIES:
                return
            name = parse_name(entry.name.removeprefix(UNFINISHED))
            if name is not None and max(name.fence.epoch, name.fence.generation) <= MAX_NUMBER:
                yield name, entry.name


def _is_ours(entry: str) -> bool:
    """A checkpoint of `runtime.Checkpoints`, or what it keeps beside them: all of that is hidden."""
    return entry.startswith(".") or parse_name(entry) is not None


def _one(directory: int, name: Name, entry: str, status: Status, budget: Budget) -> SavedCheckpoint:
    known = SavedCheckpoint(
        step=name.step,
        epoch=name.fence.epoch,
        generation=name.fence.generation,
        state=SavedState.UNFINISHED,
        saved_at=0.0,
        size_bytes=0,
        name=entry,
        places=tuple(place[:MAX_PLACE] for place in status.kept.get(str(name), ("directory",))[:8]),
    )
    try:
        inside = os.open(entry, FOLDER, dir_fd=directory)
    except OSError as error:
        return msgspec.structs.replace(known, state=SavedState.DAMAGED, problem=error.strerror or "")
    try:
        known = msgspec.structs.replace(known, saved_at=os.fstat(inside).st_mtime)
        if entry.startswith(UNFINISHED):
            return msgspec.structs.replace(known, size_bytes=_size(inside, budget), places=())
        return _committed(inside, name, known, budget)
    finally:
        os.close(inside)


def _committed(inside: int, name: Name, known: SavedCheckpoint, budget: Budget) -> SavedCheckpoint:
    try:
        budget.look_on()
        manifest = _manifest(inside, name, budget)
        known = msgspec.structs.replace(
            known,
            world_size=manifest.world_size,
            size_bytes=sum(record.num_bytes for record in manifest.files.values()),
        )
        budget.take(len(manifest.files))
        checked = [_check(inside, file, record, budget) for file, record in manifest.files.items()]
    except Damaged as damage:
        return msgspec.structs.replace(known, state=SavedState.DAMAGED, problem=str(damage))
    except Unchecked:
        return msgspec.structs.replace(known, state=SavedState.UNCHECKED)
    state = SavedState.VERIFIED if checked and all(checked) else SavedState.COMPLETE
    return msgspec.structs.replace(known, state=state)


def _check(inside: int, file: str, record: FileRecord, budget: Budget) -> bool:
    """Whether its hash was seen to be right. `Damaged`: it, or its size, is wrong."""
    budget.look_on()
    with _usable(file), bounded_file.plain_file(file, dir_fd=inside) as fd:
        num_bytes = os.fstat(fd).st_size
        if num_bytes != record.num_bytes:
            raise Damaged(f"{file} has {num_bytes} bytes of {record.num_bytes}")
        digest = hashlib.sha256()
        while budget.may_hash():
            piece = os.read(fd, PIECE)
            if not piece:
                if digest.hexdigest() != record.sha256:
                    raise Damaged(f"{file} is not what was written")
                return True
            digest.update(piece)
    return False


def _manifest(inside: int, name: Name, budget: Budget) -> Manifest:
    try:
        return read_manifest(_read(inside, MANIFEST, MAX_MANIFEST, budget), name)
    except ValueError as error:
        raise Damaged(f"its manifest cannot be used: {error}") from error


def _status(directory: int, budget: Budget) -> Status:
    try:
        return read_status(_read(directory, STATUS, MAX_STATUS, budget)) or Status()
    except (Damaged, Unchecked):
        return Status()


def _decision(status: Status) -> SaveDecision | None:
    made = status.decision
    return None if made is None else msgspec.convert(msgspec.to_builtins(made), SaveDecision)


def _read(directory: int, file: str, most: int, budget: Budget) -> bytes:
    with _usable(file):
        data = bounded_file.read_whole(file, most, dir_fd=directory, look_on=budget.look_on)
    budget.read(len(data))
    return data


def _size(inside: int, budget: Budget) -> int:
    """Of what is written so far, going by as many files as may be looked at."""
    total = 0
    with os.scandir(inside) as entries, contextlib.suppress(Unchecked):
        for entry in entries:
            budget.take(1)
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


@contextlib.contextmanager
def _usable(file: str) -> Iterator[None]:
    """`Damaged`: there is no plain file of that name, or none of a size that is read."""
    try:
        yield
    except OSError as error:
        raise Damaged(f"{file} cannot be read: {error.strerror}") from error
