"""Inspects a job's checkpoint directory from outside, without trusting what the job left there.

Links are not followed, only regular files are opened, and reading is bounded for each file and for the
whole inspection. Changes nothing.

`inspect_checkpoints` checks the checkpoints of Shoal's API by their manifests. `DirectoryWalk` lists what
the program itself saved, without opening a file: a folder counts as one save, with the size of its files. A
file that cannot be read, or a folder that is too large for one inspection, is reported with the save that
it belongs to.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal import bounded_file
from shoal.engines.base import ProgramSave, SavedCheckpoint, SavedCheckpoints, SaveDecision, SavedState
from shoal.engines.refusal import is_name
from shoal.runtime.rank.checkpoint.manifest import (
    MANIFEST,
    STATUS,
    CheckpointManifest,
    CheckpointName,
    CheckpointStatus,
    FileRecord,
    parse_name,
    read_manifest,
    read_status,
)

MAX_PROGRAM_SAVES = 50
MAX_LOOKED_AT = 5_000
"""Files and folders of one inspection. The size of others is not counted."""
MAX_DEPTH = 3
MAX_NAME = 255
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryWalk:
    """One walk through a directory. `may_look`: called before each file; False ends the walk."""

    def __init__(self, may_look: Callable[[], bool]) -> None:
        self._may_look = may_look
        self._left = MAX_LOOKED_AT
        self.is_truncated = False
        """Whether it ended before everything was seen."""

    def program_saves(
        self, directory: int, is_ours: Callable[[str], bool]
    ) -> tuple[tuple[ProgramSave, ...], int]:
        """Return the newest saves, and the number of all. `is_ours`: whether a name is a checkpoint of
        Shoal's API.
        """
        saves: list[ProgramSave] = []
        for entry in self.entries(directory):
            save = None if is_ours(entry.name) else self._program_save(directory, entry)
            if save is not None:
                saves.append(save)
        newest = sorted(saves, key=lambda save: (-save.saved_at, save.name))
        return tuple(newest[:MAX_PROGRAM_SAVES]), len(saves)

    def entries(self, directory: int) -> Iterator[os.DirEntry[str]]:
        """Yield the folder's entries until the walk's limit."""
        with os.scandir(directory) as entries:
            for entry in entries:
                self._left -= 1
                if self._left < 0 or not self._may_look():
                    self.is_truncated = True
                    return
                yield entry

    def _program_save(self, directory: int, entry: os.DirEntry[str]) -> ProgramSave | None:
        """Return the save; None: it is none, or was removed since it was listed."""
        name = _display_name(entry.name)
        try:
            if entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                return ProgramSave(name=name, saved_at=seen.st_mtime, size_bytes=seen.st_size)
            if not entry.is_dir(follow_symlinks=False):
                return None
            folder = FolderSummary(self, entry.stat(follow_symlinks=False).st_mtime)
            folder.add(directory, entry.name)
        except FileNotFoundError:
            return None
        except OSError as error:
            return ProgramSave(name=name, saved_at=0.0, size_bytes=0, problem=_unreadable("it", error))
        return ProgramSave(
            name=f"{name}/",
            saved_at=folder.saved_at,
            size_bytes=folder.size_bytes,
            problem=folder.problem,
        )


class FolderSummary:
    """The time of the last write in a folder, the size of its files, and why the size is not complete."""

    def __init__(self, walk: DirectoryWalk, saved_at: float) -> None:
        self._walk = walk
        self.saved_at = saved_at
        self.size_bytes = 0
        self.problem = ""

    def add(self, above: int, name: str, depth: int = 1) -> None:
        """Add everything below this folder.

        `FileNotFoundError`: it was removed since it was listed. Other `OSError`s are not raised: the first
        one becomes the problem.
        """
        try:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=above)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._set_problem(_unreadable(_display_name(name), error))
            return
        try:
            self.saved_at = max(self.saved_at, os.fstat(fd).st_mtime)
            for entry in self._walk.entries(fd):
                self._add_entry(fd, entry, depth)
        except OSError as error:
            self._set_problem(_unreadable(_display_name(name), error))
        finally:
            os.close(fd)
        if self._walk.is_truncated:
            self._set_problem("not all of it was looked at, and its size is only of what was")

    def _add_entry(self, above: int, entry: os.DirEntry[str], depth: int) -> None:
        try:
            if entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                self.saved_at = max(self.saved_at, seen.st_mtime)
                self.size_bytes += seen.st_size
            elif entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH:
                self.add(above, entry.name, depth + 1)
            elif entry.is_dir(follow_symlinks=False):
                self._set_problem(f"what lies deeper than {MAX_DEPTH} folders is not counted")
        except FileNotFoundError:
            return
        except OSError as error:
            self._set_problem(_unreadable(_display_name(entry.name), error))

    def _set_problem(self, problem: str) -> None:
        self.problem = self.problem or problem


def _unreadable(name: str, error: OSError) -> str:
    return f"{name} cannot be read: {error.strerror or type(error).__name__}"


def _display_name(name: str) -> str:
    """Return the name as text, because the kernel's names are bytes."""
    return os.fsencode(name).decode(errors="replace")[:MAX_NAME]


