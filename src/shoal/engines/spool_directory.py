"""The directory on the control plane's disk in which an engine stores attempts: the spool, and the mailbox.

    live/<attempt_id>/<node>/       stored and not forgotten
    archived/<attempt_id>/<node>/   forgotten: logs and outcomes stay
    draft/<term>/                   half made; nothing there runs
    trash/                          half removed; nothing there runs

The files of one task are `runtime/files/spool.py`. What a task means is up to the engine.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from pathlib import Path

from shoal.clock import BootClock
from shoal.engines.base import LogChunk
from shoal.engines.disk import read_page
from shoal.engines.refusal import is_name
from shoal.errors import Deposed
from shoal.runtime.files import removal, spool
from shoal.wire import TaskSpec

CLOCK = BootClock()
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
TERM_DIGITS = 12
FORMER_DRAFTS = re.compile(rf"[0-9]{{{TERM_DIGITS}}}\.[0-9a-f]{{12}}")
"""Names in the trash of the drafts of earlier terms. Jobs can write in other folders there."""
REMOVAL_S = 0.5
"""How long one call may spend on the files that a job left, even ten million. `sweep` continues later."""
FORGOTTEN = ".forgotten"
"""Suffix of an attempt on its way from live to archived: its logs must not go with other drafts."""


class SpoolDirectory:
    """The attempts of one home. After a crash at any point each of them is whole, or was never stored.

    The protocol:

    1. New files are written and synced in our own folder below `draft`. They appear in `live` by one rename.
    2. A task is replaced by two renames: the old directory goes to our drafts, then the new one takes its
       place. After a crash in between there is no task, nothing that could start, and the log, which a hard
       link keeps beside it.
    3. An attempt that is forgotten goes to our drafts, then to `archived`. A crash in between leaves it as
       `<attempt_id>.forgotten`, and the next opening completes the move.
    4. Nothing is removed in place. It goes to the trash by one rename, and `sweep` removes it there.
    5. Each control plane names its drafts after its term. To open is to move the drafts of earlier terms to
       the trash. Each change of `live` renames something from or to our drafts. So a control plane that was
       deposed and does not know it changes nothing, and one that is frozen in the middle blocks no other.
       It gets `FileNotFoundError`.

    All methods block. The caller lets no two of them change one attempt at the same time.
    """

    def __init__(self, root: Path, term: int = 0) -> None:
        """Open the directory. `Deposed`: a control plane of a later `term` has opened it."""
        self.live, self.archived, draft, self.trash = (
            root / name for name in ("live", "archived", "draft", "trash")
        )
        for folder in (root.parent, root, self.live, self.archived, draft, self.trash):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.draft = begin_term(draft, self.trash, term)
        self._numbers = itertools.count(1)
        for entry in self.trash.iterdir():
            if FORMER_DRAFTS.fullmatch(entry.name):
                complete_archiving(entry, self.archived)

    def attempts(self) -> list[str]:
        """Return the ids of the attempts that are stored and not forgotten, oldest first."""
        with os.scandir(self.live) as entries:
            return sorted(entry.name for entry in entries if is_name(entry.name))

    def tasks(self, attempt_id: str) -> list[Path]:
        """Return the directories of the attempt's tasks, by node; none if it is unknown or forgotten."""
        try:
            with os.scandir(self.live / attempt_id) as entries:
                return sorted(Path(entry.path) for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_archived(self, attempt_id: str) -> bool:
        """Return whether the attempt was here and is forgotten. Ask after `tasks`, not before it."""
        return is_name(attempt_id) and any(
            path.is_dir() for path in (self._on_its_way(attempt_id), self.archived / attempt_id)
        )

    def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        """Return one page of the log of a task, live or archived: see `Engine.read_log`."""
        # Forgetting moves the attempt from each place to the next, so look in that order.
        for attempt in (self.live / attempt_id, self._on_its_way(attempt_id), self.archived / attempt_id):
            directory = attempt / node
            if is_name(attempt_id) and is_name(node) and directory.is_dir():
                files = spool.SpoolTask(directory)
                # Checked before reading: once there is an outcome, the log does not grow.
                page = read_page(files.log, offset, limit, is_ended=Path(files.outcome).exists())
                if directory.is_dir():
                    return page
        return LogChunk(data=b"", next_offset=max(offset, 0), size=0, is_complete=True)

    def add(self, task_specs: tuple[TaskSpec, ...], archive_path: str | None) -> None:
        """Store the tasks of one attempt, all or none. An attempt that is stored already stays as it is."""
        attempt_id = task_specs[0].identity.attempt_id
        draft = self._new_draft(attempt_id)
        try:
            for task_spec in task_specs:
                _write_task(draft / task_spec.identity.node, task_spec, archive_path)
            spool.sync_directory(draft)
            draft.rename(self.live / attempt_id)
        except OSError as error:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
            if error.errno not in TAKEN:
                raise
        spool.sync_directory(self.live)

    def replace(self, task_spec: TaskSpec, archive_path: str | None) -> Path:
        """Store a task in place of one that has ended, or where none was. Its log continues in the same file.

        Return the path in the trash of what it replaced.
        """
        attempt_id, node = task_spec.identity.attempt_id, task_spec.identity.node
        above = self.live / attempt_id
        directory, log = above / node, above / f"{node}.log"
        draft = self._new_draft(f"{attempt_id}.{node}")
        new, old = draft / "new", draft / "old"
        try:
            _write_task(new, task_spec, archive_path)
            _link(directory / "log", new / "log")
            _link(log, new / "log")  # after a crash in an earlier call, if there is no directory
            _link(new / "log", log)
        except OSError:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
            raise
        with contextlib.suppress(FileNotFoundError):
            directory.rename(old)
        new.rename(directory)
        log.unlink(missing_ok=True)
        spool.sync_directory(above)
        return move_to_trash(draft, self.trash)

    def replace_file(self, target: str, content: bytes) -> None:
        """Replace one file of a task durably."""
        draft = self._new_draft("file")
        try:
            spool.durable_write(draft / "content", content)
            (draft / "content").rename(target)
        finally:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
        spool.sync_directory(Path(target).parent)

    def withdraw(self, attempt_id: str) -> None:
        """Remove an attempt as if it had never been stored."""
        draft = self._new_draft(attempt_id)
        (self.live / attempt_id).rename(draft / attempt_id)
        self.discard(draft)

    def archive(self, attempt_id: str) -> None:
        """Move an attempt to the archive. May be repeated after an error.

        `FileNotFoundError`: it is not here, or we are deposed.
        """
        held = self._on_its_way(attempt_id)
        if not held.exists():
            (self.live / attempt_id).rename(held)
        held.rename(self.archived / attempt_id)

    def discard(self, path: Path) -> None:
        """Move `path` to the trash at once, then remove it. After a crash in between it is in the trash."""
        removal.remove(str(move_to_trash(path, self.trash)), timeout_s=REMOVAL_S)

    def sweep(self) -> None:
        """Remove more of the trash. A control plane that is deposed may still do so."""
        deadline = CLOCK.monotonic() + REMOVAL_S
        for entry in self.trash.iterdir():
            left_s = deadline - CLOCK.monotonic()
            if left_s <= 0:
                return
            if FORMER_DRAFTS.fullmatch(entry.name):
                # Nothing can be added to drafts in the trash, so after this they hold nothing to keep.
                complete_archiving(entry, self.archived)
            removal.remove(str(entry), timeout_s=left_s)

    def prunable(self, older_than: float, max_bytes: int) -> list[str]:
        """Return the forgotten attempts that may go, oldest first, by the rule of `SupportsPrune.prune`."""
        entries = sorted((*_age_and_size(entry), entry.name) for entry in self.archived.iterdir())
        total, prunable = sum(size for _, size, _ in entries), list[str]()
        for written_at, size, attempt_id in entries:
            if written_at >= older_than and total <= max_bytes:
                break
            total -= size
            prunable.append(attempt_id)
        return prunable

    def _on_its_way(self, attempt_id: str) -> Path:
        return self.draft / f"{attempt_id}{FORGOTTEN}"

    def _new_draft(self, name: str) -> Path:
        """Make an empty folder of our own. `FileNotFoundError`: we are deposed."""
        draft = self.draft / f"{name}.{next(self._numbers)}"
        draft.mkdir(mode=0o700)
        return draft


def begin_term(drafts: Path, trash: Path, term: int) -> Path:
    """Return our folder below `drafts`. Folders of earlier terms are in the trash when this returns.

    `Deposed`: a later term has begun. Each process creates its own folder before it looks for others, so of
    two that begin at once, the earlier term always notices the later one.
    """
    ours = drafts / f"{term:0{TERM_DIGITS}d}"
    move_to_trash(ours, trash)  # of a process that had this term before us, where there are no terms
    ours.mkdir(mode=0o700)
    for other in drafts.iterdir():
        if other.name > ours.name and other.name.isdigit():
            move_to_trash(ours, trash)
            raise Deposed(f"another control plane leads since term {term}: it began term {int(other.name)}")
        if other != ours:
            move_to_trash(other, trash)
    return ours


def move_to_trash(path: Path, trash: Path) -> Path:
    """Take `path` away by one rename. Return its place in the trash. May be repeated."""
    thrown = trash / f"{path.name}.{os.urandom(6).hex()}"
    with contextlib.suppress(FileNotFoundError):
        path.rename(thrown)
    return thrown


def complete_archiving(drafts: Path, archived: Path) -> None:
    """Archive the attempts that a control plane was about to archive when it was killed."""
    for held in drafts.glob(f"*{FORGOTTEN}"):
        with contextlib.suppress(FileNotFoundError):
            held.rename(archived / held.name.removesuffix(FORGOTTEN))


def _write_task(directory: Path, task_spec: TaskSpec, archive_path: str | None) -> None:
    directory.mkdir(mode=0o700)
    files = spool.SpoolTask(directory)
    if archive_path is not None:
        _link_or_copy(archive_path, files.archive)
    spool.write_task_spec(files, task_spec)


def _link(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        os.link(source, target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def _age_and_size(path: Path) -> tuple[float, int]:
    """Return the time of the last write in the folder and its size in bytes. Follows no link."""
    written_at, total = 0.0, 0
    for above, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                facts = Path(above, name).lstat()
                written_at, total = max(written_at, facts.st_mtime), total + facts.st_size
    return written_at, total
