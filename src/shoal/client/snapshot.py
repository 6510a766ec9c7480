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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from shoal.errors import SpecError, TooLarge

MAX_BYTES = 256 << 20
MAX_FILES = 20_000
TOLD_EVERY = 500
SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules"})


class Snapshot(NamedTuple):
    """A packed directory: an anonymous temporary file, gone when closed."""

    digest: str
    size_bytes: int
    num_files: int
    file: IO[bytes]


Progress = Callable[[str], None]
"""Told now and then what is being done, in words."""


def take_snapshot(
    workdir: Path,
    *,
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    progress: Progress | None = None,
) -> Snapshot | None:
    """Pack `workdir`; None when there is nothing in it. Raises `SpecError` or `TooLarge`.

    Looks at few more files than `max_files`, however many there are.
    """
    tell = progress or (lambda _: None)
    root = workdir.resolve()
    if not root.is_dir():
        raise SpecError(f"workdir `{workdir}` is not a directory", hint="name one with `--workdir DIR`")
    if root == root.parent:
        raise SpecError(
            f"workdir `{root}` is the whole machine",
            hint="go to the folder of your program, name it with `--workdir DIR`, or send none with "
            "`--workdir ''`",
        )
    entries: list[tuple[str, os.stat_result]] = []
    for entry in _entries(root, max_files, tell):
        entries.append(entry)
        if len(entries) > max_files:
            raise _too_many(root, (name for name, _ in entries), max_files)
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
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return Snapshot(digest, size, len(entries), file)


def _entries(root: Path, max_files: int, tell: Progress) -> Iterator[tuple[str, os.stat_result]]:
    """Files and links to pack, by sorted relative name. Sockets, pipes and devices are not content."""
    names = _git_names(root)
    if not names:
        for name in _walk_names(root, ""):
            names.append(name)
            if len(names) % TOLD_EVERY == 0:
                tell(f"reading the work directory: {len(names):,} files ...")
            if len(names) > max_files:
                raise _too_many(root, names, max_files)
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
                for entry in entries:
                    name = f"{above}/{entry.name}" if above else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in SKIPPED:
                            waiting.append(name)
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        yield name
        except OSError as error:
            raise _unreadable(root, above) from error


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
        hint=f"largest: {', '.join(largest)}; {_ways_out(root)}",
    )


def _too_many(root: Path, seen: Iterable[str], max_files: int) -> TooLarge:
    """Nobody counts a whole disk to say that it is too large: `seen` is what was met up to the limit."""
    weight = Counter(name.split("/", 1)[0] for name in seen)
    most = [f"{name} ({count:,} files)" for name, count in weight.most_common(3)]
    return TooLarge(
        f"workdir {root} holds more than {max_files:,} files, the most that a snapshot takes",
        hint=f"of those seen most are in: {', '.join(most)}; {_ways_out(root)}",
    )


def _ways_out(root: Path) -> str:
    less = "ignore them in .gitignore, " if _is_in_git(root) else ""
    return f"{less}name a smaller directory with `--workdir DIR`, or none with `--workdir ''`"


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
        link, source = shlex.quote(str(root / name)), shlex.quote(str((root / name).resolve()))
        raise SpecError(
            f"link `{name}` in workdir {root} leads outside it, to `{target}`",
            hint=f"replace it by a copy: `rm {link} && cp -r {source} {link}`",
        )
    return target
