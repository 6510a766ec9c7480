"""How `shoal backup` asks a running control plane for a copy of its SQLite database: by files in the home.

The control plane keeps SQLite's file locked while it runs, so it has to make the copy. A process that can
write in the home can read the keys in it anyway. No other process can ask, and the network is not involved.
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
from shoal.home import pid_holding
from shoal.store import LogHead

FOLDER = "backup"
LOOK_EVERY_S = 0.25
TAKEN_S = 20.0
"""How long a request may wait before the control plane is assumed not to read it."""

log = structlog.get_logger()


class CopyReply(msgspec.Struct, frozen=True, kw_only=True):
    head: LogHead | None = None
    error: str = ""


class SupportsCopy(Protocol):
    def copy_to(self, target: Path) -> LogHead: ...


async def serve_requests(home: Path, store: SupportsCopy) -> None:
    """Make one copy at a time, until cancelled. The next request removes a copy that was not fetched.

    Without a descriptor, a thread or room on the disk a backup fails; the control plane continues.
    """
    folder, is_told, is_cleared = home / FOLDER, False, False
    while True:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if (
                not is_cleared
            ):  # `request_copy` waits as long as it sees a copy, and the maker may have been killed
                _clear(folder)
                is_cleared = True
            for request in sorted(folder.glob("*.asked")):
                _clear(folder)
                await anyio.to_thread.run_sync(_serve_request, request, store)
            is_told = False
        except Exception as error:  # noqa: BLE001 - a backup must not stop the control plane
            if not is_told:
                log.warning("backup.cannot_look", error=_message(error))
            is_told = True
        await anyio.sleep(LOOK_EVERY_S)


def _serve_request(request: Path, store: SupportsCopy) -> None:
    copy = request.with_suffix(".copy")
    request.unlink(
        missing_ok=True
    )  # first: if the copy kills this process, the next one does not try it again
    try:
        answer = CopyReply(head=store.copy_to(copy))
    except Exception as error:  # noqa: BLE001 - the backup waits for a reply, whatever the error was
        log.warning("backup.failed", error=_message(error))
        answer = CopyReply(error=_message(error))
    try:
        write_private(request.with_suffix(".answer"), msgspec.json.encode(answer).decode())
    except OSError:
        copy.unlink(missing_ok=True)  # while the copy exists, the backup waits for the reply
        raise


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, (ShoalError, OSError)) else repr(error)


def _clear(folder: Path) -> None:
    for left in (*folder.glob("*.copy*"), *folder.glob("*.answer")):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def request_copy(home: Path) -> Iterator[tuple[Path, LogHead]]:
    """Yield a copy of the database, removed afterwards, and its newest event. Blocks.

    Raise `StateError` if another backup has one now: the next request clears the folder, so there is one at a
    time.
    """
    folder = home / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    with _exclusive(folder, home):
        for left in folder.glob("*.asked"):  # of a process that was killed: a reply to it would clear ours
            left.unlink(missing_ok=True)
        request = folder / f"{os.urandom(8).hex()}.asked"
        copy = request.with_suffix(".copy")
        try:
            yield copy, _await_reply(request, copy, home)
        finally:
            copy.unlink(missing_ok=True)


@contextlib.contextmanager
def _exclusive(folder: Path, home: Path) -> Iterator[None]:
    """Hold a lock on the folder. The kernel releases it however this process ends."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"another backup of {home} is running"
            raise StateError(problem, hint="try again when it is done") from error
        yield
    finally:
        os.close(directory)


def _await_reply(request: Path, copy: Path, home: Path) -> LogHead:
    answered = request.with_suffix(".answer")
    write_private(request, "")
    try:
        since = time.monotonic()
        while not answered.exists():
            if pid_holding(home) is None or (not copy.exists() and time.monotonic() > since + TAKEN_S):
                raise ServerUnreachable(
                    f"the control plane of {home} does not make a copy of its database", hint="shoal status"
                )
            time.sleep(LOOK_EVERY_S / 5)
        answer = msgspec.json.decode(answered.read_bytes(), type=CopyReply)
    finally:
        request.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if answer.head is None:
        raise StateError(f"the database could not be copied: {answer.error}", hint=f"df -h {home}")
    return answer.head
