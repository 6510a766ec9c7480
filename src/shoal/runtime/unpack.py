"""Unpack a workdir's snapshot. Runs as the job's user, inside its limits; trusts nothing in the archive.

Imported only by the child that unpacks: nobody else pays for tarfile.
"""

from __future__ import annotations

import hashlib
import os
import tarfile

from shoal.errors import SpecError

MAX_MEMBERS = 200_000
HAS_FILTERS = hasattr(tarfile, "data_filter")
"""Python 3.11.4 on; Debian 12 has 3.11.2, where we look at every member ourselves."""


def unpack(fd: int, digest: str, directory: str) -> None:
    """Unpack the open tar file below `directory` after checking its SHA-256. `SpecError`: it is not what
    it should be; some of it may have been unpacked.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
        if seen != digest:
            raise SpecError(f"the archive's SHA-256 is {seen}, the order says {digest}")
        size = file.tell()
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                _extract(archive, directory, size)
        except tarfile.TarError as error:
            raise SpecError(f"the archive cannot be unpacked: {error}") from error


def _extract(archive: tarfile.TarFile, directory: str, max_bytes: int) -> None:
    total = 0
    links: set[str] = set()
    for count, member in enumerate(archive, start=1):
        total += member.size
        if count > MAX_MEMBERS:
            raise SpecError(f"the archive holds more than {MAX_MEMBERS} files")
        # An uncompressed archive holds no more than its own size; one that claims to is a bomb of holes.
        if total > max_bytes:
            raise SpecError(f"the archive of {max_bytes} bytes claims to hold {total}")
        if not HAS_FILTERS:
            _tame(member, links)
    archive.errorlevel = 2
    if HAS_FILTERS:
        archive.extractall(directory, filter="data")
    else:
        archive.extractall(directory)  # noqa: S202 - every member was looked at above


def _tame(member: tarfile.TarInfo, links: set[str]) -> None:
    """What the `data` filter would do: refuse what could land or lead outside, or is no file, folder or link.

    `links` are those seen so far: with nothing unpacked through a link, names mean what they say.
    """
    member.name = os.path.normpath(member.name.lstrip("/") or ".")
    member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
    member.mode = (member.mode & 0o755) | 0o600
    names = [member.name]
    if member.islnk():
        member.linkname = os.path.normpath(member.linkname)
        names.append(member.linkname)
    elif member.issym():
        names.append(os.path.join(os.path.dirname(member.name), member.linkname))
        links.add(member.name)
    elif not (member.isreg() or member.isdir()):
        raise tarfile.ExtractError(f"`{member.name}` is no file, folder or link")
    for name in names:
        normal = os.path.normpath(name)
        if normal.startswith(("/", "../")) or normal == "..":
            raise tarfile.ExtractError(f"`{member.name}` leads outside")
    above = os.path.dirname(member.name)
    while above:
        if above in links:
            raise tarfile.ExtractError(f"`{member.name}` lies below the link `{above}`")
        above = os.path.dirname(above)
