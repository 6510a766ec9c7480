"""Parsers that a text from elsewhere can end with an error which nobody expects of a parser."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.style.tree import Function, Module

ROOMS = frozenset({"runtime", "engines", "control", "api", "serving"})
OF_THE_JOB = ("shoal.runtime.rank", "shoal.runtime.warm")
"""These run inside the job: a text of its own ends it alone."""
CAUGHT = frozenset({"RecursionError", "Exception"})


def unguarded_parsers(modules: Iterable[Module]) -> set[tuple[str, str]]:
    """Where such parsers are: the file below `src/shoal`, and the function."""
    return {
        (module.path.relative_to(module.base).as_posix(), name)
        for module in modules
        if module.room in ROOMS and not module.name.startswith(OF_THE_JOB)
        for name, node, is_guarded in _calls(module.tree, "", is_guarded=False)
        if not is_guarded and _parses(node)
    }


def _calls(tree: ast.AST, inside: str, *, is_guarded: bool) -> Iterator[tuple[str, ast.Call, bool]]:
    guarded = set(map(id, tree.body)) if isinstance(tree, ast.Try | ast.With) and _catches(tree) else set()
    for node in ast.iter_child_nodes(tree):
        name = node.name if isinstance(node, Function | ast.ClassDef) else None
        is_inside = (is_guarded and name is None) or id(node) in guarded
        yield from _calls(node, f"{inside}.{name}".lstrip(".") if name else inside, is_guarded=is_inside)
        if isinstance(node, ast.Call):
            yield inside, node, is_inside


def _catches(node: ast.Try | ast.With) -> bool:
    if isinstance(node, ast.Try):
        kinds = [handler.type for handler in node.handlers if handler.type is not None]
    else:
        kinds = [arg for item in node.items for arg in getattr(item.context_expr, "args", ())]
    return any(isinstance(name, ast.Name) and name.id in CAUGHT for kind in kinds for name in ast.walk(kind))


def _parses(call: ast.Call) -> bool:
    """JSON and MessagePack of msgspec, also by a decoder that was made before, and the library's JSON."""
    called = ast.unparse(call.func)
    if called in ("json.loads", "msgspec.json.decode", "msgspec.msgpack.decode", "_read_file"):
        return True
    owner = called.removesuffix(".decode").rpartition(".")[2]
    return (
        bool(call.args)
        and called.endswith(".decode")
        and ("decoder" in owner or (owner.isidentifier() and owner.isupper()))
    )
