"""Whether a tar file is safe to unpack: plain files, directories and links that stay inside.

Read header by header without unpacking. Refused: compressed and sparse archives (a bomb must be as large
as what it unpacks to), devices, absolute names, `..`, links out of the tree and names that lead through one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Container
from dataclasses import dataclass
from typing import IO

from shoal.errors import SpecError, TooLarge
from shoal.tar_reader import TarEntry, TarKind, read_entries

MAX_NAME = 4096
MAX_PART = 255
MAX_PARTS = 100


@dataclass(frozen=True)
class TarLimits:
    max_entries: int
    max_unpacked_bytes: int


def check_tar(file: IO[bytes], limits: TarLimits) -> None:
    """Raise `SpecError` or `TooLarge` unless every entry is safe. Blocks; time is bounded by the limits."""
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
    """Whether a link leads outside, by itself or because its target has `..` behind another of the links.

    All other links stay inside if each of them does, since they only go down from where they point.
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
    name = _inner(entry.name, "entry")
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
        target = _inner(entry.target, "link")
        if _link_on_the_way(target, links) is not None:
            raise SpecError(f"link `{_shown(name)}` leads through another link")


def _inner(name: str, what: str) -> str:
    """The normal form of a name that stays inside. Raises `SpecError` for one that does not."""
    parts = _check_parts(name, what)
    normal = posixpath.normpath(name)
    if normal.startswith("/") or ".." in parts:
        raise SpecError(f"{what} `{_shown(name)}` leads outside the archive")
    return normal


def _check_parts(name: str, what: str) -> list[str]:
    parts = name.split("/")
    if "\0" in name or len(name) > MAX_NAME or any(len(part) > MAX_PART for part in parts):
        raise SpecError(f"{what} `{_shown(name)}` has a name that no file system takes")
    if len(parts) > MAX_PARTS:
        raise SpecError(
            f"{what} `{_shown(name)}` has {len(parts)} parts between slashes; at most {MAX_PARTS} are taken"
        )
    return parts


def _link_on_the_way(name: str, links: Container[str]) -> str | None:
    """The first link among a name and the folders above it."""
    end = name.find("/")
    while end >= 0:
        if name[:end] in links:
            return name[:end]
        end = name.find("/", end + 1)
    return name if name in links else None


def _shown(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)[:120]
