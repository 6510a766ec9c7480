"""Pack a job's work directory as one deterministic tar file, so that later edits do not change the job.

The same files give the same bytes and so the same digest, for every user and at any time. Links that leave
the tree are refused, and directories too large to be meant. Other processes may write to the directory
meanwhile: only files in it are packed, and a folder that becomes a link leads nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

from shoal.client.left_behind import LeftBehindFiles
from shoal.client.selection import (
    PROGRESS_EVERY,
    FileEntry,
    Progress,
    leads_outside,
    select,
    unreadable,
    ways_out,
)
from shoal.errors import SpecError, TooLarge
from shoal.home import holds_keys
from shoal.tar_check import TarLimits, check_tar

MAX_BYTES = 256 << 20
MAX_FILES = 20_000
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opening files in a folder does not require that the folder is readable."""


class WorkdirSnapshot(NamedTuple):
    """A packed directory: an anonymous temporary file, gone when closed."""

    digest: str
    size_bytes: int
    num_files: int
    file: IO[bytes]
    left_behind: LeftBehindFiles = LeftBehindFiles()


def take_snapshot(
    workdir: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    progress: Progress | None = None,
) -> WorkdirSnapshot | None:
    """Pack `workdir`; None if it is empty. Raises `SpecError` or `TooLarge`."""
    report_progress = progress or (lambda _: None)
    root = Path(os.path.realpath(workdir))
    if not root.is_dir():
        raise SpecError(f"workdir `{workdir}` is not a directory", hint="name one with `--workdir DIR`")
    if root == root.parent:
        raise SpecError(
            f"workdir `{root}` is the whole machine",
            hint="go to the folder of your program, name it with `--workdir DIR`, or send none with "
            "`--workdir ''`",
        )
    if holds_keys(root):
        raise SpecError(
            f"workdir `{root}` is a home of Shoal, with its keys",
            hint="go to the folder of your program, name it with `--workdir DIR`, or send none with "
            "`--workdir ''`",
        )
    top = os.open(root, FOLDER)  # before the listing, so that files of another folder are never packed
    try:
        entries, left_behind = select(root, include, exclude, max_files, report_progress)
        _refuse_excess(root, entries, max_bytes)
        if not entries:
            return None
        packed = _pack(top, root, entries, TarLimits(max_files, max_bytes), report_progress)
        return packed._replace(left_behind=left_behind)
    finally:
        os.close(top)


def _refuse_excess(root: Path, entries: list[FileEntry], max_bytes: int) -> None:
    total = sum(facts.st_size for _, facts in entries)
    if total <= max_bytes:
        return
    weight: Counter[str] = Counter()
    for name, facts in entries:
        weight[name.split("/", 1)[0]] += facts.st_size
    largest = [f"{name} ({size / (1 << 20):,.0f} MiB)" for name, size in weight.most_common(3)]
    raise TooLarge(
        f"workdir {root} holds {total / (1 << 20):,.0f} MiB; a snapshot has {max_bytes >> 20:,} MiB at most",
        hint=f"largest: {', '.join(largest)}; {ways_out(root)}",
    )


def _check(root: Path, file: IO[bytes], limits: TarLimits) -> None:
    """Refuse here what the control plane would refuse after the whole upload."""
    try:
        check_tar(file, limits)
    except SpecError as error:
        raise SpecError(
            f"workdir {root} cannot be sent: {error.message}",
            hint="rename or replace it, or leave it out with `--exclude PATTERN`",
        ) from error


def _pack(
    top: int, root: Path, entries: list[FileEntry], limits: TarLimits, progress: Progress
) -> WorkdirSnapshot:
    file = tempfile.TemporaryFile(prefix="shoal-workdir-")  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            count = 0
            for above, inner in groupby(entries, key=lambda entry: os.path.dirname(entry[0])):  # noqa: PTH120
                with _open_folder(top, root, above) as folder:
                    for name, facts in inner:
                        if count % PROGRESS_EVERY == 0:
                            progress(f"packing the work directory: {count:,} of {len(entries):,} files ...")
                        count += 1
                        with _readable_errors(root, name):
                            _add(tar, root, folder, name, facts)
        _check(root, file, limits)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return WorkdirSnapshot(digest, size, len(entries), file)


def _add(tar: tarfile.TarFile, root: Path, folder: int, name: str, facts: os.stat_result) -> None:
    info = tarfile.TarInfo(name)
    base = os.path.basename(name)  # noqa: PTH119 - twenty thousand times
    _refuse_other(os.stat(base, dir_fd=folder, follow_symlinks=False), facts)
    if stat.S_ISLNK(facts.st_mode):
        target = _inner_link(root, name, os.readlink(base, dir_fd=folder))
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
        tar.addfile(info)
        return
    if stat.S_ISDIR(facts.st_mode):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
        return
    info.size = facts.st_size
    info.mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
    with _open_same(base, folder, facts) as content:
        tar.addfile(info, content)


@contextlib.contextmanager
def _readable_errors(root: Path, name: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise unreadable(root, name) from error
    except OSError as error:
        message = f"`{name or '.'}` changed while it was packed"
        raise SpecError(message, hint="run the same command again") from error


@contextlib.contextmanager
def _open_folder(top: int, root: Path, name: str) -> Iterator[int]:
    """Open a folder of the tree, or one that a link leads to. `SpecError`: it is no longer in the tree."""
    folder = os.dup(top)
    try:
        with _readable_errors(root, name):
            real = Path(os.path.realpath(root / name))
            if not real.is_relative_to(root):
                raise FileNotFoundError(name)
            # Step by step, because a folder may have become a link since.
            for part in real.relative_to(root).parts:
                inner = os.open(part, FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
        yield folder
    finally:
        os.close(folder)


def _open_same(base: str, folder: int, facts: os.stat_result) -> IO[bytes]:
    """Open the file that was listed and nothing that replaced it; follow no link, and wait for no pipe.

    `OSError`: it is another file now.
    """
    fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _refuse_other(os.fstat(fd), facts)
    except OSError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _refuse_other(current: os.stat_result, facts: os.stat_result) -> None:
    if (current.st_dev, current.st_ino) != (facts.st_dev, facts.st_ino):
        raise FileNotFoundError


def _inner_link(root: Path, name: str, target: str) -> str:
    """Return the link's target if its text and the place it leads to are both inside the tree."""
    lands = os.path.normpath(root / Path(name).parent / target)
    if Path(target).is_absolute() or not Path(lands).is_relative_to(root) or leads_outside(root, name):
        link, source = shlex.quote(str(root / name)), shlex.quote(os.path.realpath(root / name))
        raise SpecError(
            f"link `{name}` in workdir {root} leads outside it, to `{target}`",
            hint=f"replace it by a copy: `rm {link} && cp -r {source} {link}`",
        )
    return target
