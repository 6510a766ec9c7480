"""The mounts of a job: opened as its user, checked, and compared with what bubblewrap has mounted.

A descriptor pins each directory from the check on. bubblewrap mounts by path, so each mount is checked again
from inside the sandbox before any process of the job runs.
"""

from __future__ import annotations

import os

from shoal.errors import SpecError
from shoal.runtime.confine import sandbox_view
from shoal.runtime.files import checkpoint_storage
from shoal.wire import TaskFolders


class Mounts:
    """Call `open` once, `check` in every child in the sandbox, and `close` when no child will follow."""

    def __init__(
        self,
        folders: TaskFolders,
        uid: int | None,
        home: str,
        keep: tuple[str, ...],
        cache: str | None = None,
        socket_folder: str | None = None,
    ) -> None:
        """`home` and `keep`: Shoal's own state and programs, which no mount may show or cover. `cache`: the
        directory of the project's caches. `socket_folder`: where the program's own socket is.
        """
        self._cache = cache
        self._socket_folder = socket_folder
        self._folders = folders
        self._uid = uid
        self._home = home
        self._keep = keep
        self._opened: list[sandbox_view.BindMount] = []

    def open(self) -> tuple[sandbox_view.BindMount, ...]:
        """Open all mounts of the task spec. `SpecError`: the job may not have one of them."""
        for mount in self._folders.mounts:
            fd = open_as(mount.source, self._uid)
            real = self._add(fd, mount.target, is_read_only=mount.is_read_only)
            # A mount that the job would see anyway, at the same path and read-only, covers nothing. An
            # example is a program's own folder in a clone below /tmp.
            is_shown = any(sandbox_view.is_within(real, place) for place in self._keep)
            if not (is_shown and mount.is_read_only and real == mount.target):
                self._check_target(mount.target)
            self._check_source(mount.source, real)
        self._open_checkpoint()
        if self._cache is not None:
            self._add(checkpoint_storage.open_directory(self._cache), self._cache, is_read_only=False)
        model = self._folders.model_dir
        if model is not None:
            self._add(checkpoint_storage.open_directory(model), model, is_read_only=True)
        if self._socket_folder is not None:
            self._add(
                checkpoint_storage.open_directory(self._socket_folder),
                self._socket_folder,
                is_read_only=False,
            )
        return tuple(self._opened)

    def check(self) -> None:
        """Check the mounts from inside the sandbox. `SpecError`: a source was replaced in the meantime."""
        for mount in self._opened:
            wanted, mounted = os.fstat(mount.fd), os.stat(mount.target)
            if (wanted.st_dev, wanted.st_ino) != (mounted.st_dev, mounted.st_ino):
                raise SpecError(f"what is mounted at `{mount.target}` was exchanged while it was mounted")

    def close(self) -> None:
        for mount in self._opened:
            os.close(mount.fd)
        self._opened.clear()

    def _open_checkpoint(self) -> None:
        """Mount the checkpoint directory at its own path in the hidden SHOAL_HOME, and at the job's path."""
        directory, path = self._folders.checkpoint_dir, self._folders.checkpoint_path
        if directory is None:
            return
        targets = [directory]
        if path is not None and path.startswith("/"):
            self._check_target(path)
            targets.append(path)
        for target in targets:
            self._add(checkpoint_storage.open_directory(directory), target, is_read_only=False)

    def _check_target(self, target: str) -> None:
        sandbox_view.check_target(target, self._home, *self._keep)

    def _check_source(self, source: str, real: str) -> None:
        sandbox_view.check_source(source, real, self._home)
        roots = self._folders.mount_roots
        if roots is not None and not any(
            sandbox_view.is_within(real, os.path.realpath(root)) for root in roots
        ):
            raise SpecError(
                f"mount source `{source}` leads to `{real}`, outside of {', '.join(roots) or 'every root'}",
                hint="mount a directory that is itself below one of them",
            )

    def _add(self, fd: int, target: str, *, is_read_only: bool) -> str:
        """Add a mount and return the real path of its directory."""
        real = os.readlink(f"/proc/self/fd/{fd}")
        self._opened.append(
            sandbox_view.BindMount(fd=fd, source=real, target=target, is_read_only=is_read_only)
        )
        return real


def open_as(source: str, uid: int | None) -> int:
    """Open the directory as this user, so that a job never sees more than it could reach without Shoal."""
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
