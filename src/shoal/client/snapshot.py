"""A job's working directory as one deterministic tar file, so that later edits do not change the job.

The same files give the same bytes and so the same digest, whoever packs them and when. Refuses links
that leave the tree and directories too large to be meant.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from shoal.client.left_behind import LeftBehind
from shoal.client.selection import TOLD_EVERY, Progress, leads_outside, select, unreadable, ways_out
from shoal.errors import SpecError, TooLarge
from shoal.tar_check import TarLimits, check_tar

MAX_BYTES = 256 << 20
MAX_FILES = 20_000


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
    entries, behind = select(root, include, exclude, max_files, tell)
    _refuse_excess(root, entries, max_bytes)
    if not entries:
        return None
    file = tempfile.TemporaryFile(prefix="shoal-workdir-")  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for count, (name, facts) in enumerate(entries):
                if count % TOLD_EVERY == 0:
                    tell(f"packing the work directory: {count:,} of {len(entries):,} files ...")
                _add(tar, root, name, facts)
        _check(root, file, TarLimits(max_files, max_bytes))
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return Snapshot(digest, size, len(entries), file, behind)


def _refuse_excess(root: Path, entries: list[tuple[str, os.stat_result]], max_bytes: int) -> None:
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


def _add(tar: tarfile.TarFile, root: Path, name: str, facts: os.stat_result) -> None:
    info = tarfile.TarInfo(name)
    if stat.S_ISLNK(facts.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, _inner_link(root, name), 0o777
        tar.addfile(info)
        return
    if stat.S_ISDIR(facts.st_mode):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(info)
        return
    info.size = facts.st_size
    info.mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
    try:
        with _open_same(root / name, facts) as content:
            tar.addfile(info, content)
    except PermissionError as error:
        raise unreadable(root, name) from error
    except OSError as error:
        raise SpecError(f"`{name}` changed while it was packed", hint="run the same command again") from error


def _open_same(path: Path, facts: os.stat_result) -> IO[bytes]:
    """The file that was looked at, and nothing that took its place: no link is followed, no pipe waited for.

    `OSError`: it is another one now.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != (facts.st_dev, facts.st_ino):
        os.close(fd)
        raise FileNotFoundError(path)
    return os.fdopen(fd, "rb")


def _inner_link(root: Path, name: str) -> str:
    """The link's target, if both its text and what it leads to stay inside the tree."""
    target = str((root / name).readlink())
    lands = os.path.normpath(root / Path(name).parent / target)
    if Path(target).is_absolute() or not Path(lands).is_relative_to(root) or leads_outside(root, name):
        link, source = shlex.quote(str(root / name)), shlex.quote(os.path.realpath(root / name))
        raise SpecError(
            f"link `{name}` in workdir {root} leads outside it, to `{target}`",
            hint=f"replace it by a copy: `rm {link} && cp -r {source} {link}`",
        )
    return target
