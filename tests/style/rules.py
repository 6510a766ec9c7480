"""The rules of the house as functions: each takes modules and returns one line for each thing it finds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tests.style.tree import Function, Import, Module, length

LEAVES = frozenset(
    {
        *("bounded_file", "clock", "connection_quota", "curve", "errors", "fair_threads", "globs", "home"),
        *("home_identity", "ids", "local_sockets", "log", "ownership", "proof", "settings", "sidecar_tls"),
        *("tar_check", "tls_listener", "wire"),
    }
)
BELOW_CONTROL = frozenset({"scheduler", "engines", "store", "identity", "serving"})

MAY_SEE: dict[str, frozenset[str]] = {
    "bounded_file": frozenset(),
    "clock": frozenset(),
    "connection_quota": frozenset(),
    "curve": frozenset(),
    "errors": frozenset(),
    "fair_threads": frozenset({"errors"}),
    "globs": frozenset(),
    "home": frozenset(),
    "home_identity": frozenset({"errors"}),
    "ids": frozenset(),
    "local_sockets": frozenset(),
    "log": frozenset({"errors", "clock"}),
    "ownership": frozenset({"errors"}),
    "proof": frozenset({"wire"}),
    "settings": frozenset({"errors", "home"}),
    "sidecar_tls": frozenset({"wire"}),
    "tar_check": frozenset({"errors"}),
    "tls_listener": frozenset({"connection_quota"}),
    "wire": frozenset({"curve"}),
    "spec": LEAVES,
    "model": LEAVES | {"spec"},
    "runtime": frozenset(
        {
            *("bounded_file", "clock", "connection_quota", "curve", "errors", "local_sockets", "proof"),
            *("sidecar_tls", "tar_check", "wire"),
        }
    ),
    "scheduler": LEAVES | {"spec", "model"},
    "store": LEAVES | {"spec", "model"},
    "identity": LEAVES | {"spec", "model"},
    "engines": LEAVES | {"spec", "model", "runtime"},
    "serving": frozenset(
        {
            *(
                "clock",
                "connection_quota",
                "errors",
                "ids",
                "local_sockets",
                "log",
                "ownership",
                "sidecar_tls",
            ),
            *("tls_listener", "wire"),
        }
    ),
    "control": LEAVES | {"spec", "model"} | BELOW_CONTROL,
    "api": LEAVES | {"spec", "model", "control"} | BELOW_CONTROL,
    "sim": LEAVES | {"spec", "model", "control"} | BELOW_CONTROL,
    "client": LEAVES | {"spec"},
    "cluster": frozenset({"errors"}),
    "cli": LEAVES
    | {"spec", "model", "control", "client", "cluster", "api", "sim", "runtime"}
    | BELOW_CONTROL,
}
"""Which rooms each room may import. A room that is not listed may not exist."""

PURE = frozenset({"spec", "model", "scheduler"})
WITHOUT_CLOCK = PURE | {"control", "store", "identity", "sim"}
"""Rooms that are handed a `Clock`: a simulation must be able to run them."""

CLOCK_CALLS = frozenset(
    {
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.monotonic_ns",
        "time.perf_counter",
        "time.sleep",
        "datetime.now",
        "datetime.utcnow",
        "datetime.today",
        "date.today",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.date.today",
    }
)
IMPURE_MODULES = frozenset(
    {"asyncio", "anyio", "http", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}
)
HEAVY_FOR_WORKERS = frozenset({"alembic", "fastapi", "pydantic", "sqlalchemy", "uvicorn"})
REFUSED_NAMES = frozenset({"common", "helper", "helpers", "misc", "part2", "util", "utils"})

COMPOSITION = frozenset(
    {
        *("shoal.control.opening", "shoal.control.loops.runner"),
        *("shoal.api.app", "shoal.api.call", "shoal.api.http.server"),
    }
)
"""Modules that build the control plane, start its loops and open it to requests. They alone may take all of
it.
"""

MAX_FUNCTION_LINES = 70


def seen_room(target: str) -> str | None:
    """The room an import reaches into; None for what is not ours."""
    parts = target.split(".")
    return parts[1] if parts[0] == "shoal" and len(parts) > 1 else None


def closed_doors(modules: Iterable[Module]) -> list[str]:
    """Imports of rooms that this room may not see."""
    found = []
    for module in modules:
        allowed = MAY_SEE.get(module.room, frozenset()) | {module.room}
        for item in module.imports():
            room = seen_room(item.target)
            # `from shoal import __version__` names no room.
            if room is None or room in allowed or room.startswith("__"):
                continue
            found.append(f"{module.at(item.line)}: `{module.room}` may not see `{room}`")
    return found


def unknown_rooms(modules: Iterable[Module]) -> list[str]:
    """Rooms nobody gave a door to: add them to MAY_SEE, and to ARCHITECTURE.md."""
    rooms = {module.room for module in modules} - {"", "__main__"}
    return sorted(f"src/shoal/{room}" for room in rooms - set(MAY_SEE))


def engines_that_see_each_other(modules: Iterable[Module]) -> list[str]:
    """`engines.local` may import `engines.base`, never `engines.slurm`: each folder but `remote` is an
    engine.
    """
    inside = [module for module in modules if len(module.path.relative_to(module.base).parts) > 2]
    inside = [module for module in inside if module.room == "engines"]
    engines = {module.name.split(".")[2] for module in inside} - {"remote"}
    found = []
    for module in inside:
        own = module.name.split(".")[2]
        for item in module.imports():
            parts = item.target.split(".")
            if parts[:2] == ["shoal", "engines"] and len(parts) > 2 and parts[2] in engines - {own}:
                found.append(f"{module.at(item.line)}: engine `{own}` sees engine `{parts[2]}`")
    return found


def imports_inside_functions(modules: Iterable[Module]) -> list[str]:
    """Only `cli` (start-up time) and `engines/registry.py` (optional dependencies) may import late."""
    return [
        f"{module.at(item.line)}: `{item.target}` is imported inside a function"
        for module in modules
        if module.room != "cli" and module.name != "shoal.engines.registry"
        for item in module.imports()
        if item.is_inside_function
    ]


def impurities(modules: Iterable[Module]) -> list[str]:
    """Pure rooms take time, ids and randomness as arguments and never wait for anything."""
    return [
        f"{module.at(item.line)}: pure room `{module.room}` imports `{item.target}`"
        for module in modules
        if module.room in PURE
        for item in module.imports()
        if _top(item) in IMPURE_MODULES
    ]


def clock_readings(modules: Iterable[Module]) -> list[str]:
    """Rooms that are handed a clock read no other."""
    # Attributes, not calls: `time.time` as a default argument reads the clock as surely as a call does.
    return [
        f"{module.at(node.lineno)}: `{ast.unparse(node)}` in `{module.room}`"
        for module in modules
        if module.room in WITHOUT_CLOCK
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CLOCK_CALLS
    ]


def torch_imports(modules: Iterable[Module]) -> list[str]:
    """Only `runtime` (and examples, outside the package) may import torch."""
    return [
        f"{module.at(item.line)}: torch is imported in `{module.room}`"
        for module in modules
        if module.room != "runtime"
        for item in module.imports()
        if _top(item) == "torch"
    ]


def worker_weight(modules: Iterable[Module]) -> list[str]:
    """`runtime` and `serving` install and start on workers without the control plane's dependencies."""
    return [
        f"{module.at(item.line)}: `{item.target}` is too heavy for a worker"
        for module in modules
        if module.room in {"runtime", "serving"}
        for item in module.imports()
        if _top(item) in HEAVY_FOR_WORKERS
    ]


