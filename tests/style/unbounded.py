"""Reads that end only where the file, the folder or the pipe does."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.style.tree import Function, Module

ROOMS = frozenset({"runtime", "engines", "control", "api"})
"""Rooms that look at what jobs, or supervisors that run as a job's user, have written."""
OF_THE_JOB = ("shoal.runtime.rank", "shoal.runtime.warm")
"""These run inside the job, with its user and in its limits: whatever they read, the job pays for."""
WHOLE = frozenset({"read_text", "read_bytes", "readlines", "iterdir", "glob", "rglob", "fetchmany"})
"""Methods that read a file or a folder to its end."""
FUNCTIONS = frozenset(
    {
        *("json.load", "np.load", "numpy.load", "os.listdir", "os.walk", "os.fwalk", "os.scandir"),
        *("shutil.copyfile", "shutil.copyfileobj", "shutil.copytree", "shutil.rmtree", "mmap.mmap"),
    }
)


def unbounded_reads(modules: Iterable[Module]) -> set[tuple[str, str]]:
    """Where such reads are: the file below `src/shoal`, and the function."""
    return {
        (module.path.relative_to(module.base).as_posix(), name)
        for module in modules
        if module.room in ROOMS and not module.name.startswith(OF_THE_JOB)
        for name, node in _calls(module.tree, "")
        if _is_unbounded(node)
    }


def _calls(tree: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, Function | ast.ClassDef) else None
        yield from _calls(node, f"{inside}.{name}".lstrip(".") if name else inside)
        if isinstance(node, ast.Call):
            yield inside, node


def _is_unbounded(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    if called in FUNCTIONS:
        return True
    if called == "iter" and call.args and isinstance(call.args[0], ast.Lambda):
        return "read(" in ast.unparse(call.args[0])  # until it is empty
    if not isinstance(call.func, ast.Attribute):
        return False
    has_no_bound = not call.args and not call.keywords
    return call.func.attr in WHOLE or (call.func.attr == "read" and has_no_bound)
