"""Templates of heads that are equal in all that decides about a request and differ in what passes through.

A template accepts nothing that was not parsed before: every line of a matching head is, byte for byte, a
line of a head that was parsed in full, or has the name of such a line and a value without control
characters. Any other head is left to the full parser, which alone refuses. Heads of one length that differ
only in values at the same places, such as ids and traces, are not even split into lines (`HeadTemplate`).
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Generic, TypeVar

from shoal.serving.proxy.request_head import MAX_HEADERS, MAX_LENGTH

MAX_KNOWN = 4096
"""Limit of heads, of names and of lines each. Beyond that the oldest are forgotten."""
MAX_LINE_BYTES = 256
"""Longest line that is remembered whole."""
MAX_DIGITS = 15
"""Digits of a body's length: well below `MAX_LENGTH`."""
ZERO = ord("0")
CLEAN = re.compile(rb"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?").fullmatch
"""A value without control characters, and without spaces around it."""
MAX_TEMPLATES = 256
MAX_TEMPLATES_PER_LENGTH = 4
"""Templates for heads of one length. With their heads' bytes and the output made from them, 4 MiB at most."""
MAX_OPEN = 16
"""Values that may differ in one template."""


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
RequestValues = tuple[bytes, bytes, int]
"""A request's own values: its id as sent, its headers for the replica, the length of its body."""


class HeaderKind(Enum):
    """What a header is for. A header that merely passes through has its outgoing name instead, or empty
    bytes.
    """

    DECIDES = 1
    """Only heads with the same line match."""
    LENGTH = 2
    """The body's length. Heads with another length match; heads without one do not."""
    ID = 3
    """The request's id."""
    MARKS = 4
    """Passes through. Heads match if both have a value there."""


DECIDES, LENGTH, ID, MARKS = HeaderKind
"""Module globals are found faster than enum members."""


Field = tuple[int, int, bytes, bytes | HeaderKind, bytes, bytes]
"""A value that differs: its start and end; the bytes that follow it, up to the next one; its header's
kind; what is written before it (empty: it is not passed on); the lines that are passed on after it."""


class HeadTemplate(Generic[T]):
    """A head with places left open."""

    __slots__ = ("_fields", "_first", "_text", "common")

    def __init__(self, common: T, first: bytes, text: bytes, fields: list[Field]) -> None:
        self.common = common
        self._first = first
        self._text = text
        self._fields = fields

    def match(self, raw: bytes) -> RequestValues | None:
        """Return the own values of a head of the template's length, or None if it does not match."""
        if not raw.startswith(self._first):
            return None
        request_id, length = b"", 0
        parts = [self._text]
        for start, end, fixed, kind, label, text in self._fields:
            value = raw[start:end]
            if not raw.startswith(fixed, end):
                return None
            if not (value.isalnum() or value.replace(b"-", b"").isalnum() or CLEAN(value)):
                return None
            if kind is LENGTH:
                if not value.isdigit() or (value[0] == ZERO and value != b"0") or len(value) > MAX_DIGITS:
                    return None
                length = int(value)
            elif kind is ID and not request_id:
                request_id = value
            if label:
                parts += (label, value, text)
            elif text:
                parts.append(text)
        return request_id, b"".join(parts), length


