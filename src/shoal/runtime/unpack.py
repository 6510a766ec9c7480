"""Unpack a workdir's snapshot. Runs as the job's user, inside its limits; trusts nothing in the archive.

Files and folders come first and links last, so that nothing is ever written through a link of the archive's
own. Imported only by the child that unpacks: nobody else pays for tarfile.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile

from shoal.errors import SpecError
from shoal.tar_check import leads_outside

MAX_MEMBERS = 200_000


def unpack(fd: int, digest: str, directory: str) -> None:
    """Unpack the open tar file in the empty `directory` after checking its SHA-256. `SpecError`: it is not
    what it should be; some of it may have been unpacked.
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
        except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
            raise SpecError(f"the archive cannot be unpacked: {error}") from error


def _extract(archive: tarfile.TarFile, directory: str, max_bytes: int) -> None:
    total = 0
    links: dict[str, str] = {}
    for count, member in enumerate(archive, start=1):
        archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every header it saw
        total += member.size
        if count > MAX_MEMBERS:
            raise SpecError(f"the archive holds more than {MAX_MEMBERS} files")
        # An uncompressed archive holds no more than its own size; one that claims to is a bomb of holes.
        if total > max_bytes:
            raise SpecError(f"the archive of {max_bytes} bytes claims to hold {total}")
        name = _inner(member.name.lstrip("/") or ".", member)
        if member.issym():
            links[name] = member.linkname
        else:
            _put(archive, member, directory, name)
    for name, target in links.items():
        if leads_outside(name, target, links):
            raise tarfile.ExtractError(f"the link `{name}` leads outside, to `{target}`")
        _link(directory, name, target, links)


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, directory: str, name: str) -> None:
    """Make one file or folder. There is no link in `directory` yet: names mean what they say."""
    path = os.path.join(directory, name)
    if member.isdir():
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if member.islnk():
        os.link(os.path.join(directory, _inner(member.linkname, member)), path, follow_symlinks=False)
        return
    content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
    if content is None:
        raise tarfile.ExtractError(f"`{member.name}` is no plain file, folder or link")
    mode = 0o755 if member.mode & 0o100 else 0o644
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    with content, os.fdopen(fd, "wb") as file:
        shutil.copyfileobj(content, file)


def _link(directory: str, name: str, target: str, links: dict[str, str]) -> None:
    above = os.path.dirname(name)
    while above:
        if above in links:
            raise tarfile.ExtractError(f"`{name}` lies below the link `{above}`")
        above = os.path.dirname(above)
    path = os.path.join(directory, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(target, path)


def _inner(name: str, member: tarfile.TarInfo) -> str:
    """The normal form of a name that stays inside."""
    normal = os.path.normpath(name)
    if normal.startswith(("/", "../")) or normal == "..":
        raise tarfile.ExtractError(f"`{member.name}` leads outside")
    return normal
