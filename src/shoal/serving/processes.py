"""Several processes on one port, and their replacement without a lost connection.

The parent holds the listening sockets for as long as the port is served: a child that goes leaves what has
not been accepted yet to the one that takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

log = logging.getLogger(__name__)

READY_S = 30.0
AGAIN_S = 1.0
"""Between the death of a child and the next."""


class Family:
    """`arguments` makes a child's command line from its index, its socket's number and its ready pipe's."""

    def __init__(
        self, listeners: Sequence[socket.socket], arguments: Callable[[int, int, int], list[str]]
    ) -> None:
        self._listeners = listeners
        self._arguments = arguments
        self._stopped = asyncio.Event()
        self._reload = asyncio.Event()
        self._generation = 0

    def reload(self) -> None:
        """Replace every child that was started before."""
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
                group.create_task(self._keep(index, child))

    async def _keep(self, index: int, child: Process) -> None:
        generation = 0
        while not self._stopped.is_set():
            if generation == self._generation:
                await _first(child.wait(), self._stopped.wait(), self._reload.wait())
            if child.returncode is not None:
                log.warning("process %d of the data plane ended with %d", index, child.returncode)
                await asyncio.sleep(AGAIN_S)
                child = await self._start(index)
            elif generation != self._generation:
                generation = self._generation
                before, child = child, await self._start(index)
                before.send_signal(signal.SIGTERM)
                await before.wait()
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            await child.wait()

    async def _start(self, index: int) -> Process:
        """Returns when it accepts connections, or is gone already."""
        listener = self._listeners[index].fileno()
        ready, told = os.pipe()
        command = [sys.executable, "-m", "shoal.serving", *self._arguments(index, listener, told)]
        try:
            child = await asyncio.create_subprocess_exec(*command, pass_fds=(listener, told))
        finally:
            os.close(told)
        try:
            await asyncio.wait_for(asyncio.to_thread(os.read, ready, 1), READY_S)
        except TimeoutError:
            log.warning("process %d of the data plane is not ready after %g s", index, READY_S)
        finally:
            os.close(ready)
        return child


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Until one of them is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
