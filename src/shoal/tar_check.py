"""Check that an untrusted tar file is safe to unpack: only plain files, directories and links that stay
inside.

`read_entries` reads headers (name, kind, size and link target of each entry) and no content. Its time is
proportional to the number of entries. `tarfile` has no such bound: a pax header costs it quadratic time
(CVE-2024-6232), and each header copies all global ones.

`check_tar` refuses compressed and sparse archives (so a bomb must be as large as what it unpacks to),
devices, absolute names, `..`, links out of the tree and names that lead through a link.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, NamedTuple

from shoal.errors import SpecError, TooLarge

BLOCK = 512
MAX_HEADER = 8 << 10
"""Bytes of one pax or GNU header. It holds two names of 4,096 bytes at most."""
MAX_HEADERS = 4
"""pax and GNU headers in front of one entry: a name, a link's target, and two of pax."""
MAX_RECORDS = 50
"""Records of one pax header."""
EXTENSIONS = (b"x", b"X", b"g", b"L", b"K")
"""Types of headers that describe the next entry. `g` describes all later entries."""

SPARSE = b"GNU.sparse."
"""Prefix of pax records about holes in a file."""


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
    """The target of a link."""


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
            kind = _check_header(block)[156:157]
            if kind not in EXTENSIONS:
                break
            # If an entry has several headers, the first one counts, as in tarfile.
            records = _read_extension(file, block) | records
            block = file.read(BLOCK)
        else:
            raise ValueError(f"an entry has more than {MAX_HEADERS - 1} headers in front of it")
        entry = _entry(block, records)
        if entry.kind in (TarKind.FILE, TarKind.SPARSE):
            if _padded(entry.size) > end - file.tell():
                raise ValueError("the file ends within an entry")
            file.seek(_padded(entry.size), os.SEEK_CUR)
        yield entry


def _check_header(block: bytes) -> bytes:
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


def _read_extension(file: IO[bytes], block: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax or GNU header about the next entry."""
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
    """Parse a sequence of `LENGTH KEY=VALUE` and a newline. The length includes its own digits."""
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
    """Parse octal digits, or base 256 after a byte of 0x80."""
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


MAX_NAME = 4096
MAX_PART = 255
MAX_PARTS = 100


@dataclass(frozen=True)
class TarLimits:
    max_entries: int
    max_unpacked_bytes: int


def check_tar(file: IO[bytes], limits: TarLimits) -> None:
    """Raise `SpecError` or `TooLarge` unless every entry is safe. Blocks for a time that the limits bound."""
    links: dict[str, str] = {}
    entries = unpacked = 0
    try:
        for entry in read_entries(file):
            entries += 1
            unpacked += entry.size
            if entries > limits.max_entries or unpacked > limits.max_unpacked_bytes:
                raise TooLarge(
                    f"the archive holds more than {limits.max_entries} entries or unpacks to more than "
                    f"{limits.max_unpacked_bytes} bytes",
                    hint="ignore what the job does not need in .gitignore",
                )
            _check_entry(entry, links)
    except ValueError as error:
        raise SpecError(
            f"the archive is not a plain tar file, or is damaged: {error}", hint="send an uncompressed tar"
        ) from error
    for name, target in links.items():
        if leads_outside(name, target, links):
            raise SpecError(f"link `{_shown(name)}` leads outside the archive, to `{_shown(target)}`")


def leads_outside(name: str, target: str, links: Container[str]) -> bool:
    """Whether a link leads outside, by itself or because its target has `..` after another of the links.

    All other links stay inside if each of them does, because they only lead down from their target.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    folder = posixpath.dirname(name)
    while ".." in steps:
        step = steps.pop(0)
        if step != "..":
            folder = posixpath.join(folder, step)
            if folder in links:
                return True
        elif folder:
            folder = posixpath.dirname(folder)
        else:
            return True
    return target.startswith("/")


def _check_entry(entry: TarEntry, links: dict[str, str]) -> None:
    name = _normal_name(entry.name, "entry")
    if entry.kind is TarKind.SPARSE:
        raise SpecError(f"entry `{_shown(name)}` is sparse; send it in full")
    if entry.kind is TarKind.OTHER:
        raise SpecError(
            f"entry `{_shown(name)}` is a device or pipe; only files, directories and links are taken"
        )
    # Unpacking a file over a link, or below one, would write wherever the link leads.
    link = _link_on_the_way(name, links)
    if link is not None:
        raise SpecError(f"entry `{_shown(name)}` leads through the link `{_shown(link)}`")
    if entry.kind is TarKind.LINK:
        _check_parts(entry.target, "link")
        links[name] = entry.target
    elif entry.kind is TarKind.HARD_LINK:
        target = _normal_name(entry.target, "link")
        if _link_on_the_way(target, links) is not None:
            raise SpecError(f"link `{_shown(name)}` leads through another link")


def _normal_name(name: str, noun: str) -> str:
    """Return the normal form of a name. Raise `SpecError` if it leads outside."""
    parts = _check_parts(name, noun)
    normal = posixpath.normpath(name)
    if normal.startswith("/") or ".." in parts:
        raise SpecError(f"{noun} `{_shown(name)}` leads outside the archive")
    return normal


def _check_parts(name: str, noun: str) -> list[str]:
    parts = name.split("/")
    if "\0" in name or len(name) > MAX_NAME or any(len(part) > MAX_PART for part in parts):
        raise SpecError(f"{noun} `{_shown(name)}` has a name that no file system takes")
    if len(parts) > MAX_PARTS:
        raise SpecError(
            f"{noun} `{_shown(name)}` has {len(parts)} parts between slashes; at most {MAX_PARTS} are taken"
        )
    return parts


def _link_on_the_way(name: str, links: Container[str]) -> str | None:
    """Return the first link among a name and the folders above it."""
    end = name.find("/")
    while end >= 0:
        if name[:end] in links:
            return name[:end]
        end = name.find("/", end + 1)
    return name if name in links else None


def _shown(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)[:120]
