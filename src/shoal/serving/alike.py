"""Heads that are alike in all that decides about a request and differ in what merely passes through.

Reads nothing that was not read before: every line of a head is either, to the byte, a line of a head that was
read in full, or has a name of such a line and a value without a control character. Whatever else it finds it
leaves to the full reading, which alone refuses. Heads of one length that differ in nothing but values at the
same places, as ids and traces are, are not even split into lines (`Shape`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Generic, TypeVar

from shoal.serving.head import MAX_HEADERS, MAX_LENGTH

MAX_KNOWN = 4096
"""Of heads, of names, of lines; beyond that the oldest are forgotten."""
MAX_LINE_BYTES = 256
"""Of a line that is remembered whole."""
MAX_DIGITS = 15
"""Of a length: well below `MAX_LENGTH`."""
ZERO = ord("0")
CLEAN = re.compile(rb"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?").fullmatch
"""A value without control characters, and without spaces around it."""
MAX_SHAPES = 256
MAX_SHAPES_EACH = 4
"""Of heads of one length. With their heads' bytes and what is written from them, 4 MiB at most."""
MAX_OPEN = 16
"""Values that differ, of one shape."""


T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
Own = tuple[bytes, bytes, int]
"""Of one request: its id as sent, its headers for the replica, the length of its body."""


class Kind(Enum):
    """What a header is, if it does not merely pass: of those there is the name as it goes on, or nothing."""

    DECIDES = 1
    """Only heads with the same line are alike."""
    LENGTH = 2
    """Of the body: heads with another one are alike, those without are not."""
    ID = 3
    """Of the request."""
    MARKS = 4
    """Goes on, and heads that have a value there are alike."""


DECIDES, LENGTH, ID, MARKS = Kind
"""Found faster so."""


Field = tuple[int, int, bytes, bytes | Kind, bytes, bytes]
"""A value that differs: where it starts and ends; what follows it as it came, up to the next one; what its
header is; what is written before it (empty: it does not go on); lines that go on after it."""


class Shape(Generic[T]):
    """A head with places left open."""

    __slots__ = ("_fields", "_first", "_text", "common")

    def __init__(self, common: T, first: bytes, text: bytes, fields: list[Field]) -> None:
        self.common = common
        self._first = first
        self._text = text
        self._fields = fields

    def own(self, raw: bytes) -> Own | None:
        """Of a head as long as the one it was made from; None: it is another one."""
        if not raw.startswith(self._first):
            return None
        request_id, length = b"", 0
        own = [self._text]
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
                own += (label, value, text)
            elif text:
                own.append(text)
        return request_id, b"".join(own), length


