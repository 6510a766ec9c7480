"""Two questions about a job's files: why one is missing, and what the ranks wrote.

`explain_missing_file` explains a file that stayed on the machine that the job was submitted from. It goes by
the last lines that the program wrote and by the names of the files that were left behind, and touches no
disk.

`count_written` counts what the ranks wrote below their work directory, which is removed with the attempt. It
runs at the end of a task, when nothing of the task runs any more. The tree is the job's and may hold
anything, so the walk goes by descriptors, follows no link and opens no file, and its time, depth and count
are bounded.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

import msgspec

from shoal.clock import BootClock
from shoal.wire import LeftBehind, TaskProgram, WrittenFiles

MAX_WORDS = 20_000
MAX_CANDIDATES = 50
SHOWN = 200
NEVER = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Folders that are never copied, even if git knows them."""
_SPEAKS_OF_FILES = re.compile(
    r"No such file|[Nn]ot found|FileNotFound|does(?: not|n't) exist|[Ee]rror opening|No module named"
    r"|[Mm]issing|(?:[Cc]an't|[Cc]annot|[Cc]ould not|[Uu]nable to) (?:open|access|find|read|load|stat)"
)
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|`([^`\n]+)`|\u2018([^\u2019\n]+)\u2019")
_MODULE = re.compile(r"No module named '([\w.]+)'")
_PLAIN = re.compile(r"[^\s'\"`,;:()\[\]{}=<>]+")


def explain_missing_file(output: str, program: TaskProgram, work: str) -> str:
    """Explain the first file that a program missed and that was left behind; empty if there is none.

    `output`: the program's last lines. `work`: the directory that it ran in.
    """
    left_behind = program.left_behind or LeftBehind()
    for name in _missed_names(output[-MAX_WORDS:]):
        message = _not_copied(name, left_behind, work) or _outside(name, program.run, left_behind, work)
        if message:
            return message
    return ""


def _missed_names(output: str) -> Iterator[str]:
    """Yield possible names of files from lines about a missing file, the last line first."""
    num_seen = 0
    for line in reversed(output.splitlines()):
        if _SPEAKS_OF_FILES.search(line) is None:
            continue
        for module in _MODULE.findall(line):
            yield from (f"{module.replace('.', '/')}.py", f"{module.split('.')[0]}/")
        quoted = ["".join(groups) for groups in _QUOTED.findall(line)]
        for name in (*quoted, *_PLAIN.findall(line)):
            num_seen += 1
            if num_seen > MAX_CANDIDATES:
                return
            yield name


def _outside(name: str, run: str, left_behind: LeftBehind, work: str) -> str:
    """Explain a path that leads out of the folder, because only the folder is copied.

    If the program changes its directory, `..` may mean another folder, so such a path is not explained.
    """
    is_above = name.startswith("../") and re.search(r"\bcd\s|chdir", run) is None
    task_directory = os.path.dirname(work)
    path = os.path.normpath(os.path.join(work, name)) if is_above else os.path.normpath(name)
    if path == work or path.startswith(f"{work}/") or not (is_above or path.startswith(f"{task_directory}/")):
        return ""
    shown = os.path.relpath(path, work)
    folder = f", {_short(left_behind.folder)}," if left_behind.folder else ""
    return (
        f"`{_short(shown)}` is outside of the folder that was submitted{folder} and only that folder "
        "is copied; submit from the folder above, or name it with `workdir: ..`"
    )


def _not_copied(name: str, left_behind: LeftBehind, work: str) -> str:
    """Explain a name that is among the files left behind, or a path of the submitter's machine.

    `exclude` is looked at before git, because it also keeps out what `include` names.
    """
    inner, is_on_submitter = _inside(name, left_behind, work)
    if not inner:
        return ""
    reasons = (
        (left_behind.excluded, "excluded by the job's `exclude`", "take the pattern out of `exclude`"),
        (left_behind.ignored, "ignored by git", "add it with `include: [{}]`"),
    )
    for find_entry in (_entry_of_path, _entry_ending_with):
        for names, because, remedy in reasons:
            entry = find_entry(inner, names)
            if entry:
                plain = inner.rstrip("/")
                is_never = names is left_behind.ignored and not NEVER.isdisjoint(entry.split("/"))
                missed = plain if entry.endswith("/") and plain.startswith(entry) else entry
                return (
                    f"`{_short(missed)}` was not found; it is in the folder that was submitted but "
                    f"{'never copied unless named' if is_never else because}; "
                    f"{remedy.format(_short(_pattern(entry)))}"
                )
    if is_on_submitter:
        return (
            f"`{_short(name)}` is a path on the machine that submitted the job; here the files of its folder "
            f"are in the directory that the job runs in: write `{_short(inner)}`"
        )
    return ""


