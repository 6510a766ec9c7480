"""What is done in a share's directory before its ranks start: unpack, link the checkpoints, set up.

Each is a process of the job's own user. It is started here and waited for by whoever runs the share.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from shoal.runtime.ending import Ending
from shoal.runtime.launch import Launcher, Pipes
from shoal.runtime.spool import Share
from shoal.wire import EndKind, Order

Wait = Callable[[str, tuple[int, Pipes]], Ending | None]
"""Wait for a process that was started to do what is named. None: it went well."""


def make_directories(share: Share, uid: int | None) -> None:
    """Where the job works, its /tmp, and its stand-ins: the job's own. May be repeated."""
    for path in (share.work, share.scratch, share.stand_ins):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if uid is not None:
            os.fchown(fd, uid, uid)
        os.close(fd)


def begins_in(order: Order, work: str) -> str:
    """The directory that the job's scripts begin in, with its files."""
    if not order.has_shared_folder or order.checkpoint_dir is None:
        return work
    return f"{order.checkpoint_dir}/.shared/{order.attempt_id}"


class Groundwork:
    """Each verb returns None where there is nothing to do, or it went well; else how the share ends."""

    def __init__(self, order: Order, share: Share, launcher: Launcher, wait: Wait) -> None:
        self._order = order
        self._share = share
        self._launcher = launcher
        self._wait = wait

    def unpack(self) -> Ending | None:
        """The job's files, into the work directory or the folder that nodes share."""
        if self._order.has_shared_folder:
            return self._share_folder()
        digest, work = self._order.archive_digest, self._share.work
        if digest is None:
            return None
        try:
            fd = os.open(self._share.archive, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return Ending(kind=EndKind.SETUP_FAILED, message="there is no archive to unpack")
        try:
            told = (fd, digest, work)
            child = self._launcher.start_function("shoal.runtime.unpack", "unpack", told, keep=(fd,))
            return self._wait("unpacking", child)
        finally:
            os.close(fd)

    def _share_folder(self) -> Ending | None:
        order = self._order
        fd = None
        if order.archive_digest is not None:
            try:
                fd = os.open(self._share.archive, os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return Ending(kind=EndKind.SETUP_FAILED, message="there is no archive to unpack")
        try:
            told = (fd, order.archive_digest, begins_in(order, self._share.work))
            keep = (fd,) if fd is not None else ()
            child = self._launcher.start_function("shoal.runtime.shared_folder", "make", told, keep=keep)
            end = self._wait("unpacking into the folder that nodes share", child)
        finally:
            if fd is not None:
                os.close(fd)
        self._launcher.begins_in = begins_in(order, self._share.work)
        return end

    def link_checkpoint(self) -> Ending | None:
        """Where ranks find the job's checkpoint directory beside their files."""
        directory, path = self._order.checkpoint_dir, self._order.checkpoint_path
        if directory is None or path is None or path.startswith("/"):
            return None
        told = (directory, path, self._launcher.begins_in)
        child = self._launcher.start_function("shoal.runtime.checkpoint_folder", "link", told, keep=())
        return self._wait("linking the checkpoint directory", child)

    def set_up(self, environment: dict[str, str]) -> Ending | None:
        """The job's own `setup`."""
        if self._order.setup is None:
            return None
        return self._wait("setup", self._launcher.start_script(self._order.setup, environment))
