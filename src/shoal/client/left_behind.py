"""Match file patterns (`shoal.globs` defines them), and find the files that are not sent with a job.

Patterns are compiled here, in the process of the user who wrote them, and never in the server.

Files of a work directory that stay behind are shown to the user who submits, and recorded with the job.
Finding them costs little however many there are: git lists a folder that it ignores as a whole, and only a
bounded number of files in such folders is visited.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal.globs import expression_of, segment_of


class PathMatcher:
    """Several patterns, with a record of which ones matched. `ValueError`: a pattern is invalid."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._compiled = [
            (re.compile(expression_of(pattern), re.DOTALL), pattern.endswith("/")) for pattern in patterns
        ]
        self._folders: dict[str, frozenset[int]] = {"": frozenset()}
        self._used: set[int] = set()

    @property
    def unused(self) -> list[str]:
        """Patterns that matched nothing so far."""
        return [pattern for number, pattern in enumerate(self.patterns) if number not in self._used]

    def matches(self, name: str, *, is_folder: bool = False) -> bool:
        """Return whether a pattern matches this path below the folder, or a folder that contains it."""
        matched = self._match_folder(name) if is_folder else self._match(name, is_folder=False)
        self._used |= matched
        return bool(matched)

    def skip(self, folder: str) -> None:
        """Count patterns as used if they could match something in this folder, which is not entered."""
        parts = folder.rstrip("/").split("/")
        self._used |= {number for number, pattern in enumerate(self.patterns) if _can_lead_to(pattern, parts)}

    def may_name_below(self, folder: str) -> bool:
        """Return whether a pattern could match something in the folder, going by its leading folders."""
        parts = folder.split("/")
        return any(_can_lead_to(pattern, parts) for pattern in self.patterns)

    def _match_folder(self, folder: str) -> frozenset[int]:
        waiting = []
        while folder not in self._folders:
            waiting.append(folder)
            folder = folder.rpartition("/")[0]
        for folder in reversed(waiting):
            self._folders[folder] = self._match(folder, is_folder=True)
        return self._folders[folder]

    def _match(self, name: str, *, is_folder: bool) -> frozenset[int]:
        above = self._match_folder(name.rpartition("/")[0])
        matching = (  # of all patterns, so that each one's use is recorded
            number
            for number, (expression, is_of_folders) in enumerate(self._compiled)
            if (is_folder or not is_of_folders) and expression.fullmatch(name)
        )
        return above | frozenset(matching)


def _can_lead_to(pattern: str, folders: Sequence[str]) -> bool:
    segments = pattern.removeprefix("./").rstrip("/").split("/")
    if len(segments) == 1:
        return True
    for segment, folder in zip(segments, folders, strict=False):
        if segment == "**":
            return True
        if re.fullmatch(segment_of(segment), folder) is None:
            return False
    return True


SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Folders that are never sent unless `include` names them."""
EXPECTED_IGNORED = SKIPPED | {
    *("venv", "env", ".env", ".envrc", ".direnv", ".tox", ".nox", ".eggs", "build", "dist", "target"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache", ".ipynb_checkpoints"),
    *(".idea", ".vscode", ".DS_Store", ".coverage", "htmlcov", "wandb", "mlruns", "lightning_logs", "logs"),
}
"""Names of ignored files and folders that no job is likely to miss: caches, environments, secrets, logs."""
EXPECTED_IGNORED_ENDS = (".pyc", ".pyo", ".egg-info", ".log", ".swp", "~")
MARKS = ("pyvenv.cfg", "CACHEDIR.TAG")
"""A folder with one of these files is an environment, or a cache that says that it is one."""
MAX_COUNTED = 2_000
"""Files and folders to visit."""
MAX_LISTED_BYTES = 4 << 20
"""Bytes to read of git's output."""
GIT_S = 2.0
"""Short, because the result is only a note: git may take minutes for a large checkout on a network disk."""
MAX_NAMES_BYTES, MAX_EXCLUDED_BYTES, MAX_FOLDER_BYTES = 12 << 10, 4 << 10, 4096
"""Limits of the names that are stored with a job."""


class LeftBehindFiles(NamedTuple):
    """What of a folder is not sent. Counts cover what a job may miss, as far as it was visited."""

    folder: str = ""
    num_files: int = 0
    size_bytes: int = 0
    is_more: bool = False
    """There are more files than were counted."""
    files: tuple[str, ...] = ()
    """The files that were counted, largest first; only some of them if there are many."""
    ignored: tuple[str, ...] = ()
    """All that stays behind because git ignores it, or no job needs it. A folder that stays as a whole
    ends with `/`."""
    excluded: tuple[str, ...] = ()
    """Files that `exclude` names."""
    unused_patterns: tuple[str, ...] = ()
    """Patterns of `exclude` that match nothing."""

    def for_job(self) -> dict[str, Any]:
        """Return what the job stores, so that it can name a file that it does not find."""
        return {"folder": self.folder, "ignored": list(self.ignored), "excluded": list(self.excluded)}

    def facts(self) -> dict[str, Any]:
        """Return the counts, for programs."""
        return {
            "folder": self.folder,
            "num_files": self.num_files,
            "size_bytes": self.size_bytes,
            "is_more": self.is_more,
            "files": list(self.files),
            "add_with": self.add_with,
            "useless": list(self.unused_patterns),
        }

    @property
    def add_with(self) -> str:
        """The pattern for `include` that names all of `files`, or the largest of them."""
        if not self.files:
            return ""
        shared = os.path.commonpath([os.path.dirname(name) or "." for name in self.files])  # noqa: PTH120
        name = self.files[0] if len(self.files) == 1 or shared in ("", ".") else f"{shared}/"
        return pattern_for(name)