UNFINISHED = ".unfinished-"
MAX_CHECKPOINTS = 200
MAX_ENTRIES = 10_000
MAX_FILES = 10_000
"""Files of all checkpoints of one inspection."""
MAX_MANIFEST = 16 << 20
MAX_STATUS = 1 << 20
MAX_READ = 64 << 20
"""Bytes of all manifests of one inspection."""
MAX_LOCATION = 200
PIECE = 1 << 20
MAX_NUMBER = (1 << 53) - 1

MayGoOn = Callable[[], bool]


class CheckpointDamagedError(Exception):
    """Says what is wrong, as the end of a sentence."""


class BudgetSpentError(Exception):
    """The limit of one inspection is reached."""


class InspectionBudget:
    """The limit of one inspection. When it is reached, all older checkpoints stay unchecked."""

    def __init__(self, may_hash: MayGoOn, may_look: MayGoOn) -> None:
        self.may_hash = may_hash
        self._may_look = may_look
        self._files_left = MAX_FILES
        self._bytes_left = MAX_READ

    def use_files(self, num_files: int) -> None:
        """Use the budget for this many files. `BudgetSpentError`: it is spent, or time is up."""
        self._files_left -= num_files
        self.check()

    def use_bytes(self, num_bytes: int) -> None:
        """Use the budget for this many bytes, which were read and will be parsed without interruption."""
        self._bytes_left -= num_bytes

    def check(self) -> None:
        """Raise `BudgetSpentError` if the budget is spent."""
        if min(self._files_left, self._bytes_left) < 0 or not self._may_look():
            self._files_left = -1
            raise BudgetSpentError


