"""What a program will import, read from its source: without running a line of it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import os
import sys

MAX_FILES = 200
MAX_BYTES = 1 << 20
NEVER_EARLY = ("mpi4py",)
"""Packages that begin MPI when they are imported: a process forked after that has no MPI of its own."""


def found_in(script: str) -> list[str]:
    """Modules of others that the script and its own modules beside it import when they are loaded.

    Its own are read, not named: to import them is to run the program. What cannot be read is left out.
    """
    root = os.path.dirname(os.path.abspath(script))
    waiting = [os.path.abspath(script)]
    seen: set[str] = set()
    names: dict[str, None] = {}
    while waiting and len(seen) < MAX_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imported(path):
            own = _own(root, name)
            if own is None:
                names[name] = None
            else:
                waiting.append(own)
    return list(names)


def load(names: list[str]) -> None:
    """Import what can be imported of these. A module that fails here fails again, and loudly, in the rank."""
    for name in names:
        if name.partition(".")[0] in NEVER_EARLY:
            continue
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def image(folder: str) -> dict[str, str]:
    """Which module this process has from which file. Not the code in `folder`, which is ours."""
    found = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    ours = os.path.join(folder, "")
    return {
        name: path
        for name, path in found.items()
        if isinstance(path, str) and name != "__main__" and not path.startswith(ours)
    }


def differing(expected: dict[str, str], folder: str) -> list[str]:
    """Modules that were expected of this process or are found in it, and not both from the same file."""
    found = image(folder)
    return sorted(name for name in expected.keys() | found if expected.get(name) != found.get(name))


class Recorder:
    """A finder that finds nothing and writes down what was looked for: the imports nobody foresaw."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, name.encode() + b"\n")


def record(path: str) -> None:
    """From here on every import of this process that is new is noted in the file."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sys.meta_path.insert(0, Recorder(fd))


def _imported(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(MAX_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names: list[str] = []
    for node in _at_load(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _at_load(tree: ast.AST) -> list[ast.stmt]:
    """Statements that run when the module is loaded: not those inside functions."""
    found: list[ast.stmt] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.stmt):
            found.append(node)
        found += _at_load(node)
    return found


def _own(root: str, name: str) -> str | None:
    """The file of a module that lies beside the script."""
    below = os.path.join(root, *name.split("."))
    for path in (f"{below}.py", f"{below}/__init__.py"):
        if os.path.isfile(path):
            return path
    top = os.path.join(root, name.partition(".")[0])
    return f"{top}/__init__.py" if os.path.isdir(top) else None
