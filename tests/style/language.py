"""The rules of the language: names say what a value is, and prose reads at normal speed."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.style.tree import Module

EMPTY_NAMES = frozenset({"asked", "found", "heard", "known", "own", "said", "told", "words"})
"""They say how a value came here, and not what it is."""
BANNED = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "anew": r"\banew\b",
        "as far as": r"\bas far as (?:anybody|we|it) (?:knows?|is known)\b",
        "nobody": r"\b(?:nobody|anybody|somebody)\b",
        "runs on": r"\bgo(?:es)? on\b|\bruns? on\b(?! \S*(?:nodes?|machines?|it|one|two|Slurm|Ray|`))",
        "so long": r"\bso (?:long|many|much)\b(?! (?:as|that))",
        "told": r"\bis told\b|\bsays so\b|\btells of\b",
        "who": r"(?:^|[.;:,(]\s+|\b(?:of|to|by|for|from|with|than|and|or|that|but)\s+)who\b",
        "whoever": r"\b(?:whoever|whomever|whom|whichever)\b",
        "yet": r"\byet\b",
    }.items()
}
"""Constructions of the old dialect. The counts are of docstrings, comments and texts, not of code."""


class NameUse(NamedTuple):
    name: str
    line: int


def bound_names(tree: ast.AST) -> Iterator[NameUse]:
    """Every variable and parameter that the code binds, in any scope."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield NameUse(node.id, node.lineno)
        elif isinstance(node, ast.arg):
            yield NameUse(node.arg, node.lineno)


def empty_names(modules: Iterable[Module]) -> list[str]:
    """Variables and parameters that are named for how their value came here."""
    return [
        f"{module.at(use.line)}: `{use.name}` says nothing about the value; name it for what it holds"
        for module in modules
        for use in bound_names(module.tree)
        if use.name in EMPTY_NAMES
    ]


def shared_class_names(modules: Iterable[Module], allowed: frozenset[str]) -> list[str]:
    """Public classes whose name stands in two modules: a reader would have to look up which one is meant."""
    places = defaultdict[str, list[str]](list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.at(node.lineno))
    return sorted(
        f"`{name}` is a class in {', '.join(found_at)}"
        for name, found_at in places.items()
        if len(found_at) > 1 and name not in allowed
    )


def prose(module: Module) -> Iterator[str]:
    """Its comments and string literals, as they stand in the file."""
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type in {tokenize.STRING, tokenize.COMMENT}:
            yield token.string


def banned_counts(modules: Iterable[Module]) -> dict[str, Counter[str]]:
    """How often each construction occurs, by room."""
    counts = defaultdict[str, Counter[str]](Counter)
    for module in modules:
        for text in prose(module):
            for name, pattern in BANNED.items():
                if count := len(pattern.findall(text)):
                    counts[module.room if module.path.parent != module.base else "."][name] += count
    return dict(counts)
