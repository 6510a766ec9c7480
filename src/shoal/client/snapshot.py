"""A job's working directory as one deterministic tar file, so that later edits do not change the job.

The same files give the same bytes and so the same digest, whoever packs them and when. Refuses links
that leave the tree and directories too large to be meant.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from shoal.errors import SpecError, TooLarge

MAX_BYTES = 256 << 20
MAX_FILES = 20_000
SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules"})


class Snapshot(NamedTuple):
    """A packed directory: an anonymous temporary file, gone when closed."""

    digest: str
    size_bytes: int
    num_files: int
    file: IO[bytes]


def take_snapshot(
    workdir: Path, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES
) -> Snapshot | None:
    """Pack `workdir`; None when there is nothing in it. Raises `SpecError` or `TooLarge`."""
    root = workdir.resolve()
    if not root.is_dir():
        raise SpecError(f"workdir `{workdir}` is not a directory", hint="name one with `--workdir DIR`")
    entries = list(_entries(root))
    _refuse_excess(root, entries, max_bytes, max_files)
    if not entries:
        return None
    file = tempfile.TemporaryFile(prefix="shoal-workdir-")  # noqa: SIM115 - the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, facts in entries:
                _add(tar, root, name, facts)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return Snapshot(digest, size, len(entries), file)


def _entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Files and links to pack, by sorted relative name. Sockets, pipes and devices are not content."""
    names = _git_names(root)
    if not names:
        names = list(_walk_names(root, ""))
    inner = {""}
    for name in sorted(set(names)):
        facts = _facts(root, name)
        if facts is None:
            continue  # in git's index, deleted on disk
        folder = os.path.dirname(name)  # noqa: PTH120 - twenty thousand times
        if folder not in inner:
            _refuse_outside(root, folder)
            inner.add(folder)
        if stat.S_ISDIR(facts.st_mode):  # a repository inside this one
            found = ((n, _facts(root, n)) for n in sorted(_walk_names(root, name)))
            yield from ((n, facts) for n, facts in found if facts is not None)
        elif stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
            yield name, facts


def _refuse_outside(root: Path, folder: str) -> None:
    """Git lists what it once tracked, also where a link has taken the folder's place since."""
    if not (root / folder).resolve().is_relative_to(root):
        raise SpecError(
            f"`{folder}` in workdir {root} leads outside it",
            hint=f"replace the link by a copy, or `git rm -r --cached {shlex.quote(folder)}`",
        )


def _facts(root: Path, name: str) -> os.stat_result | None:
    """None: it is not there, or not any more."""
    try:
        return os.lstat(root / name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(root, name) from error


def _git_names(root: Path) -> list[str]:
    """What git would keep: tracked files and new ones it does not ignore. Empty where git has no say."""
    # Without a repository there is nothing to ask git for, which costs a process.
    if not _is_in_git(root):
        return []
    command = [
        "git",
        "-c",
        "core.fsmonitor=false",
        "-C",
        str(root),
        "ls-files",
        "-co",
        "--exclude-standard",
        "-z",
    ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    # A repository inside this one is listed as `sub/`, and a directory ignored as a whole as `./`.
    names = (os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0"))
    return [name for name in names if name not in ("", ".")]


def _is_in_git(root: Path) -> bool:
    above = (root, *root.parents)
    return "GIT_DIR" in os.environ or any(os.access(place / ".git", os.F_OK) for place in above)


def _walk_names(root: Path, below: str) -> Iterator[str]:
    waiting = [below]
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(root / above) as entries:
                found = list(entries)
        except OSError as error:
            raise _unreadable(root, above) from error
        for entry in found:
            name = f"{above}/{entry.name}" if above else entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED:
                    waiting.append(name)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                yield name


def _refuse_excess(
    root: Path, entries: list[tuple[str, os.stat_result]], max_bytes: int, max_files: int
) -> None:
    total = sum(facts.st_size for _, facts in entries)
    if total <= max_bytes and len(entries) <= max_files:
        return
    weight: Counter[str] = Counter()
    for name, facts in entries:
        weight[name.split("/", 1)[0]] += facts.st_size if total > max_bytes else 1
    unit = "MiB" if total > max_bytes else "files"
    scale = 1 << 20 if total > max_bytes else 1
    largest = ", ".join(f"{name} ({amount / scale:,.0f} {unit})" for name, amount in weight.most_common(3))
    less = "ignore them in .gitignore, " if _is_in_git(root) else ""
    raise TooLarge(
        f"workdir {root} holds {len(entries):,} files of {total / (1 << 20):,.0f} MiB together; "
        f"a snapshot takes at most {max_files:,} files and {max_bytes >> 20:,} MiB",
        hint=f"largest: {largest}; {less}name a smaller directory with `--workdir DIR`, or none with "
        "`--workdir ''`",
    )


def _add(tar: tarfile.TarFile, root: Path, name: str, facts: os.stat_result) -> None:
    info = tarfile.TarInfo(name)
    if stat.S_ISLNK(facts.st_mode):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, _inner_link(root, name), 0o777
        tar.addfile(info)
        return
    info.size = facts.st_size
    info.mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
    try:
        with _open_same(root / name, facts) as content:
            tar.addfile(info, content)
    except PermissionError as error:
        raise _unreadable(root, name) from error
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


def _unreadable(root: Path, name: str) -> SpecError:
    return SpecError(
        f"cannot read `{name or '.'}` in workdir {root}",
        hint=f"make it readable or ignore it: `ls -ld {shlex.quote(str(root / name))}`",
    )


def _inner_link(root: Path, name: str) -> str:
    """The link's target, if both its text and what it leads to stay inside the tree."""
    target = str((root / name).readlink())
    lands = os.path.normpath(root / Path(name).parent / target)
    inside = [Path(lands).is_relative_to(root), (root / name).resolve().is_relative_to(root)]
    if Path(target).is_absolute() or not all(inside):
        raise SpecError(
            f"link `{name}` in workdir {root} leads outside it, to `{target}`",
            hint=f"replace it by a copy: `cp --remove-destination {shlex.join([target, str(root / name)])}`",
        )
    return target
