"""What happens in a task's directory before its ranks start: unpack, link the checkpoints, run `setup`.

Each step is a process of the job's own user. It is started here, and `TaskRun` waits for it.

`WorkFolder` reports at the end what is lost of the work folder, and what a program missed there.
`PreparedTask` holds what a standby has prepared for a task: walls, files, and a zygote with its imports.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.files import job_files, spool
from shoal.runtime.files.spool import SpoolTask
from shoal.runtime.process.launcher import Launcher, Pipes
from shoal.runtime.process.meter import Meter
from shoal.runtime.rank.board import RankBoard
from shoal.runtime.supervisor.endings import Ending
from shoal.wire import EndKind, TaskFolders, TaskSpec, WrittenFiles

Wait = Callable[[str, tuple[int, Pipes]], Ending | None]
"""Waits for a started process. The text names what it does. None: it went well."""


def make_directories(task: SpoolTask, uid: int | None) -> None:
    """Make the directories of the job: its work directory, /tmp and stand-ins. May be repeated."""
    for path in (task.work, task.scratch, task.stand_ins):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if uid is not None:
            os.fchown(fd, uid, uid)
        os.close(fd)


def script_directory_of(folders: TaskFolders, attempt_id: str, work: str) -> str:
    """Return the directory with the job's files in which its scripts start."""
    if not folders.has_shared_folder or folders.checkpoint_dir is None:
        return work
    return f"{folders.checkpoint_dir}/.shared/{attempt_id}"


class TaskPreparation:
    """The steps. Each returns None if it went well or there is nothing to do, otherwise why the task ends."""

    def __init__(self, task_spec: TaskSpec, task: SpoolTask, launcher: Launcher, wait: Wait) -> None:
        self._program = task_spec.program
        self._folders = task_spec.folders
        self._attempt_id = task_spec.identity.attempt_id
        self._task = task
        self._launcher = launcher
        self._wait = wait

    def unpack(self) -> Ending | None:
        """Unpack the job's files into the work directory, or into the folder that nodes share."""
        if self._folders.has_shared_folder:
            return self._share_folder()
        digest, work = self._program.archive_digest, self._task.work
        if digest is None:
            return None
        try:
            fd = os.open(self._task.archive, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return Ending(kind=EndKind.SETUP_FAILED, message="there is no archive to unpack")
        try:
            arguments = (fd, digest, work)
            child = self._launcher.start_function(
                "shoal.runtime.files.unpack", "unpack", arguments, inherited_fds=(fd,)
            )
            return self._wait("unpacking", child)
        finally:
            os.close(fd)

    def _share_folder(self) -> Ending | None:
        fd, folder = None, script_directory_of(self._folders, self._attempt_id, self._task.work)
        if self._program.archive_digest is not None:
            try:
                fd = os.open(self._task.archive, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return Ending(kind=EndKind.SETUP_FAILED, message="there is no archive to unpack")
        try:
            arguments = (fd, self._program.archive_digest, folder)
            keep = (fd,) if fd is not None else ()
            child = self._launcher.start_function(
                "shoal.runtime.files.unpack", "make", arguments, inherited_fds=keep
            )
            end = self._wait("unpacking into the folder that nodes share", child)
        finally:
            if fd is not None:
                os.close(fd)
        self._launcher.script_directory = folder
        return end

    def link_checkpoint(self) -> Ending | None:
        """Link the job's checkpoint directory to where ranks look for it, beside their files."""
        directory, path = self._folders.checkpoint_dir, self._folders.checkpoint_path
        if directory is None or path is None or path.startswith("/"):
            return None
        arguments = (directory, path, self._launcher.script_directory)
        child = self._launcher.start_function(
            "shoal.runtime.files.checkpoint_storage", "link", arguments, inherited_fds=()
        )
        return self._wait("linking the checkpoint directory", child)

    def set_up(self, environment: dict[str, str]) -> Ending | None:
        """Run the job's own `setup`."""
        if self._program.setup is None:
            return None
        return self._wait("setup", self._launcher.start_script(self._program.setup, environment))


class WorkFolder:
    """The work folder of one task. Call `mark_start` when its ranks start, `lost_files` when nothing runs."""

    def __init__(self, task_spec: TaskSpec, task: spool.SpoolTask) -> None:
        self._program = task_spec.program
        self._task = task
        self._directory = script_directory_of(task_spec.folders, task_spec.identity.attempt_id, task.work)
        self._is_kept = task_spec.folders.has_shared_folder or task_spec.program.probe is not None
        self._mark: job_files.WriteMark | None = None

    def mark_start(self) -> None:
        """Note the time. Newer files are the ranks' own."""
        self._mark = job_files.make_mark(self._task.directory)

    def lost_files(self) -> WrittenFiles | None:
        """Count files of the ranks that are lost. A server's files are no results, and a shared
        folder stays.
        """
        if self._mark is None or self._is_kept:
            return None
        return job_files.count_written(self._task.work, self._mark)

    def explain_missing(self, message: str, output_tail: str) -> str:
        """Return the message and, if the last output speaks of a missing file, why it is missing."""
        missed = job_files.explain_missing_file(output_tail, self._program, self._directory)
        return f"{message}; {missed}" if missed else message


class PreparedTask:
    """What a standby has prepared for one task. Its descriptors have the numbers that the zygote knows."""

    def __init__(
        self,
        *,
        confinement: Confinement,
        launcher: Launcher,
        board: tuple[int, RankBoard],
        meter: Meter,
        zygote: tuple[int, Pipes],
    ) -> None:
        self.confinement = confinement
        self.launcher = launcher
        self.board = board
        self.meter = meter
        self.zygote = zygote
        self.on_settled: Callable[[], None] = lambda: None

    def settle(self, task_spec: TaskSpec) -> None:
        """Give the prepared things to the task, which has been claimed."""
        self.confinement.adopt(task_spec)
        self.on_settled()