class Alike(Generic[T]):
    """`kind_of` says of a name in lower case what it is. What heads have in common is a `T`."""

    def __init__(self, kind_of: Callable[[bytes], bytes | Kind]) -> None:
        self._kind_of = kind_of
        self._names: dict[bytes, bytes | Kind] = {}
        """As they came, in whatever case."""
        self._lines: dict[bytes, bytes | Kind] = {}
        """Those that pass: as they go on."""
        self._common: dict[tuple[bytes, ...], T] = {}
        self._firsts: dict[bytes, None] = {}
        """First lines of heads that were learnt: with another one nothing is found."""
        self._seen: dict[int, None] = {}
        """Marks of what has come once."""
        self._shapes: dict[int, list[Shape[T]]] = {}
        """By the length of the head, the one that got a shape last at the end."""
        self._num_shapes = 0
        self._last: tuple[T | None, int] = (None, 0)
        """What was found last that has no shape, and its length."""

    def shaped(self, raw: bytes) -> tuple[T, bytes, bytes, int] | None:
        """What it has in common with others, and what is its own; None: it is of no known shape."""
        for shape in self._shapes.get(len(raw), ()):
            own = shape.own(raw)
            if own is not None:
                return (shape.common, *own)
        return None

    def find(self, raw: bytes) -> tuple[T, bytes, bytes, int] | None:
        """The same, by its lines. None: read it in full."""
        if raw[: raw.index(b"\r\n")] not in self._firsts:
            return None
        found = self._sorted(raw)
        if found is None:
            return None
        common = self._common.get(found[0])
        if common is None:
            return None
        before, self._last = self._last, (common, len(raw))
        if before == self._last:  # most likely there will be more of them
            self._shape(raw, common)
        return (common, *found[1])

    def learn(self, raw: bytes, common: T) -> None:
        """Of a head that was read in full and taken. Not for one whose meaning a line that passes decides.

        Nothing is, until its first line has come before, and then all that decides and its names: what never
        recurs costs little and takes nobody's place.
        """
        first = raw[: raw.index(b"\r\n")]
        if not self._is_again(first):
            return
        lines = [(line, *line.partition(b":")) for line in raw.split(b"\r\n")[1:-2]]
        kinds = [self._kind_of(name.lower()) for _, name, _, _ in lines]
        marks = [
            line if kind is DECIDES else name for (line, name, *_), kind in zip(lines, kinds, strict=True)
        ]
        if not self._is_again((first, *marks)):
            return
        for (line, name, _, value), kind in zip(lines, kinds, strict=True):
            _keep(self._names, name, kind)
            if len(line) > MAX_LINE_BYTES:
                continue
            if isinstance(kind, bytes):
                _keep(self._lines, line, kind and kind + value.strip(b" \t"))
            elif kind is DECIDES:
                _keep(self._lines, line, kind)
        found = self._sorted(raw)
        if found is not None:
            _keep(self._firsts, first, None)
            _keep(self._common, found[0], common)

    def _is_again(self, what: Hashable) -> bool:
        """Whether it has come before; two that share a mark do no harm."""
        mark = hash(what)
        if mark in self._seen:
            return True
        _keep(self._seen, mark, None)
        return False

    def _sorted(self, raw: bytes) -> tuple[tuple[bytes, ...], Own] | None:
        """The lines that decide, and the request's own."""
        lines = raw.split(b"\r\n")
        if len(lines) > MAX_HEADERS + 3:
            return None
        lines_get, names_get = self._lines.get, self._names.get
        deciding, own = [lines[0]], []
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
                        own.append(kind + value)
                elif kind is ID:
                    if request_id is None:
                        request_id = value
                elif kind is LENGTH:
                    if not value.isdigit() or len(value) > 18 or (length := int(value)) > MAX_LENGTH:
                        return None
                    own.append(b"content-length: %d" % length)
                    deciding.append(b"content-length")
                elif kind is MARKS:
                    own.append(name.lower() + b": " + value)
                    deciding.append(b"marked" if value else b"unmarked")
                else:
                    deciding.append(line)
            elif kind is DECIDES:
                deciding.append(line)
            elif isinstance(kind, bytes) and kind:
                own.append(kind)
        own.append(b"")
        return tuple(deciding), (request_id or b"", b"\r\n".join(own), length)

    def _shape(self, raw: bytes, common: T) -> None:
        """Of a head that was found: values of lines not remembered whole are open."""
        at = raw.index(b"\r\n") + 2
        opened: list[tuple[int, int, bytes | Kind, bytes]] = []
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
            self._keep_shape(len(raw), Shape(common, raw[: opened[0][0]], texts[0], fields))

    def _keep_shape(self, length: int, shape: Shape[T]) -> None:
        known = self._shapes.pop(length, [])
        self._shapes[length] = kept = [shape, *known][:MAX_SHAPES_EACH]
        self._num_shapes += len(kept) - len(known)
        while self._num_shapes > MAX_SHAPES:
            self._num_shapes -= len(self._shapes.pop(next(iter(self._shapes))))


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """As the newest; where there are too many, the oldest goes."""
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_KNOWN:
        del known[next(iter(known))]
