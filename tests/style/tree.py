"""The source tree as data: modules, their imports, their functions. Style tests ask it questions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shoal"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and where the statement stands."""

    target: str
    line: int
    is_inside_function: bool


@dataclass(frozen=True)
class Module:
    """One Python file. `name` is dotted, relative to `base`'s parent: `shoal.model.job`."""

    path: Path
    base: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, filename=str(self.path))

    @property
    def num_lines(self) -> int:
        return self.source.count("\n")

    @property
    def name(self) -> str:
        parts = (self.base.name, *self.path.relative_to(self.base).with_suffix("").parts)
        return ".".join(part for part in parts if part != "__init__")

    @property
    def room(self) -> str:
        """The folder, or the leaf's own name; the package itself has none."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def at(self, line: int) -> str:
        """`src/shoal/model/job.py:12`, which terminals and editors open."""
        shown = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{shown}:{line}"

    def imports(self) -> Iterator[Import]:
        inside = {id(node) for function in self.functions() for node in ast.walk(function)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target in self._targets(node):
                    yield Import(target, node.lineno, id(node) in inside)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        """`from a import b` names `a.b`: b may be a module, and a prefix test does not mind if it is not."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        origin = node.module or ""
        if node.level:
            here = self.name.split(".")
            is_package = self.path.name == "__init__.py"
            up = here[: len(here) - node.level + is_package]
            origin = ".".join([*up, origin] if origin else up)
        return [f"{origin}.{alias.name}" for alias in node.names]

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def modules(base: Path) -> list[Module]:
    """Every Python file below `base`, in a stable order."""
    return [Module(path, base) for path in sorted(base.rglob("*.py")) if "__pycache__" not in path.parts]


def length(function: Function) -> int:
    """Lines from `def` to the last statement; decorators are not counted."""
    return (function.end_lineno or function.lineno) - function.lineno + 1
