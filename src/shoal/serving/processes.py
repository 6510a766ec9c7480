"""Worker processes on one port, replaced without a lost connection, and the limit on file descriptors.

The parent holds the listening sockets while the port is served, so a worker that stops leaves connections
that it has not accepted to its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

RESERVED = 128
"""Descriptors for listeners, the feed, checks, reports and operators."""
NO_LIMIT = 1 << 30
LOCAL_ERRORS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.EADDRNOTAVAIL,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EAGAIN,  # a Unix socket with a full backlog: a process listens there
    }
)


def is_local_error(error: Exception) -> bool:
    """Return whether a connection failed for a reason on this side that says nothing against the replica."""
    return isinstance(error, OSError) and error.errno in LOCAL_ERRORS


def raise_limit(most: int = NO_LIMIT) -> int:
    """Raise this process's descriptor limit to as many as allowed, up to `most`, and return it. A limit that
    is higher already stays. Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return NO_LIMIT if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def max_clients_within(descriptors: int, wanted: int) -> int:
    """Return how many caller connections to accept. Each may need a second descriptor, to a replica."""
    return max(1, min(wanted, (descriptors - RESERVED) // 2))


log = logging.getLogger(__name__)

READY_S = 30.0
STEADY_S = 10.0
AGAIN_S = 1.0
"""The pause before a worker is restarted if it lived for less than `STEADY_S`."""
DYING_S = 0.1


class WorkerProcess:
    """A worker. Its pipe carries a byte once it accepts connections, and closes when it stops accepting."""

    def __init__(self, process: Process, pipe: int, link: socket.socket) -> None:
        self.process = process
        self.link = link
        """Carries usage messages between this worker and the others."""
        self.began = monotonic()
        self.has_served = False
        self.is_ready = asyncio.Event()
        """Set when the worker accepts connections, or is gone."""
        self.has_left = asyncio.Event()
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._on_pipe)

    def _on_pipe(self) -> None:
        if os.read(self._pipe, 1):
            self.has_served = True
        else:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self.has_left.set()
        self.is_ready.set()

    async def is_dead(self) -> bool:
        """Return whether a worker that stopped accepting is gone. If not, it still finishes its requests."""
        try:
            await asyncio.wait_for(self.process.wait(), DYING_S)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ask the worker to stop, and wait until it is gone."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()


class WorkerProcesses:
    """`arguments` makes a worker's command line from its index and three descriptors: its listener, the pipe
    that reports it ready, and the link to the other workers.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], arguments: Callable[[int, int, int, int], list[str]]
    ) -> None:
        self._listeners = listeners
        self._arguments = arguments
        self._stopped = asyncio.Event()
        self._reload = asyncio.Event()
        self._reload_count = 0
        self._children: set[WorkerProcess] = set()
        """Workers that serve, and workers that finish their last requests."""

    def reload(self) -> None:
        """Replace every worker started before now. A worker stays if its successor cannot serve."""
        self._reload_count += 1
        self._reload.set()
        self._reload = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Run until SIGTERM or SIGINT; SIGHUP replaces the workers. Calls `ready` once all of them serve."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        children = await asyncio.gather(*map(self._start, range(len(self._listeners))))
        ready()
        async with asyncio.TaskGroup() as group:
            for index, child in enumerate(children):
                group.create_task(self._keep_worker(group, index, child))

    async def _keep_worker(self, group: asyncio.TaskGroup, index: int, child: WorkerProcess) -> None:
        """Keep one worker on this socket. A worker that stops may take its time, because the next one
        serves.
        """
        reload_count = 0
        while True:
            if reload_count == self._reload_count and not child.has_left.is_set():
                await _first_of(child.has_left.wait(), self._stopped.wait(), self._reload.wait())
            if self._stopped.is_set():
                break
            if child.has_left.is_set() and await child.is_dead():
                log.warning("process %d of the data plane ended with %d", index, child.process.returncode)
                await asyncio.sleep(AGAIN_S if monotonic() - child.began < STEADY_S else 0.0)
            reload_count = self._reload_count
            successor = await self._start(index)
            if successor.has_served or child.has_left.is_set():
                child, successor = successor, child
            else:
                message = "process %d stays, its successor cannot serve: see above why, then `kill -HUP %d`"
                log.error(message, index, os.getpid())
            group.create_task(self._stop_worker(successor))
        self._listeners[index].close()  # or callers would wait in a backlog that no process accepts from
        await self._stop_worker(child)

    async def _stop_worker(self, child: WorkerProcess) -> None:
        await child.stop()
        self._children.discard(child)
        asyncio.get_running_loop().remove_reader(child.link)
        child.link.close()

    def _relay_datagram(self, child: WorkerProcess) -> None:
        """Pass one worker's message to all others. A worker that misses it receives a later one."""
        with contextlib.suppress(OSError):
            datagram = child.link.recv(1 << 20)
            for other in self._children - {child}:
                with contextlib.suppress(OSError):
                    other.link.send(datagram)

    async def _start(self, index: int) -> WorkerProcess:
        """Start a worker, and return when it accepts connections or is gone."""
        listener = self._listeners[index].fileno()
        ready, ready_writer = os.pipe()
        link, worker_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        link.setblocking(False)  # noqa: FBT003 - the standard library's own
        inherited = (listener, ready_writer, worker_link.fileno())
        command = [sys.executable, "-m", "shoal.serving", *self._arguments(index, *inherited)]
        try:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=inherited)
        finally:
            os.close(ready_writer)
            worker_link.close()
        child = WorkerProcess(process, ready, link)
        self._children.add(child)
        asyncio.get_running_loop().add_reader(link, self._relay_datagram, child)
        try:
            await asyncio.wait_for(child.is_ready.wait(), READY_S)
        except TimeoutError:
            log.warning("process %d of the data plane is not ready after %g s", index, READY_S)
        return child


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when one of them is done."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