def inspect_checkpoints(
    folder: Path, job_id: str, may_hash: MayGoOn = lambda: False, may_look: MayGoOn = lambda: True
) -> SavedCheckpoints:
    """Return the checkpoints and saves of a job, newest first.

    `may_hash`: called before each piece that is read to be verified. `may_look`: called before each file;
    checkpoints after it returns False, or after too many files, are `unchecked`.
    """
    if not is_name(job_id):
        return SavedCheckpoints()
    try:
        directory = os.open(folder / job_id, FOLDER_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        return SavedCheckpoints()
    try:
        budget = InspectionBudget(may_hash, may_look)
        status = _status(directory, budget)
        names, has_all_names = _names(directory)
        names = sorted(names, key=lambda entry: entry[0], reverse=True)[:MAX_CHECKPOINTS]
        items = tuple(_inspect_one(directory, name, entry, status, budget) for name, entry in names)
        walk = DirectoryWalk(may_look)
        program_saves, num_own = walk.program_saves(directory, _is_ours)
        return SavedCheckpoints(
            items=items,
            decision=_decision(status),
            program_saves=program_saves,
            num_program_saves=num_own,
            is_truncated=walk.is_truncated or not has_all_names,
        )
    finally:
        os.close(directory)


def _names(directory: int) -> tuple[list[tuple[CheckpointName, str]], bool]:
    """Return the checkpoints with their entries, and whether all entries were read."""
    names: list[tuple[CheckpointName, str]] = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_ENTRIES:
                return names, False
            name = parse_name(entry.name.removeprefix(UNFINISHED))
            if name is not None and max(name.fence.epoch, name.fence.rendezvous_round) <= MAX_NUMBER:
                names.append((name, entry.name))
    return names, True


def _is_ours(entry: str) -> bool:
    """Return whether an entry belongs to `runtime.Checkpoints`: a checkpoint, or a file beside them."""
    return entry.startswith(".") or parse_name(entry) is not None


def _inspect_one(
    directory: int, name: CheckpointName, entry: str, status: CheckpointStatus, budget: InspectionBudget
) -> SavedCheckpoint:
    checkpoint = SavedCheckpoint(
        step=name.step,
        epoch=name.fence.epoch,
        rendezvous_round=name.fence.rendezvous_round,
        state=SavedState.UNFINISHED,
        saved_at=0.0,
        size_bytes=0,
        name=entry,
        locations=tuple(
            place[:MAX_LOCATION] for place in status.places_by_name.get(str(name), ("directory",))[:8]
        ),
    )
    try:
        inside = os.open(entry, FOLDER_FLAGS, dir_fd=directory)
    except OSError as error:
        return msgspec.structs.replace(checkpoint, state=SavedState.DAMAGED, problem=error.strerror or "")
    try:
        checkpoint = msgspec.structs.replace(checkpoint, saved_at=os.fstat(inside).st_mtime)
        if entry.startswith(UNFINISHED):
            return msgspec.structs.replace(checkpoint, size_bytes=_size(inside, budget), locations=())
        return _inspect_committed(inside, name, checkpoint, budget)
    finally:
        os.close(inside)


def _inspect_committed(
    inside: int, name: CheckpointName, checkpoint: SavedCheckpoint, budget: InspectionBudget
) -> SavedCheckpoint:
    try:
        budget.check()
        manifest = _manifest(inside, name, budget)
        checkpoint = msgspec.structs.replace(
            checkpoint,
            world_size=manifest.world_size,
            size_bytes=sum(record.num_bytes for record in manifest.files.values()),
        )
        budget.use_files(len(manifest.files))
        checked = [_check(inside, file, record, budget) for file, record in manifest.files.items()]
    except CheckpointDamagedError as damage:
        return msgspec.structs.replace(checkpoint, state=SavedState.DAMAGED, problem=str(damage))
    except BudgetSpentError:
        return msgspec.structs.replace(checkpoint, state=SavedState.UNCHECKED)
    state = SavedState.VERIFIED if checked and all(checked) else SavedState.COMPLETE
    return msgspec.structs.replace(checkpoint, state=state)


def _check(inside: int, file: str, record: FileRecord, budget: InspectionBudget) -> bool:
    """Return whether its hash was verified. `CheckpointDamagedError`: the hash or size is wrong."""
    budget.check()
    with _damaged_if_unreadable(file), bounded_file.plain_file(file, dir_fd=inside) as fd:
        num_bytes = os.fstat(fd).st_size
        if num_bytes != record.num_bytes:
            raise CheckpointDamagedError(f"{file} has {num_bytes} bytes of {record.num_bytes}")
        digest = hashlib.sha256()
        while budget.may_hash():
            piece = os.read(fd, PIECE)
            if not piece:
                if digest.hexdigest() != record.sha256:
                    raise CheckpointDamagedError(f"{file} is not what was written")
                return True
            digest.update(piece)
    return False


def _manifest(inside: int, name: CheckpointName, budget: InspectionBudget) -> CheckpointManifest:
    try:
        return read_manifest(_read(inside, MANIFEST, MAX_MANIFEST, budget), name)
    except ValueError as error:
        raise CheckpointDamagedError(f"its manifest cannot be used: {error}") from error


def _status(directory: int, budget: InspectionBudget) -> CheckpointStatus:
    try:
        return read_status(_read(directory, STATUS, MAX_STATUS, budget)) or CheckpointStatus()
    except (CheckpointDamagedError, BudgetSpentError):
        return CheckpointStatus()


def _decision(status: CheckpointStatus) -> SaveDecision | None:
    decision = status.decision
    return None if decision is None else msgspec.convert(msgspec.to_builtins(decision), SaveDecision)


def _read(directory: int, file: str, max_bytes: int, budget: InspectionBudget) -> bytes:
    with _damaged_if_unreadable(file):
        data = bounded_file.read_whole(file, max_bytes, dir_fd=directory, before_read=budget.check)
    budget.use_bytes(len(data))
    return data


def _size(inside: int, budget: InspectionBudget) -> int:
    """Return the size of what is written so far, over as many files as the budget allows."""
    total = 0
    with os.scandir(inside) as entries, contextlib.suppress(BudgetSpentError):
        for entry in entries:
            budget.use_files(1)
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


@contextlib.contextmanager
def _damaged_if_unreadable(file: str) -> Iterator[None]:
    """Raise `CheckpointDamagedError` if no regular file of that name can be read, or it is too large."""
    try:
        yield
    except OSError as error:
        raise CheckpointDamagedError(f"{file} cannot be read: {error.strerror}") from error
