"""The anchor: one entry of the event log remembered outside the database.

It is what shows that a log lost its tail or was put in another's place. Keep it where whoever can
write the database cannot write.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.errors import StateError
from shoal.store.base import Head


def read_anchor(path: Path) -> Head | None:
    """What `write_anchor` last wrote there; None if it never did."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=Head)
    except msgspec.DecodeError as error:
        raise StateError(
            f"the anchor of the event log is damaged: {error}",
            hint="compare it with a backup, or remove it to accept the log as it is",
        ) from error


def write_anchor(path: Path, head: Head) -> None:
    """Remember `head`, durably and at once or not at all. Never goes back.

    `StateError`: the anchor there remembers a later entry, or another one with the same number, so
    the log has lost its tail or is not the same log. The file is left as it was.
    """
    old = read_anchor(path)
    if old is not None and (old.seq > head.seq or (old.seq == head.seq and old.hash != head.hash)):
        raise StateError(
            f"the event log ends at entry {head.seq}, but its anchor remembers another entry {old.seq}",
            hint="see what is wrong with `shoal audit --verify`",
        )
    # A name of its own: a deposed control plane may write one at the same time, and each is true.
    fresh = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(head))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
