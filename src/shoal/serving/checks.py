"""Active checks: whether a replica is well, asked on a connection of its own.

One that takes no connections is asked every second until it does; the others every `EVERY` seconds, if the
service names a path to ask.
"""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic

from shoal.serving.answer import Answer
from shoal.serving.descriptors import is_ours
from shoal.serving.plane import DataPlane
from shoal.serving.replica import LiveReplica
from shoal.serving.service import LiveService
from shoal.serving.upstream import connect

EVERY = 5
MAX_FAILED = 2
"""In a row."""
ANSWER_S = 5.0
UNKNOWN = -1


class Probe:
    """An exchange that only wants to know the status; 0: none came."""

    is_head = False
    is_upgrade = False
    is_whole = False
    """As if: its connection is closed here, and must not have been given to a request meanwhile."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_answer(self, answer: Answer, body: bytes, *, is_whole: bool) -> None:
        self._tell(answer.status)

    def on_data(self, data: bytes, num_chunks: int = 1) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, reason: str) -> None:
        self._tell(0)

    def hold(self) -> None: ...

    def resume(self) -> None: ...

    def _tell(self, status: int) -> None:
        if not self.status.done():
            self.status.set_result(status)


async def status_of(replica: LiveReplica, path: str, visitor: ssl.SSLContext | None = None) -> int:
    """What it answers there; 0 if it does not, and without a path 200 as soon as it takes connections.
    `UNKNOWN`: it could not be asked, for a reason of our own.
    """
    try:
        up = await connect(replica, visitor)
    except (OSError, ValueError) as error:
        return UNKNOWN if is_ours(error) else 0
    try:
        if not path:
            return 200
        probe = Probe()
        head = f"GET {path} HTTP/1.1\r\nhost: shoal\r\nconnection: close\r\n".encode()
        up.send(probe, head + replica.secret_lines + b"\r\n")
        return await asyncio.wait_for(probe.status, ANSWER_S)
    except TimeoutError:
        return 0
    finally:
        up.close()


async def check(service: LiveService, replica: LiveReplica, visitor: ssl.SSLContext | None = None) -> None:
    """Asks once, and takes the replica out or in accordingly."""
    status = await status_of(replica, service.spec.check, visitor)
    if status == UNKNOWN:
        return
    if 0 < status < 500:
        was_out = replica.is_refusing or replica.checks_failed >= MAX_FAILED
        replica.checks_failed = 0
        if was_out:
            replica.is_refusing = False
            replica.ejected_until = 0.0
            service.refresh(monotonic())
        return
    replica.checks_failed += 1
    if replica.checks_failed >= MAX_FAILED and not replica.is_refusing:
        replica.is_refusing = True
        service.refresh(monotonic())


async def keep_checking(plane: DataPlane) -> None:
    """Until cancelled. A replica is never asked twice at once."""
    asked: dict[int, asyncio.Task[None]] = {}
    turn = 0
    while True:
        await asyncio.sleep(1.0)
        turn += 1
        asked = {key: task for key, task in asked.items() if not task.done()}
        for service in list(plane.services.values()):
            is_due = bool(service.spec.check) and turn % EVERY == 0
            for replica in list(service.replicas.values()):
                wanted = is_due or replica.is_refusing
                if wanted and not replica.is_draining and id(replica) not in asked:
                    asked[id(replica)] = asyncio.ensure_future(check(service, replica, plane.visitor))
