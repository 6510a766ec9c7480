"""Make imports in a zygote, and find out whether they would have the same result in a rank.

A statement is refused if it loads code from outside of the known folders, reads a variable or an argument
that differs between ranks, starts a thread, opens a device, or raises. The zygote then begins again without
it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

NEVER_EARLY = ("mpi4py", "horovod")
"""Packages that initialize MPI on import. A process forked after that could not initialize its own MPI."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband")


class ImportRefused(BaseException):
    """An import that would load code from elsewhere. Not an `Exception`, because libraries handle those."""


class Preload:
    """Imports of this process, with what was seen while they were made."""

    def __init__(self, folders: list[str], is_of_rank: Callable[[str], bool]) -> None:
        self._folders = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)
        self._is_of_rank = is_of_rank
        self._is_asked = False
        self._folder_times: dict[str, tuple[int, ...] | None] = {}
        self._files: dict[str, tuple[int, ...] | None] = {}
        self._searched: set[str] = set()
        self.problem = ""

    def make(self, statements: list[str], argv: list[str]) -> int:
        """Make the imports, and return how many succeeded. All of them: there was no problem."""
        self._take_snapshot()
        sys_argv, sys.argv = sys.argv, _WatchedArguments(argv, self)
        reads: Any = os._Environ  # noqa: SLF001 - all reads of `os.environ` go through its class
        get, reads.__getitem__ = reads.__getitem__, _watched(reads.__getitem__, self)
        sys.meta_path.insert(0, self)
        try:
            for number, statement in enumerate(statements):
                self._make(statement)
                if self.problem:
                    return number
        finally:
            sys.meta_path.remove(self)
            reads.__getitem__ = get
            sys.argv = sys_argv
        self._searched |= {name.partition(".")[0] for name in sys.modules} - {"__main__"}
        return len(statements)

    def _make(self, statement: str) -> None:
        try:
            exec(statement, {"__name__": "__main__"})  # noqa: S102 - an import, as the program would make it
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the ranks must not notice
            self.problem = self.problem or f"{type(error).__name__}: {error}"
        if threading.active_count() > 1:
            names = ", ".join(thread.name for thread in threading.enumerate()[1:])
            self.problem = f"it started threads ({names})"
        device = _open_device()
        if device is not None:
            self.problem = f"it opened {device}"
        if self.problem:
            self.problem = f"`{statement}`: {self.problem}"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the other finders search, and refuse what is not in the known folders."""
        if self._is_asked:
            return None
        self._searched.add(name.partition(".")[0])
        self._is_asked = True
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target) if finder is not self else None
                if spec is not None:
                    self._check(name, spec)
                    return spec
        finally:
            self._is_asked = False
        return None

    def _check(self, name: str, spec: Any) -> None:
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        inside = all(os.path.realpath(place).startswith(self._folders) for place in places)
        if not inside or name.partition(".")[0] in NEVER_EARLY:
            self.problem = f"it loads {name} from {', '.join(places)}"
            raise ImportRefused(self.problem)
        if spec.has_location:
            self._files.setdefault(spec.origin, _facts(spec.origin))

    def note_read(self, name: object) -> None:
        """Remember that an import asked for this variable."""
        text = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
        if self._is_of_rank(text):
            self.problem = f"it reads {text}, which differs between ranks"

    def _take_snapshot(self) -> None:
        """Remember files before they are read, so a change in the middle of an import counts, too."""
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._files = {path: _facts(path) for path in files if isinstance(path, str)}
        self._folder_times = {path: _facts(path) for path in sys.path if self._is_known(path)}

    def _is_known(self, path: str) -> bool:
        return os.path.join(os.path.realpath(path), "").startswith(self._folders)

    def changed(self) -> str | None:
        """Return a file or folder because of which these imports would have another result by now."""
        for path, facts in (*self._files.items(), *self._folder_times.items()):
            if _facts(path) != facts:
                return path
        folders = [path or os.curdir for path in sys.path if path not in self._folder_times]
        return next((file for folder in folders for file in self._shadowing(folder)), None)

    def _shadowing(self, folder: str) -> list[str]:
        """Return the modules in the folder that Python could find instead of those that were searched."""
        try:
            names = [name for name in os.listdir(folder) if name.partition(".")[0] in self._searched]
        except OSError:
            return []
        paths = [os.path.join(folder, name) for name in names]
        return [path for path in paths if _is_module(path) and not self._is_known(path)]


class _WatchedArguments(list):  # type: ignore[type-arg]
    """`sys.argv` while imports are made: the arguments of the ranks are not known here."""

    def __init__(self, argv: list[str], preload: Preload) -> None:
        super().__init__(argv)
        self._preload = preload

    def _note(self) -> None:
        self._preload.problem = "it reads sys.argv"

    def __getitem__(self, index: Any) -> Any:
        self._note()
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self._note()
        return super().__iter__()

    def __len__(self) -> int:
        self._note()
        return super().__len__()


def _watched(get: Any, preload: Preload) -> Any:
    def get_noted(environment: Any, name: Any) -> Any:
        preload.note_read(name)
        return get(environment, name)

    return get_noted


def _is_module(path: str) -> bool:
    if os.path.isdir(path):
        return any(name.startswith("__init__.") for name in os.listdir(path))
    return path.endswith((".py", ".pyc", ".so"))


def _facts(path: str) -> tuple[int, ...] | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _open_device() -> str | None:
    """Return a device that this process has open. A process forked after that could not use it."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith(DEVICES):
            return path
    return None