def _inside(name: str, left_behind: LeftBehind, work: str) -> tuple[str, bool]:
    """Return the name relative to the folder, and whether it was a path of the submitter's machine."""
    slash = "/" if name.endswith("/") else ""
    path = os.path.normpath(name)
    while path.startswith("../"):
        path = path[3:]
    for folder in (work, left_behind.folder):
        if folder and path.startswith(f"{folder}/"):
            return path[len(folder) + 1 :] + slash, folder != work
    return ("", False) if path.startswith(("/", "..")) or path == "." else (path + slash, False)


def _entry_of_path(inner: str, names: tuple[str, ...]) -> str:
    """Return the entry that is this file or a folder above it."""
    plain = inner.rstrip("/")
    return next(
        (
            name
            for name in names
            if plain == name.rstrip("/") or (name.endswith("/") and plain.startswith(name))
        ),
        "",
    )


def _entry_ending_with(inner: str, names: tuple[str, ...]) -> str:
    """Return the entry that ends with this path, because a program may have changed its directory."""
    plain = inner.rstrip("/")
    if "." not in os.path.basename(plain) and "/" not in plain:
        return ""  # a word such as `file`
    return next((name for name in names if name.rstrip("/").endswith(f"/{plain}")), "")


def _pattern(name: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", name)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


CLOCK = BootClock()

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
"""Each level costs a descriptor."""
MAX_S = 0.5
MAX_BYTES = 1 << 53
NAMED = 3
MAX_NAME = 200
NOT_RESULTS = frozenset({"__pycache__", ".ipynb_checkpoints", "node_modules"})
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class WriteMark(msgspec.Struct, frozen=True):
    """A moment by the clock of the file system that holds the work directory."""

    at_ns: int


def make_mark(directory: str) -> WriteMark | None:
    """Return the current time as the file system dates new files. None: it takes no file."""
    path = f"{directory}/began"
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            return WriteMark(os.fstat(fd).st_ctime_ns)
        finally:
            os.close(fd)
            os.unlink(path)
    return None


def count_written(work: str, since: WriteMark) -> WrittenFiles | None:
    """Count the files with content that are newer than the mark. None: there are none, or it cannot be told.

    Names beside the job's files that start with a dot do not count. They belong to programs, because the work
    directory is also their HOME.
    """
    with contextlib.suppress(OSError):
        top = os.open(work, DIRECTORY)
        try:
            return _Walk(since.at_ns).run(top)
        finally:
            os.close(top)
    return None


class _Walk:
    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._until = CLOCK.monotonic() + MAX_S
        self._num_seen = 0
        self._is_more = False
        self._num_files = 0
        self._num_bytes = 0
        self._largest: list[tuple[int, str]] = []
        self._folders: set[str] = set()
        """The top folders with written files; empty for a file outside of any folder."""
        self._older: set[str] = set()
        """The top folders with files that came with the job."""

    def run(self, top: int) -> WrittenFiles | None:
        self._walk(top, "", 0)
        if not self._num_files:
            return None
        folder = next(iter(self._folders)) if len(self._folders) == 1 else ""
        return WrittenFiles(
            num_files=self._num_files,
            num_bytes=min(self._num_bytes, MAX_BYTES),
            names=tuple(name for _, name in self._largest),
            is_truncated=self._is_more,
            folder="" if folder in self._older or len(folder) > MAX_NAME else folder,
        )

    def _walk(self, fd: int, above: str, depth: int) -> None:
        with contextlib.suppress(OSError), os.scandir(fd) as entries:
            for entry in entries:
                self._num_seen += 1
                if self._num_seen > MAX_ENTRIES or CLOCK.monotonic() > self._until:
                    self._is_more = True
                    return
                if entry.name in NOT_RESULTS or (not above and entry.name.startswith(".")):
                    continue
                with contextlib.suppress(OSError):
                    self._visit(fd, entry.name, above, depth)

    def _visit(self, fd: int, name: str, above: str, depth: int) -> None:
        """Count one file, or walk one folder. `OSError`: it is gone, or may not be entered."""
        facts = os.stat(name, dir_fd=fd, follow_symlinks=False)
        path = f"{above}/{name}" if above else name
        if stat.S_ISREG(facts.st_mode):
            self._add(path, facts)
        elif stat.S_ISDIR(facts.st_mode):
            if depth >= MAX_DEPTH:
                self._is_more = True
                return
            inner = os.open(name, DIRECTORY, dir_fd=fd)
            try:
                self._walk(inner, path, depth + 1)
            finally:
                os.close(inner)

    def _add(self, path: str, facts: os.stat_result) -> None:
        folder, slash, _ = path.partition("/")
        top = _text(folder) if slash else ""
        if facts.st_ctime_ns <= self._since_ns:
            self._older.add(top)
            return
        if facts.st_size == 0 or path.endswith((".pyc", ".lock")):
            return
        self._num_files += 1
        self._num_bytes += facts.st_size
        self._folders.add(top)
        self._largest = sorted([*self._largest, (facts.st_size, _text(path))], reverse=True)[:NAMED]


def _text(name: str) -> str:
    """Return the name as text. A job's names may be other bytes, and longer than a person reads."""
    text = os.fsencode(name).decode(errors="replace")
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"
