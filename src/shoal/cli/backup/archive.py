"""The backup file: a plain tar of a home's files, with a manifest of their hashes as its last member.

It is written under another name and renamed when it is whole and on disk. The reader trusts nothing in it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO
from urllib.parse import unquote_to_bytes

import msgspec

from shoal.cli.backup.files import SkippedFiles, WalkedFile, open_walked, stored_name
from shoal.errors import SpecError, StateError

MANIFEST = "manifest.json"
MAX_MANIFEST = 256 << 20
PIECE = 1 << 20
NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})
"""Error codes of file systems without hard links, such as those of USB sticks."""
ReportProgress = Callable[[str], None]


class BackupMember(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    sha256: str
    uid: int
    gid: int
    """Owner of the file. A restored checkpoint belongs to its job's project instead."""


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    shoal: str
    made_at: float
    seq: int
    """The newest entry of the event log."""
    head: str
    """The hash of that entry."""
    left_out: dict[str, int]
    """Folders that were not requested, with their bytes."""
    skipped: dict[str, str]
    """The first of the files that could not be saved, and why."""
    num_skipped: int
    cut: tuple[str, ...]
    """Members that became shorter while they were read: padded with zeros, and dropped by `restore`."""
    members: dict[str, BackupMember]


class _HashingReader(io.RawIOBase):
    """Read as many bytes of a file as it had when it was opened, and hash them.

    `fills`: if the file has become shorter, pad it with zeros.
    """

    def __init__(self, file: IO[bytes], name: str | Path, size: int, *, fills: bool = False) -> None:
        self._file, self._name, self._left, self._fills = file, name, size, fills
        self.digest = hashlib.sha256()
        self.num_missing = 0

    def read(self, size: int = -1) -> bytes:
        wanted = min(self._left, size if size >= 0 else self._left)
        data = self._file.read(wanted)
        if missing := wanted - len(data):
            if not self._fills:
                raise StateError(f"{self._name} became shorter while it was read", hint="try again")
            self.num_missing += missing
            data += bytes(missing)
        self._left -= len(data)
        self.digest.update(data)
        return data


class BackupWriter:
    """Adds files to a tar. `open_writer` makes one."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.members: dict[str, BackupMember] = {}
        self.left_out = SkippedFiles()
        self.cut: list[str] = []

    def add(self, name: str, path: Path) -> bool:
        """Add a file that Shoal itself made. Return False if it no longer exists."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        self._add(name, fd, os.fstat(fd), is_of_job=False)
        return True

    def add_walked(self, walked: WalkedFile) -> None:
        """Add the file at which the walk stands, or record why it is left out."""
        if (opened := open_walked(walked, self.left_out)) is not None:
            self._add(walked.name, *opened, is_of_job=walked.owner is not None)

    def _add(self, name: str, fd: int, facts: os.stat_result, *, is_of_job: bool) -> None:
        with os.fdopen(fd, "rb") as file:
            hashed = _HashingReader(file, name, facts.st_size, fills=is_of_job)
            info = _info(stored := stored_name(name), facts.st_size)
            info.uid, info.gid = facts.st_uid, facts.st_gid
            self._tar.addfile(info, hashed)
        self.members[stored] = _member(info, hashed)
        if hashed.num_missing:
            self.left_out.add(name, f"it became {hashed.num_missing:,} bytes shorter while it was read")
            self.cut.append(stored)

    def finish(self, manifest: BackupManifest) -> None:
        data = msgspec.json.encode(manifest)
        if len(data) > MAX_MANIFEST:
            raise StateError(
                f"{len(manifest.members):,} files are more than one backup can list",
                hint="shoal backup FILE, without `--with checkpoints`",
            )
        self._tar.addfile(_info(MANIFEST, len(data)), io.BytesIO(data))


@contextlib.contextmanager
def open_writer(target: Path) -> Iterator[BackupWriter]:
    """Write a backup to `target`, whole or not at all. It never replaces a file."""
    if target.exists():
        raise SpecError(f"{target} exists already", hint="name another file")
    part = target.with_name(f".{target.name}.{os.urandom(6).hex()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                yield BackupWriter(tar)
            file.flush()
            os.fsync(file.fileno())
        _put(part, target)
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)
    except OSError as error:
        raise StateError(
            f"the backup could not be written to {target}: {error.strerror or error}",
            hint=f"df -h {target.parent}",
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _put(part: Path, target: Path) -> None:
    try:
        os.link(part, target)  # unlike a rename, a link replaces nothing
    except OSError as error:
        if error.errno not in NO_LINKS or target.exists():
            raise
        part.rename(target)


def read_archive(source: Path, take: Callable[[str, IO[bytes], int], None]) -> BackupManifest:
    """Hand each member to `take`, which reads all of it, and compare all members with the manifest.

    Raise `StateError` if it is not a backup, or not as it was written.
    """
    seen: dict[str, BackupMember] = {}
    manifest: BackupManifest | None = None
    try:
        with tarfile.open(source, "r:") as tar:
            for info in tar:
                is_plain = info.type == tarfile.REGTYPE and not info.issparse()
                if manifest is not None or not is_plain or not _is_name(info.name) or info.name in seen:
                    raise _damaged(source, f"member {info.name!r} does not belong in it")
                file = tar.extractfile(info)
                assert file is not None
                if info.name == MANIFEST:
                    manifest = msgspec.json.decode(file.read(MAX_MANIFEST), type=BackupManifest)
                    continue
                hashed = _HashingReader(file, source, info.size)
                take(decoded_name(info.name), hashed, info.size)  # type: ignore[arg-type]
                seen[info.name] = _member(info, hashed)
    except (tarfile.TarError, ValueError, RecursionError, EOFError) as error:
        raise _damaged(source, str(error)) from error
    if manifest is None:
        raise _damaged(source, "its manifest is missing, so it was truncated")
    if unknown := set(manifest.cut) - seen.keys():
        raise _damaged(source, f"{min(unknown)} is listed as cut but is missing")
    wrong = [name for name in manifest.members.keys() | seen if manifest.members.get(name) != seen.get(name)]
    if wrong:
        raise _damaged(source, f"{min(wrong)} is not as it was written")
    return manifest


def copy_out(source: IO[bytes], target: IO[bytes] | None) -> None:
    while data := source.read(PIECE):
        if target is not None:
            target.write(data)


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info


def _member(info: tarfile.TarInfo, hashed: _HashingReader) -> BackupMember:
    return BackupMember(size=info.size, sha256=hashed.digest.hexdigest(), uid=info.uid, gid=info.gid)


def decoded_name(stored: str) -> str:
    return os.fsdecode(unquote_to_bytes(stored))


def _is_name(stored: str) -> bool:
    name = decoded_name(stored)
    is_its = stored_name(name) == stored
    return is_its and "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def _damaged(source: Path, because: str) -> StateError:
    return StateError(f"{source} is not a complete backup: {because}", hint="use another one")
