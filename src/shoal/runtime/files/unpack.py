"""Unpack a workdir's snapshot. Runs as the job's user, inside its limits; trusts nothing in the archive.

Files and folders come first and links last, so that nothing is ever written through a link of the archive.
Only the child process that unpacks imports this module, so that no other process pays for tarfile.

With a shared directory, `make` makes one work folder for all nodes of an attempt. Each node unpacks the job's
files beside it and then renames the result into place. The first node's rename makes the folder, and the
others throw their copies away. So no node waits for another, a node that dies leaves nothing half done, and a
replacement finds the folder as it is. Each attempt has a folder of its own, so a node of an older attempt
that still writes disturbs no other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tarfile

from shoal.errors import SpecError
from shoal.runtime.files import removal
from shoal.tar_check import leads_outside

MAX_MEMBERS = 200_000


def unpack(fd: int, digest: str, directory: str) -> None:
    """Unpack the open tar file into the empty `directory` after checking its SHA-256.

    `SpecError`: it is not what it should be. Some of it may have been unpacked by then.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
        if seen != digest:
            raise SpecError(f"the archive's SHA-256 is {seen}, the task spec says {digest}")
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
        archive.members = []  # type: ignore[attr-defined]  # tarfile keeps every header that it saw
        total += member.size
        if count > MAX_MEMBERS:
            raise SpecError(f"the archive holds more than {MAX_MEMBERS} files")
        # The archive is not compressed, so it holds no more than its own size. One that claims to is a bomb.
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
    """Make one file or folder. `directory` holds no link yet, so names mean what they say."""
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
    """Return the normal form of a name that stays inside."""
    normal = os.path.normpath(name)
    if normal.startswith(("/", "../")) or normal == "..":
        raise tarfile.ExtractError(f"`{member.name}` leads outside")
    return normal


MADE = ".shoal-made"
"""A file in every such folder, so that none is ever empty: a rename could replace an empty folder."""
REMOVE_S = 30.0


def make(fd: int | None, digest: str | None, final: str) -> None:
    """Make the attempt's folder, with the files of the open archive if there is one.

    All nodes may call this at once, and again. `SpecError`: the folder cannot be made.
    """
    above, attempt_id = os.path.split(final)
    os.makedirs(above, mode=0o700, exist_ok=True)
    if not os.path.isfile(f"{final}/{MADE}"):
        _make(fd, digest, above, final)
    if not os.path.isfile(f"{final}/{MADE}"):
        raise SpecError(f"the folder that nodes share cannot be made: {final} is something else")
    for name in os.listdir(above):
        # Folders of older attempts go, finished or not: attempt ids sort by time.
        if name.removeprefix(".") < attempt_id:
            removal.remove(f"{above}/{name}", timeout_s=REMOVE_S)


def _make(fd: int | None, digest: str | None, above: str, final: str) -> None:
    draft = f"{above}/.{os.path.basename(final)}.{os.urandom(8).hex()}"
    os.mkdir(draft, 0o700)
    try:
        if fd is not None and digest is not None:
            unpack(fd, digest, draft)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{draft}/{MADE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        os.rename(draft, final)
    except OSError as error:
        # Another node was first. The caller checks that, because over NFS a rename that succeeded may be
        # reported as failed.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise SpecError(f"the folder that nodes share cannot be made: {error}") from error
    finally:
        removal.remove(draft, timeout_s=REMOVE_S)
