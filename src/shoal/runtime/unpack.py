"""Unpack a workdir's snapshot. Runs as the job's user, inside its limits; trusts nothing in the archive.

Imported only by the child that unpacks: nobody else pays for tarfile.
"""

from __future__ import annotations

import hashlib
import os
import tarfile

from shoal.errors import SpecError

MAX_MEMBERS = 200_000


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
    for count, member in enumerate(archive, start=1):
        total += member.size
        if count > MAX_MEMBERS:
            raise SpecError(f"the archive holds more than {MAX_MEMBERS} files")
        # An uncompressed archive holds no more than its own size; one that claims to is a bomb of holes.
        if total > max_bytes:
            raise SpecError(f"the archive of {max_bytes} bytes claims to hold {total}")
    archive.errorlevel = 2
    archive.extractall(directory, filter="data")