def takers_of_core(modules: Iterable[Module]) -> list[str]:
    """Functions that take all of the control plane, and so may touch anything in it."""
    return [
        f"{module.at(function.lineno)}: `{function.name}` takes `Core`; give it the capabilities that it uses"
        for module in modules
        if module.name not in COMPOSITION
        for function in module.functions()
        if any("Core" in names_in(argument.annotation) for argument in arguments_of(function))
    ]


def arguments_of(function: Function) -> list[ast.arg]:
    arguments = function.args
    several = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *several]


def names_in(annotation: ast.expr | None) -> set[str]:
    """The names and attributes in an annotation, also in one that is quoted."""
    text = "" if annotation is None else ast.unparse(annotation)
    return set(re.findall(r"\w+", text))


def long_files(modules: Iterable[Module], limit: int) -> list[str]:
    return [
        f"{module.at(1)}: {module.num_lines} lines, at most {limit}"
        for module in modules
        if module.num_lines > limit
    ]


def long_functions(modules: Iterable[Module], limit: int = MAX_FUNCTION_LINES) -> list[str]:
    return [
        f"{module.at(function.lineno)}: `{function.name}` has {length(function)} lines, at most {limit}"
        for module in modules
        for function in module.functions()
        if length(function) > limit
    ]


def refused_names(modules: Iterable[Module]) -> list[str]:
    """`utils` says nothing about what is inside."""
    return [
        f"{module.at(1)}: `{part}` is a name for nothing in particular"
        for module in modules
        for part in module.path.relative_to(module.base).with_suffix("").parts
        if REFUSED_NAMES & set(part.lower().split("_"))
    ]


def without_docstring(modules: Iterable[Module]) -> list[str]:
    return [
        f"{module.at(1)}: no docstring says what this is for"
        for module in modules
        if not ast.get_docstring(module.tree)
    ]


def _top(item: Import) -> str:
    return item.target.split(".")[0]
