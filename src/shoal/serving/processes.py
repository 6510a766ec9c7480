"""Several processes on one port, and their replacement without a lost connection.

The parent holds the listening sockets for as long as the port is served: a child that goes leaves what has
not been accepted yet to the one that takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

log = logging.getLogger(__name__)

READY_S = 30.0
STEADY_S = 10.0
AGAIN_S = 1.0
"""Between the death of a child that lived for less than the former and the next one."""
DYING_S = 0.1


class Child:
    """A process. Its pipe has a byte once it accepts connections, and ends when it no longer does."""

    def __init__(self, process: Process, pipe: int, link: socket.socket) -> None:
        self.process = process
        self.link = link
        """To what it has to tell the others, and to be told."""
        self.began = monotonic()
        self.has_served = False
        self.is_ready = asyncio.Event()
        """Or gone."""
        self.has_left = asyncio.Event()
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._told)

    def _told(self) -> None:
        if os.read(self._pipe, 1):
            self.has_served = True
        else:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self.has_left.set()
        self.is_ready.set()

    async def is_dead(self) -> bool:
        """Whether one that has left is gone already. Else it finishes what it has."""
        try:
            await asyncio.wait_for(self.process.wait(), DYING_S)
        except TimeoutError:
            return False
        return True

    async def leave(self) -> None:
        """Ask it to, and wait until it is gone."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()


class Family:
    """`arguments` makes a child's command line from its index and three descriptors: what it listens on, the
    pipe to say that it does, and the link to the others.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], arguments: Callable[[int, int, int, int], list[str]]
    ) -> None:
        self._listeners = listeners
        self._arguments = arguments
        self._stopped = asyncio.Event()
        self._reload = asyncio.Event()
        self._generation = 0
        self._children: set[Child] = set()
        """Those that serve, and those that finish what they have."""

    def reload(self) -> None:
        """Replace every child that was started before, if its successor can serve: else it stays."""
        self._generation += 1
        self._reload.set()
        self._reload = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Until SIGTERM or SIGINT; SIGHUP replaces the children. `ready` is called once all of them serve."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        children = await asyncio.gather(*map(self._start, range(len(self._listeners))))
        ready()
        async with asyncio.TaskGroup() as group:
            for index, child in enumerate(children):
                group.create_task(self._keep(group, index, child))

    async def _keep(self, group: asyncio.TaskGroup, index: int, child: Child) -> None:
        """One process after the other on this socket; who goes may take its time, the next one serves."""
        generation = 0
        while True:
            if generation == self._generation and not child.has_left.is_set():
                await _first(child.has_left.wait(), self._stopped.wait(), self._reload.wait())
            if self._stopped.is_set():
                break
            if child.has_left.is_set() and await child.is_dead():
                log.warning("process %d of the data plane ended with %d", index, child.process.returncode)
                await asyncio.sleep(AGAIN_S if monotonic() - child.began < STEADY_S else 0.0)
            generation = self._generation
            fresh = await self._start(index)
            if fresh.has_served or child.has_left.is_set():
                child, fresh = fresh, child
            else:
                told = "process %d stays, its successor cannot serve: see above why, then `kill -HUP %d`"
                log.error(told, index, os.getpid())
            group.create_task(self._leave(fresh))
        self._listeners[index].close()  # or callers would wait here for nobody
        await self._leave(child)

    async def _leave(self, child: Child) -> None:
        await child.leave()
        self._children.discard(child)
        asyncio.get_running_loop().remove_reader(child.link)
        child.link.close()

    def _pass_on(self, child: Child) -> None:
        """What one says, to all the others; who does not listen misses it, and is told again."""
        with contextlib.suppress(OSError):
            word = child.link.recv(1 << 20)
            for other in self._children - {child}:
                with contextlib.suppress(OSError):
                    other.link.send(word)

    async def _start(self, index: int) -> Child:
        """Returns when it accepts connections, or is gone already."""
        listener = self._listeners[index].fileno()
        ready, told = os.pipe()
        link, its_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        link.setblocking(False)  # noqa: FBT003 - the standard library's own
        inherited = (listener, told, its_link.fileno())
        command = [sys.executable, "-m", "shoal.serving", *self._arguments(index, *inherited)]
        try:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=inherited)
        finally:
            os.close(told)
            its_link.close()
        child = Child(process, ready, link)
        self._children.add(child)
        asyncio.get_running_loop().add_reader(link, self._pass_on, child)
        try:
            await asyncio.wait_for(child.is_ready.wait(), READY_S)
        except TimeoutError:
            log.warning("process %d of the data plane is not ready after %g s", index, READY_S)
        return child


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
