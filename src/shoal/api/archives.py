"""Snapshots of working directories on disk: named by digest, usable by the projects that uploaded them.

`Archives` streams a body to a private file, hashes it on the way, checks it as a tar file and only then gives
it its name. To use an archive, a project must have sent it whole: knowing a digest opens nothing.

The private file has its full length from the start, so that concurrent uploads see what each will take of
their project's total.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.errors import LimitReached, SpecError, StoreUnavailable, TooLarge
from shoal.fair_threads import FairThreads
from shoal.tar_check import TarLimits, check_tar

WRITE_AT_ONCE = 1 << 20
PART = ".part-"
_threads = FairThreads(2, "shoal-api-archive")
"""An archive is checked in its caller's turn, so that the uploads of one caller do not take all cores."""
_keeping = threading.Lock()
"""Held while an uploaded archive becomes a kept one. A count in between would miss it."""


class Archives:
    """`<home>/archives/<digest>.tar`, and an empty file `owners/<project>/<digest>` for each project."""

    def __init__(self, home: Path, limits: TarLimits, max_project_bytes: int) -> None:
        self._root = home / "archives"
        self._limits = limits
        self._max_project_bytes = max_project_bytes

    def size_for(self, project: str, digest: str) -> int | None:
        """The archive's size if the project may use it. Touches the disk, briefly.

        Updates the archive's date, so that it is not removed as old before a job uses it, and then checks the
        right, which is removed before the archive.
        """
        path, mark = self._path(digest), self._mark(project, digest)
        try:
            if not mark.exists():
                return None
            os.utime(path)
            size = path.stat().st_size
            return size if mark.exists() else None
        except FileNotFoundError:
            return None

    async def receive(
        self,
        project: str,
        digest: str,
        body: AsyncIterator[bytes],
        max_bytes: int,
        check_rights: Callable[[], Awaitable[None]],
    ) -> int:
        """Receive a body of at most `max_bytes` and return its size. On any error nothing is kept.

        `check_rights` raises if the sender has lost the right to upload: a body may take hours to arrive.
        """
        part = self._root / f"{PART}{secrets.token_hex(12)}-{project}"
        try:
            await anyio.to_thread.run_sync(self._reserve, part, project, digest, max_bytes)
            size, actual_digest = await self._write(part, body, max_bytes)
            if actual_digest != digest:
                raise SpecError(
                    f"the body's SHA-256 is {actual_digest}, not the {digest} it was sent as",
                    hint="send it again; the directory may have changed while it was packed",
                )
            await asyncio.wrap_future(_threads.submit(lambda: self._check(part)))
            await check_rights()
            await anyio.to_thread.run_sync(self._keep, part, project, digest)
        except OSError as error:
            raise StoreUnavailable(
                f"the archive could not be written: {error.strerror}",
                hint="an operator can look with `shoal doctor`",
            ) from error
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: part.unlink(missing_ok=True))
        return size

    def _check(self, part: Path) -> None:
        with part.open("rb") as file:
            check_tar(file, self._limits)

    def _reserve(self, part: Path, project: str, digest: str, size: int) -> None:
        """Make the private file at its largest length. `LimitReached` if the project's total becomes too
        large.
        """
        self._root.mkdir(0o700, parents=True, exist_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        with _keeping:
            total = self._total(project, digest)
        if total > self._max_project_bytes:
            raise LimitReached(
                f"with this archive of {size} bytes the archives of project `{project}` would take "
                f"{total} bytes; at most {self._max_project_bytes} are kept",
                hint="archives that no open job uses are removed a week after their last use; for more "
                "room an operator types"
                f" `shoal down`, then `SHOAL_MAX_PROJECT_ARCHIVE_BYTES={2 * total} shoal up`",
                total=total,
                limit=self._max_project_bytes,
            )

    def _total(self, project: str, digest: str) -> int:
        """The total size of the project's archives, kept and in upload, without what `digest`
        takes already.
        """
        marks = self._root / "owners" / project
        kept = [self._path(name) for name in _names(marks) if name != digest]
        parts = [self._root / name for name in _names(self._root) if name.startswith(PART)]
        project_parts = [path for path in parts if path.name.partition(PART)[2].partition("-")[2] == project]
        return sum(map(_size, (*kept, *project_parts)))

    async def _write(self, part: Path, body: AsyncIterator[bytes], max_bytes: int) -> tuple[int, str]:
        digest = hashlib.sha256()
        size = 0
        pending = bytearray()
        fd = await anyio.to_thread.run_sync(os.open, part, os.O_WRONLY | os.O_NOFOLLOW)

        def flush(data: bytes) -> None:
            digest.update(data)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

        try:
            async for chunk in body:
                size += len(chunk)
                if size > max_bytes:
                    raise TooLarge(
                        f"the archive is larger than {max_bytes} bytes, the most this project may upload",
                        hint="send less with `--workdir DIR`, or ask an admin for more",
                    )
                pending += chunk
                if len(pending) >= WRITE_AT_ONCE:
                    await anyio.to_thread.run_sync(flush, bytes(pending))
                    pending.clear()
            await anyio.to_thread.run_sync(flush, bytes(pending))
            await anyio.to_thread.run_sync(os.ftruncate, fd, size)
            await anyio.to_thread.run_sync(os.fsync, fd)
        finally:
            os.close(fd)
        return size, digest.hexdigest()

    def _keep(self, part: Path, project: str, digest: str) -> None:
        """Write the content first, then the right to it. A crash in between costs another upload."""
        mark = self._mark(project, digest)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _keeping:
            part.replace(self._path(digest))
            _sync_directory(self._root)
            mark.touch(mode=0o600)
        _sync_directory(mark.parent)

    def _path(self, digest: str) -> Path:
        return self._root / f"{digest}.tar"

    def _mark(self, project: str, digest: str) -> Path:
        return self._root / "owners" / project / digest


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    """The file's size; 0 if it was removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
