"""Whether a tar file is safe to unpack: plain files, directories and links that stay inside.

Read header by header without unpacking. Refused: compressed and sparse archives (a bomb must be as large
as what it unpacks to), devices, absolute names, `..`, links out of the tree and names that lead through one.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import IO

from shoal.errors import SpecError, TooLarge
from shoal.tar_reader import TarEntry, TarKind, read_entries

MAX_NAME = 4096
MAX_PART = 255


@dataclass(frozen=True)
class TarLimits:
    max_entries: int
    max_unpacked_bytes: int


def check_tar(file: IO[bytes], limits: TarLimits) -> None:
    """Raise `SpecError` or `TooLarge` unless every entry is safe. Blocks; time is bounded by the limits."""
    links: set[str] = set()
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


def _check_entry(entry: TarEntry, links: set[str]) -> None:
    name = _inner(entry.name, "entry")
    if entry.kind is TarKind.SPARSE:
        raise SpecError(f"entry `{_shown(name)}` is sparse; send it in full")
    if entry.kind is TarKind.OTHER:
        raise SpecError(
            f"entry `{_shown(name)}` is a device or pipe; only files, directories and links are taken"
        )
    # Unpacking a file over a link, or below one, would write wherever the link leads.
    for before in (*_parents(name), name):
        if before in links:
            raise SpecError(f"entry `{_shown(name)}` leads through the link `{_shown(before)}`")
    if entry.kind is TarKind.LINK:
        if posixpath.isabs(entry.target):
            raise SpecError(f"link `{_shown(name)}` leads outside the archive")
        _inner(posixpath.join(posixpath.dirname(name), entry.target), "link", may_climb=True)
        links.add(name)
    elif entry.kind is TarKind.HARD_LINK:
        target = _inner(entry.target, "link")
        if target in links or any(parent in links for parent in _parents(target)):
            raise SpecError(f"link `{_shown(name)}` leads through another link")


def _inner(name: str, what: str, *, may_climb: bool = False) -> str:
    """The normal form of a name that stays inside. Raises `SpecError` for one that does not."""
    if "\0" in name or len(name) > MAX_NAME or any(len(part) > MAX_PART for part in name.split("/")):
        raise SpecError(f"{what} `{_shown(name)}` has a name that no file system takes")
    normal = posixpath.normpath(name)
    climbs = ".." in name.split("/") and not may_climb
    if posixpath.isabs(name) or normal == ".." or normal.startswith("../") or climbs:
        raise SpecError(f"{what} `{_shown(name)}` leads outside the archive")
    return normal


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _shown(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)[:120]
