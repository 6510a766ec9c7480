"""The directories a job asked to see: opened as its user, checked, and compared with what was mounted.

A descriptor pins each directory from the check to the end. bubblewrap goes by path, so what it mounted is
looked at again from inside before anything of the job runs.
"""

from __future__ import annotations

import os

from shoal.errors import SpecError
from shoal.runtime import checkpoint_folder, listening
from shoal.runtime.confine import view
from shoal.wire import Order


class Mounts:
    """`open` once, `check` in every child that is in the sandbox, `close` when no child will follow."""

    def __init__(
        self, order: Order, uid: int | None, home: str, keep: tuple[str, ...], cache: str | None = None
    ) -> None:
        """`home` and `keep`: Shoal's own state and programs, which no mount may show or cover. `cache`: where
        the project's caches are.
        """
        self._cache = cache
        self._order = order
        self._uid = uid
        self._home = home
        self._keep = keep
        self._opened: list[view.BindMount] = []

    def open(self) -> tuple[view.BindMount, ...]:
        """Everything the order names, ready to be mounted. `SpecError`: the job may not have one of them."""
        for mount in self._order.mounts:
            fd = open_as(mount.source, self._uid)
            real = self._add(fd, mount.target, is_read_only=mount.is_read_only)
            # What the job is shown anyway, at the same place and as little to be changed, covers nothing: a
            # program's own folder in a clone below /tmp, say.
            is_shown = any(view.is_within(real, place) for place in self._keep)
            if not (is_shown and mount.is_read_only and real == mount.target):
                self._check_target(mount.target)
            self._check_source(mount.source, real)
        self._open_checkpoint()
        if self._cache is not None:
            self._add(checkpoint_folder.open_directory(self._cache), self._cache, is_read_only=False)
        model = self._order.model_dir
        if model is not None:
            self._add(checkpoint_folder.open_directory(model), model, is_read_only=True)
        socket_folder = listening.own_folder(self._order, self._home)
        if socket_folder is not None:
            self._add(checkpoint_folder.open_directory(socket_folder), socket_folder, is_read_only=False)
        return tuple(self._opened)

    def check(self) -> None:
        """From inside the sandbox. `SpecError`: another directory was put in a mount's place meanwhile."""
        for mount in self._opened:
            wanted, found = os.fstat(mount.fd), os.stat(mount.target)
            if (wanted.st_dev, wanted.st_ino) != (found.st_dev, found.st_ino):
                raise SpecError(f"what is mounted at `{mount.target}` was exchanged while it was mounted")

    def close(self) -> None:
        for mount in self._opened:
            os.close(mount.fd)
        self._opened.clear()

    def _open_checkpoint(self) -> None:
        """Where it lies, though SHOAL_HOME is hidden, and at the absolute path the job asked for."""
        directory, path = self._order.checkpoint_dir, self._order.checkpoint_path
        if directory is None:
            return
        targets = [directory]
        if path is not None and path.startswith("/"):
            self._check_target(path)
            targets.append(path)
        for target in targets:
            self._add(checkpoint_folder.open_directory(directory), target, is_read_only=False)

    def _check_target(self, target: str) -> None:
        view.check_target(target, self._home, *self._keep)

    def _check_source(self, source: str, real: str) -> None:
        view.check_source(source, real, self._home)
        roots = self._order.mount_roots
        if roots is not None and not any(view.is_within(real, os.path.realpath(root)) for root in roots):
            raise SpecError(
                f"mount source `{source}` leads to `{real}`, outside of {', '.join(roots) or 'every root'}",
                hint="mount a directory that is itself below one of them",
            )

    def _add(self, fd: int, target: str, *, is_read_only: bool) -> str:
        """Where the directory really lies."""
        real = os.readlink(f"/proc/self/fd/{fd}")
        self._opened.append(view.BindMount(fd=fd, source=real, target=target, is_read_only=is_read_only))
        return real


def open_as(source: str, uid: int | None) -> int:
    """The directory as this user can open it: never more than a job could reach without us."""
    groups = os.getgroups()
    try:
        if uid is not None:
            os.setgroups([])
            os.setegid(uid)
            os.seteuid(uid)
        return os.open(source, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise SpecError(
            f"mount source `{source}`: {error.strerror}", hint="name a directory that exists on every node"
        ) from error
    finally:
        if uid is not None:
            os.seteuid(os.getuid())
            os.setegid(os.getgid())
            os.setgroups(groups)