def pattern_for(name: str) -> str:
    """Return the pattern that names exactly this file or folder, with special characters escaped."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", name)


def find_left_behind(
    root: Path, *, is_by_git: bool, is_sent: Callable[[str], bool], unwanted: PathMatcher
) -> LeftBehindFiles:
    """Return what stays behind. Files that `is_sent` or that `unwanted` (`exclude`) names are not counted."""
    listed, is_cut = _ignored_by_git(root) if is_by_git else (list(_skipped(root)), False)
    usual: list[str] = []
    counted: list[tuple[int, str]] = []
    left = MAX_COUNTED
    whole: list[str] = []
    for name in listed:
        is_unwanted = unwanted.matches(name.rstrip("/"), is_folder=name.endswith("/"))
        if is_unwanted or _is_expected(root, name):
            usual.append(name)
            continue
        whole.append(name)
        for file, size in _files_in(root, name):
            left -= 1
            if left < 0:
                is_cut = True
                break
            if file and unwanted.matches(file):
                usual.append(file)
            elif file and not is_sent(file):
                counted.append((size, file))
    counted.sort(key=lambda entry: (-entry[0], entry[1]))
    names = [name for _, name in counted]
    ignored = truncate_names([*(whole if is_cut else ()), *names, *usual], MAX_NAMES_BYTES)
    return LeftBehindFiles(
        folder=truncate_names([str(root)], MAX_FOLDER_BYTES)[0],
        num_files=len(counted),
        size_bytes=sum(size for size, _ in counted),
        is_more=is_cut and bool(counted),
        files=truncate_names(names[:20], MAX_NAMES_BYTES),
        ignored=ignored,
    )


def truncate_names(names: Iterable[str], max_bytes: int) -> tuple[str, ...]:
    """Return as many of the names as fit into `max_bytes`, as text."""
    result, room = [], max_bytes
    for name in names:
        raw = os.fsencode(name)
        room -= len(raw)
        if room < 0:
            break
        result.append(raw.decode(errors="replace"))
    return tuple(result)


def _is_expected(root: Path, name: str) -> bool:
    parts = name.rstrip("/").split("/")
    if any(part in EXPECTED_IGNORED or part.endswith(EXPECTED_IGNORED_ENDS) for part in parts):
        return True
    return name.endswith("/") and any(os.path.lexists(root / name / mark) for mark in MARKS)


def _files_in(root: Path, name: str) -> Iterator[tuple[str, int]]:
    """Yield the file, or the files in the folder, with sizes; and an empty name for each folder visited."""
    if not name.endswith("/"):
        with suppress(OSError):
            yield name, os.lstat(root / name).st_size
        return
    waiting = [name]
    while waiting:
        above = waiting.pop()
        yield "", 0
        with suppress(OSError), os.scandir(root / above) as entries:
            for entry in entries:
                inner = f"{above}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if not _is_expected(root, f"{inner}/"):
                        waiting.append(f"{inner}/")
                elif not _is_expected(root, inner):
                    yield inner, entry.stat(follow_symlinks=False).st_size


def _ignored_by_git(root: Path) -> tuple[list[str], bool]:
    """Return what git ignores: files, and whole folders, which end with `/`. True: the list is incomplete.

    Takes at most `GIT_S`, however slow git is.
    """
    options = ["-c", "core.fsmonitor=false", "-C", str(root)]
    arguments = ["ls-files", "-o", "-i", "--exclude-standard", "--directory", "-z"]
    try:
        git = subprocess.Popen(
            ["git", *options, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
    except OSError:
        return [], False
    listing, is_cut, deadline = b"", True, time.monotonic() + GIT_S
    with git:
        try:
            assert git.stdout is not None
            output = select.poll()
            output.register(git.stdout, select.POLLIN)
            while len(listing) <= MAX_LISTED_BYTES and (left_s := deadline - time.monotonic()) > 0:
                if not output.poll(left_s * 1000):
                    continue
                chunk = git.stdout.read(1 << 16)
                if not chunk:
                    is_cut = False
                    break
                listing += chunk
        finally:
            git.kill()
    return list(_outermost(os.fsdecode(name) for name in listing.split(b"\0")[:-1])), is_cut


def _outermost(names: Iterable[str]) -> Iterator[str]:
    """Drop files below listed folders: git lists a folder and again its files if none of them is tracked."""
    folder = "/"
    for name in sorted(set(names) - {"", "./"}):
        if not name.startswith(folder):
            yield name
            folder = name if name.endswith("/") else folder


def _skipped(root: Path) -> Iterator[str]:
    """Yield, for a folder without git, the top-level folders that are never sent."""
    with suppress(OSError), os.scandir(root) as entries:
        yield from (f"{entry.name}/" for entry in entries if entry.name in SKIPPED - {".git"})
