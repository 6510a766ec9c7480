"""YAML text to a tree that remembers its lines, read event by event with every dimension bounded.

A subset of YAML 1.2: `on`, `yes` and `1:30` are text, not booleans and numbers as in YAML 1.1. No tags, no
merge keys, one document. Only text, numbers, booleans, lists and mappings are constructed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from shoal.spec.error_text import escape, show
from shoal.spec.problems import Loc

MAX_DEPTH = 32
MAX_WEIGHT = 40_000
"""Weight of a tree with its aliases written out: one for each node, and one for each 64 characters."""
MAX_DIGITS = 400
"""A longer run of digits is text: no field takes such a number, and Python is slow to read one."""

# The C parser took 22 ms where the other took 435 (30,000 scalars); a PyYAML built without libyaml
# has only the other.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf", ".Inf"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf"), -math.inf),
    **dict.fromkeys((".nan", ".NaN"), math.nan),
}


class UnreadableYaml(Exception):
    """The text cannot be understood from this line on."""

    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(sentence)
        self.line = line
        self.sentence = sentence


@dataclass(slots=True)
class YamlNode:
    line: int
    weight: int = 1


@dataclass(slots=True)
class YamlScalar(YamlNode):
    text: str = ""
    is_plain: bool = True


@dataclass(slots=True)
class YamlSequence(YamlNode):
    items: list[YamlNode] = field(default_factory=list)


@dataclass(slots=True)
class YamlMapping(YamlNode):
    items: dict[str, tuple[int, YamlNode]] = field(default_factory=dict)
    """Key to (the key's line, value)."""
    key: tuple[int, str] | None = None
    """The key whose value comes next, while reading."""


class _Reader:
    """Builds one tree from parser events, on an explicit stack, so that depth costs no recursion."""

    def __init__(self) -> None:
        self.root: YamlNode | None = None
        self.repeated: list[tuple[int, str]] = []
        """(line, sentence) for each key written twice; the first value stands."""
        self._open: list[tuple[YamlSequence | YamlMapping, str | None]] = []
        self._anchors: dict[str, YamlNode] = {}
        self._weight = 0

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise UnreadableYaml(line, "a second document begins here; a job file has one")
        if getattr(event, "tag", None) is not None:
            raise UnreadableYaml(line, f"the tag {show(event.tag)} is not read; remove it")
        if isinstance(event, yaml.ScalarEvent):
            scalar = YamlScalar(line, 1 + len(event.value) // 64, event.value, event.implicit[0])
            self._add_whole(scalar)
            if event.anchor is not None:
                self._anchors[event.anchor] = scalar
        elif isinstance(event, yaml.AliasEvent):
            self._add_whole(self._anchored(str(event.anchor), line))
        elif isinstance(event, yaml.SequenceStartEvent):
            self._begin(YamlSequence(line), event.anchor)
        elif isinstance(event, yaml.MappingStartEvent):
            self._begin(YamlMapping(line), event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end()

    def _anchored(self, anchor: str, line: int) -> YamlNode:
        # A node that is still open has no anchor, so an alias to it, which would be a loop, is not found.
        node = self._anchors.get(anchor)
        if node is None:
            raise UnreadableYaml(
                line, f"the alias {show('*' + anchor)} names nothing that is complete above it"
            )
        return node

    def _begin(self, node: YamlSequence | YamlMapping, anchor: str | None) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise UnreadableYaml(node.line, f"nested more than {MAX_DEPTH} levels deep")
        if self._open and isinstance(parent := self._open[-1][0], YamlMapping) and parent.key is None:
            raise UnreadableYaml(node.line, "a key must be text, not a list or a mapping")
        self._weigh(node)
        self._add(node)
        self._open.append((node, anchor))

    def _end(self) -> None:
        node, anchor = self._open.pop()
        if anchor is not None:
            self._anchors[anchor] = node
        if self._open:
            self._open[-1][0].weight += node.weight

    def _add_whole(self, node: YamlNode) -> None:
        """Add a complete node: a scalar, or an alias, which weighs as much as all it stands for."""
        self._weigh(node)
        self._add(node)
        if self._open:
            self._open[-1][0].weight += node.weight

    def _weigh(self, node: YamlNode) -> None:
        self._weight += node.weight
        if self._weight > MAX_WEIGHT:
            raise UnreadableYaml(
                node.line, f"too large: more than {MAX_WEIGHT:,} values, aliases written out"
            )

    def _add(self, node: YamlNode) -> None:
        if not self._open:
            self.root = node
            return
        parent = self._open[-1][0]
        if isinstance(parent, YamlSequence):
            parent.items.append(node)
        else:
            self._add_to_mapping(parent, node)

    def _add_to_mapping(self, parent: YamlMapping, node: YamlNode) -> None:
        if parent.key is None:
            if not isinstance(node, YamlScalar):
                raise UnreadableYaml(node.line, "a key must be text, not a list or a mapping")
            parent.key = (node.line, node.text)
            return
        line, key = parent.key
        parent.key = None
        if key in parent.items:
            first = parent.items[key][0]
            self.repeated.append((line, f"key {show(key)} is written twice, first on line {first}; keep one"))
        else:
            parent.items[key] = (line, node)


def read_tree(text: str) -> tuple[YamlNode | None, list[tuple[int, str]]]:
    """Return the tree (None: the text is empty) and a sentence for each key written twice.

    Raises `UnreadableYaml` for anything that is not YAML, or is larger or deeper than a job can be.
    """
    reader = _Reader()
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            reader.take(event)
    except yaml.MarkedYAMLError as wrong:
        raise _not_yaml(wrong) from None
    except yaml.YAMLError as wrong:
        position = getattr(wrong, "position", 0) or 0
        raise UnreadableYaml(
            text.count("\n", 0, position) + 1, f"not YAML: {escape(str(wrong))[:200]}"
        ) from None
    return reader.root, reader.repeated


def _not_yaml(wrong: yaml.MarkedYAMLError) -> UnreadableYaml:
    """Report where the parser gave up, and where the part it was reading began."""
    begun = (
        f" {wrong.context} on line {wrong.context_mark.line + 1}"
        if wrong.context and wrong.context_mark
        else ""
    )
    mark = wrong.problem_mark or wrong.context_mark
    return UnreadableYaml(
        mark.line + 1 if mark else 1, f"not YAML{escape(begun)}: {escape(wrong.problem or '')}"
    )


def plain_data(node: YamlNode, *, as_written: bool = False) -> Any:
    """Return the tree as plain data. `as_written` takes values of a mapping as their text."""
    if isinstance(node, YamlMapping):
        return {key: _value(child, as_written=as_written) for key, (_, child) in node.items.items()}
    if isinstance(node, YamlSequence):
        return [plain_data(child) for child in node.items]
    assert isinstance(node, YamlScalar)
    return resolve_scalar(node.text) if node.is_plain else node.text


def _value(node: YamlNode, *, as_written: bool) -> Any:
    if as_written and isinstance(node, YamlScalar) and _CONSTANTS.get(node.text, node) is not None:
        return node.text
    return plain_data(node)


def resolve_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else text
    return float(text) if len(text) <= 64 and _FLOAT.fullmatch(text) else text


def line_of(node: YamlNode, loc: Loc) -> int:
    """The line of the value at `loc`, or of the nearest written node above it.

    A list that was written as a mapping is counted in the mapping's order.
    """
    line = node.line
    for step in loc:
        if isinstance(node, YamlMapping):
            entries = list(node.items.values()) if isinstance(step, int) else []
            child = node.items.get(step) if isinstance(step, str) else None
            if isinstance(step, int) and step < len(entries):
                child = entries[step]
            if child is None:
                return line
            line, node = child
        elif isinstance(node, YamlSequence) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            line = node.line
        else:
            return line
    return line
