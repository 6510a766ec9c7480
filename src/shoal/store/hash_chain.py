"""The hash that chains an event to all earlier ones. Changing this encoding breaks every existing log.

The hash uses the home's key. A person who can only write the database cannot change an entry, or add one that
follows from the others. Only an anchor kept elsewhere can show that a log still has its tail.

The anchor is one entry of the event log remembered outside the database, signed with the home's key. It shows
that a log lost its tail or was replaced by another. A person who can write the database and the anchor's
file, but cannot read the key, cannot make an anchor but can restore an earlier one. A second place for the
anchor protects against that.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

from shoal.errors import StateError
from shoal.store.base import LogHead

GENESIS = "0" * 64
"""The hash before the first entry."""


def chain_hash(key: bytes, before: str, seq: int, at: float, *texts: str | None) -> str:
    """HMAC-SHA-256 in hex over `before`, `seq`, `at` and the texts, in this order.

    Each field is written with its length, and an absent one differs from an empty one, so two
    different entries never have the same encoding.
    """
    fields = (before, str(seq), at.hex(), *texts)
    return hmac.digest(key, b"".join(_field(field) for field in fields), "sha256").hex()


def _field(value: str | None) -> bytes:
    if value is None:
        return b"-"
    content = value.encode()
    return b"%d:%b" % (len(content), content)


MAX_BYTES = 4096


class SignedHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seq: int
    hash: str
    mac: str


def read_anchor(path: Path, key: bytes) -> LogHead | None:
    """Return what `write_anchor` last wrote there, or None if it never did.

    `StateError`: the file was not written by a control plane of this home.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        signed = msgspec.json.decode(content, type=SignedHead)
    except msgspec.DecodeError as error:
        raise StateError(
            f"the anchor of the event log, {path}, is damaged: {error}",
            hint=f"compare it with a backup; to accept the log as it is, `rm {path}`",
        ) from error
    head = LogHead(signed.seq, signed.hash)
    if not hmac.compare_digest(signed.mac.encode(), _mac(key, head).encode()):
        raise StateError(
            f"the anchor of the event log, {path}, is not signed with this home's key: it was forged, or "
            "belongs to another home",
            hint=f"compare the log with a backup; to accept it as it is, `rm {path}`",
        )
    return head


def write_anchor(path: Path, head: LogHead, key: bytes) -> None:
    """Remember `head`, durably and atomically. The anchor never goes back.

    `StateError`: the anchor there remembers a later entry, or another entry with the same number, so the log
    has lost its tail or is not the same log. The file is left as it was.
    """
    old = read_anchor(path, key)
    if old is not None and (old.seq > head.seq or (old.seq == head.seq and old.hash != head.hash)):
        raise StateError(
            f"the event log ends at entry {head.seq}, but its anchor remembers another entry {old.seq}",
            hint="see what is wrong with `shoal audit --verify`",
        )
    # A unique file name: a deposed control plane may write an anchor at the same time, and both anchors are
    # true.
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(SignedHead(head.seq, head.hash, _mac(key, head))))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _sync_directory(path.parent)


def _mac(key: bytes, head: LogHead) -> str:
    return hmac.new(key, f"shoal-anchor\0{head.seq}\0{head.hash}".encode(), hashlib.sha256).hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
