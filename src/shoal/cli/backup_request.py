"""How `shoal backup` asks a running control plane for a copy of its SQLite database: through the home.

SQLite's file is locked for good while the control plane runs, so that one makes the copy. Whoever may write
in the home owns the keys in it; nobody else can ask, and the network has no part in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec
import structlog

from shoal.client.credentials import write_private
from shoal.errors import ServerUnreachable, ShoalError, StateError
from shoal.home import holder
from shoal.store import Head

FOLDER = "backup"
LOOK_EVERY_S = 0.25
TAKEN_S = 20.0
"""How long a request may lie there before nobody is taken to read it."""

log = structlog.get_logger()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    head: Head | None = None
    error: str = ""


class CanCopy(Protocol):
    def copy_to(self, target: Path) -> Head: ...


async def serve_requests(home: Path, store: CanCopy) -> None:
    """Make one copy at a time, until cancelled. What nobody has fetched goes with the next request.

    Without a descriptor, a thread or room on the disk there is no backup for now; the control plane goes on.
    """
    folder, is_told, is_cleared = home / FOLDER, False, False
    while True:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if (
                not is_cleared
            ):  # `ask` waits for as long as it sees a copy, and its maker may have been killed
                _clear(folder)
                is_cleared = True
            for request in sorted(folder.glob("*.asked")):
                _clear(folder)
                await anyio.to_thread.run_sync(_answer, request, store)
            is_told = False
        except Exception as error:  # noqa: BLE001 - no backup is worth the control plane
            if not is_told:
                log.warning("backup.cannot_look", error=_message(error))
            is_told = True
        await anyio.sleep(LOOK_EVERY_S)


def _answer(request: Path, store: CanCopy) -> None:
    copy = request.with_suffix(".copy")
    request.unlink(
        missing_ok=True
    )  # first: if the copy ends this process, the next one does not try it again
    try:
        answer = Answer(head=store.copy_to(copy))
    except Exception as error:  # noqa: BLE001 - whatever it was, the backup waits for an answer
        log.warning("backup.failed", error=_message(error))
        answer = Answer(error=_message(error))
    try:
        write_private(request.with_suffix(".answer"), msgspec.json.encode(answer).decode())
    except OSError:
        copy.unlink(missing_ok=True)  # while it is there, the backup waits for the answer
        raise


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, (ShoalError, OSError)) else repr(error)


def _clear(folder: Path) -> None:
    for left in (*folder.glob("*.copy*"), *folder.glob("*.answer")):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def ask(home: Path) -> Iterator[tuple[Path, Head]]:
    """Have a copy of the database, removed afterwards, and the newest event in it. Blocks.

    `StateError`: another process has one now. The next request clears the folder, so there is one at a time.
    """
    folder = home / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    with _alone(folder, home):
        for left in folder.glob("*.asked"):  # of a process that was killed: answering it would clear ours
            left.unlink(missing_ok=True)
        request = folder / f"{os.urandom(8).hex()}.asked"
        copy = request.with_suffix(".copy")
        try:
            yield copy, _answer_to(request, copy, home)
        finally:
            copy.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path, home: Path) -> Iterator[None]:
    """Hold a lock on the folder. The kernel releases it however this process ends."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            told = f"another backup of {home} is being made now"
            raise StateError(told, hint="type it again when that one is done") from error
        yield
    finally:
        os.close(directory)


def _answer_to(request: Path, copy: Path, home: Path) -> Head:
    answered = request.with_suffix(".answer")
    write_private(request, "")
    try:
        since = time.monotonic()
        while not answered.exists():
            if holder(home) is None or (not copy.exists() and time.monotonic() > since + TAKEN_S):
                raise ServerUnreachable(
                    f"the control plane of {home} does not make a copy of its database", hint="shoal status"
                )
            time.sleep(LOOK_EVERY_S / 5)
        answer = msgspec.json.decode(answered.read_bytes(), type=Answer)
    finally:
        request.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if answer.head is None:
        raise StateError(f"the database could not be copied: {answer.error}", hint=f"df -h {home}")
    return answer.head
