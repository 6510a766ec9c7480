"""Read the entries of an untrusted tar file: their names, kinds, sizes and link targets, not their content.

The time is proportional to the number of entries. `tarfile` gives no such bound: a pax header costs it
quadratic time (CVE-2024-6232), and each one copies all global ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from typing import IO, NamedTuple

BLOCK = 512
MAX_HEADER = 8 << 10
"""Bytes of one pax or GNU header. It holds two names of 4,096 bytes at most."""
MAX_HEADERS = 4
"""pax and GNU headers in front of one entry: a name, a link's target, and two of pax."""
MAX_RECORDS = 50
"""Records of one pax header."""
EXTENSIONS = (b"x", b"X", b"g", b"L", b"K")
"""Types of headers about the entry behind them; `g` is about all entries behind it."""

SPARSE = b"GNU.sparse."
"""Begins the keys of pax records about holes in a file."""


class TarKind(StrEnum):
    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    HARD_LINK = "hard link"
    SPARSE = "sparse"
    OTHER = "other"


_KINDS = {
    b"0": TarKind.FILE,
    b"\0": TarKind.FILE,
    b"7": TarKind.FILE,
    b"1": TarKind.HARD_LINK,
    b"2": TarKind.LINK,
    b"5": TarKind.FOLDER,
    b"S": TarKind.SPARSE,
}


class TarEntry(NamedTuple):
    name: str
    kind: TarKind
    size: int
    target: str
    """Of a link."""


def read_entries(file: IO[bytes]) -> Iterator[TarEntry]:
    """Yield the entries of an uncompressed tar file in the ustar, pax or GNU format. Blocks.

    `ValueError`: the file is not one, is damaged, or exceeds a limit.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not end:
        raise ValueError("the file is empty")
    while (block := file.read(BLOCK)) and any(block):
        records: dict[bytes, bytes] = {}
        for _ in range(MAX_HEADERS):
            kind = _checked(block)[156:157]
            if kind not in EXTENSIONS:
                break
            # Of several headers in front of an entry the first counts, as in tarfile.
            records = _extension(file, block) | records
            block = file.read(BLOCK)
        else:
            raise ValueError(f"an entry has more than {MAX_HEADERS - 1} headers in front of it")
        entry = _entry(block, records)
        if entry.kind in (TarKind.FILE, TarKind.SPARSE):
            if _padded(entry.size) > end - file.tell():
                raise ValueError("the file ends within an entry")
            file.seek(_padded(entry.size), os.SEEK_CUR)
        yield entry


def _checked(block: bytes) -> bytes:
    if len(block) < BLOCK or 256 + sum(block) - sum(block[148:156]) != _number(block[148:156]):
        raise ValueError("a header is cut off or has a wrong checksum")
    return block


def _entry(block: bytes, records: dict[bytes, bytes]) -> TarEntry:
    name, prefix = _text(block[:100]), _text(block[345:500])
    kind = _KINDS.get(block[156:157], TarKind.OTHER)
    if block[156:157] == b"\0" and name.endswith("/"):
        kind = TarKind.FOLDER
    if prefix and kind is not TarKind.SPARSE:
        name = f"{prefix}/{name}"
    if any(key.startswith(SPARSE) for key in records):
        kind = TarKind.SPARSE
    size = _decimal(records[b"size"]) if b"size" in records else _number(block[124:136])
    name = _decoded(records[b"path"]) if b"path" in records else name
    target = _decoded(records[b"linkpath"]) if b"linkpath" in records else _text(block[157:257])
    return TarEntry(name, kind, size, target)


def _extension(file: IO[bytes], block: bytes) -> dict[bytes, bytes]:
    """What a pax or GNU header says about the entry behind it."""
    kind, size = block[156:157], _number(block[124:136])
    if size > MAX_HEADER:
        raise ValueError(f"a header has {size} bytes; at most {MAX_HEADER} are taken")
    content = file.read(_padded(size))
    if kind == b"L":
        return {b"path": content.partition(b"\0")[0]}
    if kind == b"K":
        return {b"linkpath": content.partition(b"\0")[0]}
    records = _records(content)
    if kind != b"g":
        return records
    if any(key in (b"path", b"linkpath", b"size") or key.startswith(SPARSE) for key in records):
        raise ValueError("a header names or sizes all entries behind it")
    return {}


def _records(content: bytes) -> dict[bytes, bytes]:
    """`LENGTH KEY=VALUE` and a newline, again and again; the length counts itself."""
    records: dict[bytes, bytes] = {}
    at = num_records = 0
    while at < len(content) and content[at]:
        num_records += 1
        space = content.find(b" ", at, at + 6)
        length = _decimal(content[at : max(space, at)])
        record = content[space + 1 : at + length]
        key, equals, value = record.partition(b"=")
        is_whole = key and equals and value.endswith(b"\n") and at + length <= len(content)
        if num_records > MAX_RECORDS or not is_whole:
            raise ValueError("a pax header is damaged or has too many records")
        records[key] = value[:-1]
        at += length
    return records


def _number(field: bytes) -> int:
    """Octal digits, or base 256 after a byte of 0x80."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = _text(field).strip()
    if not set(digits) <= set("01234567"):
        raise ValueError("a number in a header is damaged")
    return int(digits or "0", 8)


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:
        raise ValueError("a number in a header is damaged")
    return int(digits)


def _text(field: bytes) -> str:
    return _decoded(field.partition(b"\0")[0])


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
