"""Heads that are alike in all that decides about a request and differ in what merely passes through.

Reads nothing that was not read before: every line of a head is either, to the byte, a line of a head that was
read in full, or has a name of such a line and a value without a control character. Whatever else it finds it
leaves to the full reading, which alone refuses. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from shoal.serving.head import MAX_HEADERS, MAX_LENGTH, PLAIN

MAX_KNOWN = 4096
"""Of heads, of names, of lines; beyond that remembering begins anew."""
MAX_LINE_BYTES = 256
"""Of a line that is remembered whole."""


T = TypeVar("T")


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

Own = tuple[bytes, bytes, int]
"""Of one request: its id as sent, its headers for the replica, the length of its body."""


class Alike(Generic[T]):
    """`kind_of` says of a name in lower case what it is. What heads have in common is a `T`."""

    def __init__(self, kind_of: Callable[[bytes], bytes | Kind]) -> None:
        self._kind_of = kind_of
        self._names: dict[bytes, bytes | Kind] = {}
        """As they came, in whatever case."""
        self._lines: dict[bytes, bytes | Kind] = {}
        """Those that pass: as they go on."""
        self._common: dict[tuple[bytes, ...], T] = {}

    def find(self, raw: bytes) -> tuple[T, bytes, bytes, int] | None:
        """What it has in common with a head that was learnt, and what is its own; None: read it in full."""
        found = self._sorted(raw)
        if found is None:
            return None
        common = self._common.get(found[0])
        return None if common is None else (common, *found[1])

    def learn(self, raw: bytes, common: T) -> None:
        """Of a head that was read in full and taken. Not for one whose meaning a line that passes decides."""
        for known in (self._names, self._lines, self._common):
            if len(known) + MAX_HEADERS > MAX_KNOWN:
                known.clear()
        for line in raw.split(b"\r\n")[1:-2]:
            name, _, value = line.partition(b":")
            kind = self._names[name] = self._kind_of(name.lower())
            if len(line) > MAX_LINE_BYTES:
                continue
            if isinstance(kind, bytes):
                self._lines[line] = kind and kind + value.strip(b" \t")
            elif kind is DECIDES:
                self._lines[line] = kind
        found = self._sorted(raw)
        if found is not None:
            self._common[found[0]] = common

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
                if not value.isalnum() and value.translate(None, PLAIN):
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
