"""The anchor: one entry of the event log remembered outside the database, signed with the home's key.

It shows that a log lost its tail or was put in another's place. Whoever can write the database and this file,
but not read the key, makes no anchor and can put an earlier one back: that is what a second place is for.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

from shoal.errors import StateError
from shoal.store.base import Head

MAX_BYTES = 4096


class SignedHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seq: int
    hash: str
    mac: str


def read_anchor(path: Path, key: bytes) -> Head | None:
    """What `write_anchor` last wrote there; None if it never did.

    `StateError`: what is there was not written by a control plane of this home.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        found = msgspec.json.decode(content, type=SignedHead)
    except msgspec.DecodeError as error:
        raise StateError(
            f"the anchor of the event log, {path}, is damaged: {error}",
            hint=f"compare it with a backup; to accept the log as it is, `rm {path}`",
        ) from error
    head = Head(found.seq, found.hash)
    if not hmac.compare_digest(found.mac.encode(), _mac(key, head).encode()):
        raise StateError(
            f"the anchor of the event log, {path}, is not signed with this home's key: it was forged, or "
            "belongs to another home",
            hint=f"compare the log with a backup; to accept it as it is, `rm {path}`",
        )
    return head


def write_anchor(path: Path, head: Head, key: bytes) -> None:
    """Remember `head`, durably and at once or not at all. Never goes back.

    `StateError`: the anchor there remembers a later entry, or another one with the same number, so
    the log has lost its tail or is not the same log. The file is left as it was.
    """
    old = read_anchor(path, key)
    if old is not None and (old.seq > head.seq or (old.seq == head.seq and old.hash != head.hash)):
        raise StateError(
            f"the event log ends at entry {head.seq}, but its anchor remembers another entry {old.seq}",
            hint="see what is wrong with `shoal audit --verify`",
        )
    # A name of its own: a deposed control plane may write one at the same time, and each is true.
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(SignedHead(head.seq, head.hash, _mac(key, head))))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _sync_directory(path.parent)


def _mac(key: bytes, head: Head) -> str:
    return hmac.new(key, f"shoal-anchor\0{head.seq}\0{head.hash}".encode(), hashlib.sha256).hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
