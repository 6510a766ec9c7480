"""Tar files made by hand, honest and otherwise."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable


def tar_of(files: dict[str, bytes]) -> bytes:
    """Regular files alone."""
    return tar_with((_file(name, content), content) for name, content in files.items())


def tar_with(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """An empty entry of any kind."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info


def _file(name: str, content: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info
