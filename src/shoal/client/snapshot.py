"""A job's working directory as one deterministic tar file, so that later edits do not change the job.

The same files give the same bytes and so the same digest, whoever packs them and when. Refuses links
that leave the tree and directories too large to be meant. Others may write the directory meanwhile: what is
packed lies in it, and a folder that becomes a link leads nowhere else.
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

from shoal.client.left_behind import LeftBehind
from shoal.client.selection import TOLD_EVERY, Facts, Progress, leads_outside, select, unreadable, ways_out
from shoal.errors import SpecError, TooLarge
from shoal.home import holds_keys
from shoal.tar_check import TarLimits, check_tar

MAX_BYTES = 256 << 20
MAX_FILES = 20_000
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""A folder need not be readable to open what is in it."""


class Snapshot(NamedTuple):
    """A packed directory: an anonymous temporary file, gone when closed."""

    digest: str
    size_bytes: int
    num_files: int
    file: IO[bytes]
    left_behind: LeftBehind = LeftBehind()


def take_snapshot(
    workdir: Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    progress: Progress | None = None,
) -> Snapshot | None:
    """Pack `workdir`; None when there is nothing in it. Raises `SpecError` or `TooLarge`."""
    tell = progress or (lambda _: None)
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
    top = os.open(root, FOLDER)  # before the files are listed: those of another folder are not packed
    try:
        entries, behind = select(root, include, exclude, max_files, tell)
        _refuse_excess(root, entries, max_bytes)
        if not entries:
            return None
        packed = _packed(top, root, entries, TarLimits(max_files, max_bytes), tell)
        return packed._replace(left_behind=behind)
    finally:
        os.close(top)


def _refuse_excess(root: Path, entries: list[Facts], max_bytes: int) -> None:
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
    """Refuse here what the control plane would refuse once it has the whole archive."""
    try:
        check_tar(file, limits)
    except SpecError as error:
        raise SpecError(
            f"workdir {root} cannot be sent: {error.message}",
            hint="rename or replace it, or leave it out with `--exclude PATTERN`",
        ) from error


def _packed(top: int, root: Path, entries: list[Facts], limits: TarLimits, tell: Progress) -> Snapshot:
    file = tempfile.TemporaryFile(prefix="shoal-workdir-")  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            count = 0
            for above, inner in groupby(entries, key=lambda entry: os.path.dirname(entry[0])):  # noqa: PTH120
                with _opened(top, root, above) as folder:
                    for name, facts in inner:
                        if count % TOLD_EVERY == 0:
                            tell(f"packing the work directory: {count:,} of {len(entries):,} files ...")
                        count += 1
                        with _in_words(root, name):
                            _add(tar, root, folder, name, facts)
        _check(root, file, limits)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return Snapshot(digest, size, len(entries), file)


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
def _in_words(root: Path, name: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise unreadable(root, name) from error
    except OSError as error:
        told = f"`{name or '.'}` changed while it was packed"
        raise SpecError(told, hint="run the same command again") from error


@contextlib.contextmanager
def _opened(top: int, root: Path, name: str) -> Iterator[int]:
    """A folder of the tree, or one that a link leads to. `SpecError`: it is not in the tree any more."""
    folder = os.dup(top)
    try:
        with _in_words(root, name):
            real = Path(os.path.realpath(root / name))
            if not real.is_relative_to(root):
                raise FileNotFoundError(name)
            # Step by step, because a folder that was one a moment ago can be a link now.
            for part in real.relative_to(root).parts:
                inner = os.open(part, FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
        yield folder
    finally:
        os.close(folder)


def _open_same(base: str, folder: int, facts: os.stat_result) -> IO[bytes]:
    """The file that was looked at, and nothing that took its place: no link is followed, no pipe waited for.

    `OSError`: it is another one now.
    """
    fd = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        _refuse_other(os.fstat(fd), facts)
    except OSError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _refuse_other(found: os.stat_result, facts: os.stat_result) -> None:
    if (found.st_dev, found.st_ino) != (facts.st_dev, facts.st_ino):
        raise FileNotFoundError


def _inner_link(root: Path, name: str, target: str) -> str:
    """The link's target, if both its text and what it leads to stay inside the tree."""
    lands = os.path.normpath(root / Path(name).parent / target)
    if Path(target).is_absolute() or not Path(lands).is_relative_to(root) or leads_outside(root, name):
        link, source = shlex.quote(str(root / name)), shlex.quote(os.path.realpath(root / name))
        raise SpecError(
            f"link `{name}` in workdir {root} leads outside it, to `{target}`",
            hint=f"replace it by a copy: `rm {link} && cp -r {source} {link}`",
        )
    return target
