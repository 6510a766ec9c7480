"""Files of a working directory that do not travel with a job: named to whoever submits it, and to the job.

Costs little however many there are: git names a folder that it ignores as a whole by itself, and a bounded
number of files in such folders is looked at.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shoal.client.globs import Globs

SKIPPED = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Folders that never travel unless `include` names them."""
USUAL = SKIPPED | {
    *("venv", "env", ".env", ".envrc", ".direnv", ".tox", ".nox", ".eggs", "build", "dist", "target"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".cache", ".ipynb_checkpoints"),
    *(".idea", ".vscode", ".DS_Store", ".coverage", "htmlcov", "wandb", "mlruns", "lightning_logs", "logs"),
}
"""Names of ignored files and folders that no job is likely to miss: caches, environments, secrets, logs."""
USUAL_ENDS = (".pyc", ".pyo", ".egg-info", ".log", ".swp", "~")
MARKS = ("pyvenv.cfg", "CACHEDIR.TAG")
"""A folder with one of these is an environment, or a cache that says that it is one."""
MAX_COUNTED = 2_000
"""Files and folders that are looked at."""
MAX_LISTED_BYTES = 4 << 20
"""Of what git says."""
GIT_S = 2.0
"""For a note alone: a large checkout on a network's disk may take git minutes."""
MAX_NAMES_BYTES, MAX_EXCLUDED_BYTES, MAX_FOLDER_BYTES = 12 << 10, 4 << 10, 4096
"""Of the names that are kept with a job."""


class LeftBehind(NamedTuple):
    """What of a folder does not travel. Counts are of what a job may miss, and no more than was looked at."""

    folder: str = ""
    num_files: int = 0
    size_bytes: int = 0
    is_more: bool = False
    """There are more than those that were counted."""
    files: tuple[str, ...] = ()
    """Those that were counted, the largest first; some of them, if there are many."""
    ignored: tuple[str, ...] = ()
    """All that is known of what stays behind because git ignores it, or nobody ever wants it; a folder that
    stays as a whole ends with `/`."""
    excluded: tuple[str, ...] = ()
    """Files that `exclude` names."""
    useless: tuple[str, ...] = ()
    """Patterns of `exclude` that name nothing."""

    def for_job(self) -> dict[str, Any]:
        """What a job is told, so that it can name a file that it does not find."""
        return {"folder": self.folder, "ignored": list(self.ignored), "excluded": list(self.excluded)}

    def facts(self) -> dict[str, Any]:
        """For programs: what was counted."""
        return {
            "folder": self.folder,
            "num_files": self.num_files,
            "size_bytes": self.size_bytes,
            "is_more": self.is_more,
            "files": list(self.files),
            "add_with": self.add_with,
            "useless": list(self.useless),
        }

    @property
    def add_with(self) -> str:
        """The pattern of `include` that names all of `files`, or the largest of them."""
        if not self.files:
            return ""
        shared = os.path.commonpath([os.path.dirname(name) or "." for name in self.files])  # noqa: PTH120
        name = self.files[0] if len(self.files) == 1 or shared in ("", ".") else f"{shared}/"
        return pattern_for(name)


def pattern_for(name: str) -> str:
    """The pattern that names this file or folder: what means something in patterns is taken as it is."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", name)


def left_behind(
    root: Path, *, is_by_git: bool, is_sent: Callable[[str], bool], unwanted: Globs
) -> LeftBehind:
    """What stays behind. Files that `is_sent` or that `unwanted` (`exclude`) names are not counted."""
    listed, is_cut = _ignored_by_git(root) if is_by_git else (list(_skipped(root)), False)
    usual: list[str] = []
    counted: list[tuple[int, str]] = []
    left = MAX_COUNTED
    whole: list[str] = []
    for name in listed:
        is_unwanted = unwanted.names(name.rstrip("/"), is_folder=name.endswith("/"))
        if is_unwanted or _is_usual(root, name):
            usual.append(name)
            continue
        whole.append(name)
        for file, size in _files_in(root, name):
            left -= 1
            if left < 0:
                is_cut = True
                break
            if file and unwanted.names(file):
                usual.append(file)
            elif file and not is_sent(file):
                counted.append((size, file))
    counted.sort(key=lambda one: (-one[0], one[1]))
    names = [name for _, name in counted]
    kept = short_of([*(whole if is_cut else ()), *names, *usual], MAX_NAMES_BYTES)
    return LeftBehind(
        folder=short_of([str(root)], MAX_FOLDER_BYTES)[0],
        num_files=len(counted),
        size_bytes=sum(size for size, _ in counted),
        is_more=is_cut and bool(counted),
        files=short_of(names[:20], MAX_NAMES_BYTES),
        ignored=kept,
    )


def short_of(names: Iterable[str], max_bytes: int) -> tuple[str, ...]:
    """As many of the names as may be kept, as text."""
    kept, room = [], max_bytes
    for name in names:
        raw = os.fsencode(name)
        room -= len(raw)
        if room < 0:
            break
        kept.append(raw.decode(errors="replace"))
    return tuple(kept)


def _is_usual(root: Path, name: str) -> bool:
    parts = name.rstrip("/").split("/")
    if any(part in USUAL or part.endswith(USUAL_ENDS) for part in parts):
        return True
    return name.endswith("/") and any(os.path.lexists(root / name / mark) for mark in MARKS)


def _files_in(root: Path, name: str) -> Iterator[tuple[str, int]]:
    """The file, or those in the folder with their sizes; an empty name for each folder that is looked at."""
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
                    if not _is_usual(root, f"{inner}/"):
                        waiting.append(f"{inner}/")
                elif not _is_usual(root, inner):
                    yield inner, entry.stat(follow_symlinks=False).st_size


def _ignored_by_git(root: Path) -> tuple[list[str], bool]:
    """What git ignores: files, and folders as a whole, which end with `/`. True: these are not all.

    Takes `GIT_S` at most, however long git does.
    """
    options = ["-c", "core.fsmonitor=false", "-C", str(root)]
    what = ["ls-files", "-o", "-i", "--exclude-standard", "--directory", "-z"]
    try:
        git = subprocess.Popen(
            ["git", *options, *what], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
    except OSError:
        return [], False
    told, is_cut, deadline = b"", True, time.monotonic() + GIT_S
    with git:
        try:
            assert git.stdout is not None
            output = select.poll()
            output.register(git.stdout, select.POLLIN)
            while len(told) <= MAX_LISTED_BYTES and (left_s := deadline - time.monotonic()) > 0:
                if not output.poll(left_s * 1000):
                    continue
                chunk = git.stdout.read(1 << 16)
                if not chunk:
                    is_cut = False
                    break
                told += chunk
        finally:
            git.kill()
    return list(_outermost(os.fsdecode(name) for name in told.split(b"\0")[:-1])), is_cut


def _outermost(names: Iterable[str]) -> Iterator[str]:
    """Each file once: git names a folder, and again what is in it, where nothing in it is tracked."""
    folder = "/"
    for name in sorted(set(names) - {"", "./"}):
        if not name.startswith(folder):
            yield name
            folder = name if name.endswith("/") else folder


def _skipped(root: Path) -> Iterator[str]:
    """Where git has no say: the folders at the top that never travel."""
    with suppress(OSError), os.scandir(root) as entries:
        yield from (f"{entry.name}/" for entry in entries if entry.name in SKIPPED - {".git"})
