"""Look into a job's checkpoint directory from outside, without trusting what the job left there.

Links are not followed, what is no plain file is not opened, and what is read is bounded. Changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal.engines.base import SavedCheckpoint, SavedCheckpoints, SaveDecision, SavedState
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
MAX_MANIFEST = 16 << 20
MAX_STATUS = 1 << 20
MAX_PLACE = 200
PIECE = 1 << 20
MAX_NUMBER = (1 << 53) - 1
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

MayGoOn = Callable[[], bool]


class Damaged(Exception):
    """What is wrong, as the end of a sentence."""


def look(folder: Path, job_id: str, may_hash: MayGoOn = lambda: False) -> SavedCheckpoints:
    """What is there, the newest first. `may_hash`: asked before each piece that is read to be verified."""
    if not is_name(job_id):
        return SavedCheckpoints()
    try:
        directory = os.open(folder / job_id, FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return SavedCheckpoints()
    try:
        status = _status(directory)
        names = sorted(_names(directory), key=lambda one: one[0], reverse=True)[:MAX_SHOWN]
        items = tuple(_one(directory, name, entry, status, may_hash) for name, entry in names)
        return SavedCheckpoints(items=items, decision=_decision(status))
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


def _one(directory: int, name: Name, entry: str, status: Status, may_hash: MayGoOn) -> SavedCheckpoint:
    known = SavedCheckpoint(
        step=name.step,
        epoch=name.fence.epoch,
        generation=name.fence.generation,
        state=SavedState.UNFINISHED,
        saved_at=0.0,
        size_bytes=0,
        places=tuple(place[:MAX_PLACE] for place in status.kept.get(str(name), ("directory",))[:8]),
    )
    try:
        inside = os.open(entry, FOLDER, dir_fd=directory)
    except OSError as error:
        return msgspec.structs.replace(known, state=SavedState.DAMAGED, problem=error.strerror or "")
    try:
        known = msgspec.structs.replace(known, saved_at=os.fstat(inside).st_mtime)
        if entry.startswith(UNFINISHED):
            return msgspec.structs.replace(known, size_bytes=_size(inside), places=())
        return _committed(inside, name, known, may_hash)
    finally:
        os.close(inside)


def _committed(inside: int, name: Name, known: SavedCheckpoint, may_hash: MayGoOn) -> SavedCheckpoint:
    try:
        manifest = _manifest(inside, name)
        known = msgspec.structs.replace(
            known,
            world_size=manifest.world_size,
            size_bytes=sum(record.num_bytes for record in manifest.files.values()),
        )
        checked = [_check(inside, file, record, may_hash) for file, record in manifest.files.items()]
    except Damaged as damage:
        return msgspec.structs.replace(known, state=SavedState.DAMAGED, problem=str(damage))
    state = SavedState.VERIFIED if checked and all(checked) else SavedState.COMPLETE
    return msgspec.structs.replace(known, state=state)


def _check(inside: int, file: str, record: FileRecord, may_hash: MayGoOn) -> bool:
    """Whether its hash was seen to be right. `Damaged`: it, or its size, is wrong."""
    with _opened(inside, file) as fd:
        num_bytes = os.fstat(fd).st_size
        if num_bytes != record.num_bytes:
            raise Damaged(f"{file} has {num_bytes} bytes of {record.num_bytes}")
        digest = hashlib.sha256()
        while may_hash():
            piece = os.read(fd, PIECE)
            if not piece:
                if digest.hexdigest() != record.sha256:
                    raise Damaged(f"{file} is not what was written")
                return True
            digest.update(piece)
    return False


def _manifest(inside: int, name: Name) -> Manifest:
    try:
        return read_manifest(_read(inside, MANIFEST, MAX_MANIFEST), name)
    except ValueError as error:
        raise Damaged(f"its manifest cannot be used: {error}") from error


def _status(directory: int) -> Status:
    try:
        return read_status(_read(directory, STATUS, MAX_STATUS)) or Status()
    except Damaged:
        return Status()


def _decision(status: Status) -> SaveDecision | None:
    made = status.decision
    return None if made is None else msgspec.convert(msgspec.to_builtins(made), SaveDecision)


def _read(directory: int, file: str, most: int) -> bytes:
    with _opened(directory, file) as fd:
        if os.fstat(fd).st_size > most:
            raise Damaged(f"{file} is larger than {most} bytes")
        pieces = b"".join(iter(lambda: os.read(fd, PIECE), b""))
        return pieces[:most]


def _size(inside: int) -> int:
    """Of what is written so far, going by so many files."""
    total = 0
    with os.scandir(inside) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_ENTRIES:
                break
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


@contextlib.contextmanager
def _opened(directory: int, file: str) -> Iterator[int]:
    """A plain file of this folder. `Damaged`: there is none of that name."""
    try:
        fd = os.open(file, FILE, dir_fd=directory)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "its name is none"
        raise Damaged(f"{file} cannot be read: {why}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Damaged(f"{file} is not a plain file")
        yield fd
    finally:
        os.close(fd)
