"""The supervisor's part of a porch: holds the socket, and sees that a process serves it."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import urllib.parse

from shoal.clock import Clock
from shoal.runtime import network
from shoal.runtime.launch import Pipes
from shoal.runtime.porch.brief import LISTENER, Brief, in_memory
from shoal.runtime.ports import hold_port
from shoal.runtime.watch import Process, Watcher
from shoal.wire import Papers

FIRST, COUNT = 19_000, 1_000
"""Ports of porches: apart from those of servers, which may listen at every address of the node."""
BACKLOG = 1024
AGAIN_S = 1.0
LOW = 10
"""Above the numbers that the child is to have."""


class PorchMinder:
    """One porch, from birth on at an address of this node that the control plane's machine can reach.

    `OSError`: there is no such address, or no port is free. Main thread only: a process dies with its thread.
    """

    def __init__(self, papers: Papers, control_url: str, server: str, watcher: Watcher, clock: Clock) -> None:
        towards = urllib.parse.urlsplit(control_url).hostname or ""
        own = network.own_address(towards)
        if own is None:
            raise OSError(f"there is no way from here to `{towards}`, where data planes are")
        self._listener = hold_port(own, None, range(FIRST, FIRST + COUNT))
        self._listener.listen(BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self.address = f"tls:[{own}]:{self.port}" if ":" in own else f"tls:{own}:{self.port}"
        self._brief = Brief(papers=papers, server=server, supervisor=os.getpid())
        self._watcher = watcher
        self._clock = clock
        self._process: Process | None = None
        self._not_before = 0.0

    def look(self) -> None:
        """See that it runs. Connections wait meanwhile; those that it had are lost with it."""
        is_there = self._process is not None and self._process.status is None
        if not is_there and self._clock.monotonic() >= self._not_before:
            self._not_before = self._clock.monotonic() + AGAIN_S
            try:
                self._process = self._start()
            except OSError as error:  # no descriptors, no processes: the replica is well, and it may pass
                sys.stderr.write(f"the porch could not be started, and is tried again: {error}\n")

    def _start(self) -> Process:
        stdout, stdout_w = os.pipe()
        stderr, stderr_w = os.pipe()
        opened = [stdout_w, stderr_w]
        try:
            opened.append(told := in_memory(self._brief))
            handed = [
                fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOW)
                for fd in (told, stdout_w, stderr_w, self._listener.fileno())
            ]
            opened += handed
            targets = (0, 1, 2, LISTENER)
            pid = os.posix_spawn(
                sys.executable,
                # This very code, whatever the current directory holds.
                [sys.executable, "-P", "-s", "-m", "shoal.runtime.porch"],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(handed, targets, strict=True)
                ],
                setsid=True,
                # A cluster that ends a job signals all of it; the server's last words still pass here.
                setsigmask=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
            )
        except OSError:
            opened += [stdout, stderr]
            raise
        finally:
            for fd in opened:
                os.close(fd)
        process = Process(pid, None, is_needed=False)
        self._watcher.add(process, Pipes(stdout=stdout, stderr=stderr))
        return process