class HeadTemplates(Generic[T]):
    """`kind_of` says what a header name in lower case is for. Matching heads share one value of type `T`."""

    def __init__(self, kind_of: Callable[[bytes], bytes | HeaderKind]) -> None:
        self._kind_of = kind_of
        self._names: dict[bytes, bytes | HeaderKind] = {}
        """Names as they came, in any case."""
        self._lines: dict[bytes, bytes | HeaderKind] = {}
        """Lines that pass through, by their bytes, as they are passed on."""
        self._common: dict[tuple[bytes, ...], T] = {}
        self._firsts: dict[bytes, None] = {}
        """First lines of heads that were learnt. A head with another first line matches nothing."""
        self._seen: dict[int, None] = {}
        """Hashes of what has come once."""
        self._templates: dict[int, list[HeadTemplate[T]]] = {}
        """By the length of the head; the length that got a template last is at the end."""
        self._num_templates = 0
        self._last: tuple[T | None, int] = (None, 0)
        """The last head that `find` matched without a template, and its length."""

    def match(self, raw: bytes) -> tuple[T, bytes, bytes, int] | None:
        """Return what the head shares with others, and its own values; None if no template matches."""
        for template in self._templates.get(len(raw), ()):
            values = template.match(raw)
            if values is not None:
                return (template.common, *values)
        return None

    def find(self, raw: bytes) -> tuple[T, bytes, bytes, int] | None:
        """Do the same by the head's lines. None: it must be parsed in full."""
        if raw[: raw.index(b"\r\n")] not in self._firsts:
            return None
        split = self._split(raw)
        if split is None:
            return None
        common = self._common.get(split[0])
        if common is None:
            return None
        previous, self._last = self._last, (common, len(raw))
        if previous == self._last:  # two in a row: more are likely
            self._make_template(raw, common)
        return (common, *split[1])

    def learn(self, raw: bytes, common: T) -> None:
        """Learn a head that was parsed and accepted. Not for a head whose meaning depends on a line that
        passes.

        Nothing is learnt until its first line, and then its deciding lines and names, have come before. So
        heads that never recur cost little and displace nothing.
        """
        first = raw[: raw.index(b"\r\n")]
        if not self._was_seen(first):
            return
        lines = [(line, *line.partition(b":")) for line in raw.split(b"\r\n")[1:-2]]
        kinds = [self._kind_of(name.lower()) for _, name, _, _ in lines]
        marks = [
            line if kind is DECIDES else name for (line, name, *_), kind in zip(lines, kinds, strict=True)
        ]
        if not self._was_seen((first, *marks)):
            return
        for (line, name, _, value), kind in zip(lines, kinds, strict=True):
            _add_newest(self._names, name, kind)
            if len(line) > MAX_LINE_BYTES:
                continue
            if isinstance(kind, bytes):
                _add_newest(self._lines, line, kind and kind + value.strip(b" \t"))
            elif kind is DECIDES:
                _add_newest(self._lines, line, kind)
        split = self._split(raw)
        if split is not None:
            _add_newest(self._firsts, first, None)
            _add_newest(self._common, split[0], common)

    def _was_seen(self, key: Hashable) -> bool:
        """Return whether it has come before. Two keys with the same hash do no harm."""
        mark = hash(key)
        if mark in self._seen:
            return True
        _add_newest(self._seen, mark, None)
        return False

    def _split(self, raw: bytes) -> tuple[tuple[bytes, ...], RequestValues] | None:
        """Return the lines that decide, and the request's own values."""
        lines = raw.split(b"\r\n")
        if len(lines) > MAX_HEADERS + 3:
            return None
        lines_get, names_get = self._lines.get, self._names.get
        deciding, passed_on = [lines[0]], []
        request_id: bytes | None = None
        length = 0
        for line in lines[1:-2]:
            kind = lines_get(line)
            if kind is None:
                name, colon, value = line.partition(b":")
                kind = names_get(name)
                if kind is None or not colon:
                    return None
                value = value.strip(b" \t")
                if not (value.isalnum() or CLEAN(value) or not value):
                    return None
                if isinstance(kind, bytes):
                    if kind:
                        passed_on.append(kind + value)
                elif kind is ID:
                    if request_id is None:
                        request_id = value
                elif kind is LENGTH:
                    if not value.isdigit() or len(value) > 18 or (length := int(value)) > MAX_LENGTH:
                        return None
                    passed_on.append(b"content-length: %d" % length)
                    deciding.append(b"content-length")
                elif kind is MARKS:
                    passed_on.append(name.lower() + b": " + value)
                    deciding.append(b"marked" if value else b"unmarked")
                else:
                    deciding.append(line)
            elif kind is DECIDES:
                deciding.append(line)
            elif isinstance(kind, bytes) and kind:
                passed_on.append(kind)
        passed_on.append(b"")
        return tuple(deciding), (request_id or b"", b"\r\n".join(passed_on), length)

    def _make_template(self, raw: bytes, common: T) -> None:
        """Make a template of a head that `find` matched. Values of lines not remembered whole are open."""
        at = raw.index(b"\r\n") + 2
        opened: list[tuple[int, int, bytes | HeaderKind, bytes]] = []
        texts = [b""]
        for line in raw.split(b"\r\n")[1:-2]:
            kind = self._lines.get(line)
            if kind is None:
                name, _, value = line.partition(b":")
                kind, value = self._names[name], value.strip(b" \t")
                if kind is not DECIDES:
                    if not value:
                        return
                    start = at + line.index(value, len(name) + 1)
                    label = kind if isinstance(kind, bytes) else b"" if kind is ID else name.lower() + b": "
                    opened.append((start, start + len(value), kind, label))
                    texts.append(b"\r\n" if label else b"")
            elif isinstance(kind, bytes) and kind:
                texts[-1] += kind + b"\r\n"
            at += len(line) + 2
        if 0 < len(opened) <= MAX_OPEN:
            ends = [start for start, *_ in opened[1:]] + [len(raw)]
            fields: list[Field] = [
                (start, end, raw[end:until], kind, label, text)
                for (start, end, kind, label), until, text in zip(opened, ends, texts[1:], strict=True)
            ]
            self._add_template(len(raw), HeadTemplate(common, raw[: opened[0][0]], texts[0], fields))

    def _add_template(self, length: int, template: HeadTemplate[T]) -> None:
        templates = self._templates.pop(length, [])
        self._templates[length] = newest = [template, *templates][:MAX_TEMPLATES_PER_LENGTH]
        self._num_templates += len(newest) - len(templates)
        while self._num_templates > MAX_TEMPLATES:
            self._num_templates -= len(self._templates.pop(next(iter(self._templates))))


def _add_newest(entries: dict[K, V], key: K, value: V) -> None:
    """Add the entry as the newest. If there are too many, drop the oldest."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > MAX_KNOWN:
        del entries[next(iter(entries))]
