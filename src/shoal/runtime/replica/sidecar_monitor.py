"""The supervisor's part of a sidecar: holds its socket, and keeps a process running that serves it."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import urllib.parse

from shoal.clock import Clock
from shoal.runtime.process import network
from shoal.runtime.process.launcher import Pipes
from shoal.runtime.process.network import hold_port
from shoal.runtime.process.watcher import Process, Watcher
from shoal.runtime.replica.sidecar_config import LISTENER_FD, SidecarConfig, memory_file
from shoal.wire import TlsIdentity

FIRST_PORT, NUM_PORTS = 19_000, 1_000
"""Ports of sidecars, apart from those of servers, which may listen at every address of the node."""
BACKLOG = 1024
AGAIN_S = 1.0
LOW = 10
"""The copies get numbers above those that the child needs."""


class SidecarMonitor:
    """One sidecar, at an address of this node that the control plane's machine can reach.

    `OSError`: there is no such address, or no port is free. Main thread only: a process dies with its thread.
    """

    def __init__(
        self, tls_identity: TlsIdentity, control_url: str, server: str, watcher: Watcher, clock: Clock
    ) -> None:
        towards = urllib.parse.urlsplit(control_url).hostname or ""
        own_address = network.own_address(towards)
        if own_address is None:
            raise OSError(f"there is no way from here to `{towards}`, where data planes are")
        self._listener = hold_port(own_address, None, range(FIRST_PORT, FIRST_PORT + NUM_PORTS))
        self._listener.listen(BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self.address = (
            f"tls:[{own_address}]:{self.port}" if ":" in own_address else f"tls:{own_address}:{self.port}"
        )
        self._config = SidecarConfig(tls_identity=tls_identity, server=server, supervisor_pid=os.getpid())
        self._watcher = watcher
        self._clock = clock
        self._process: Process | None = None
        self._not_before = 0.0

    def check(self) -> None:
        """Start the sidecar again if it ended. New connections wait meanwhile, and open ones are lost."""
        is_there = self._process is not None and self._process.status is None
        if not is_there and self._clock.monotonic() >= self._not_before:
            self._not_before = self._clock.monotonic() + AGAIN_S
            try:
                self._process = self._start()
            except OSError as error:  # no free descriptors or processes: the replica is well, so try again
                sys.stderr.write(f"the sidecar could not be started, and is tried again: {error}\n")

    def _start(self) -> Process:
        stdout, stdout_w = os.pipe()
        stderr, stderr_w = os.pipe()
        opened = [stdout_w, stderr_w]
        try:
            opened.append(config_fd := memory_file(self._config))
            handed = [
                fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOW)
                for fd in (config_fd, stdout_w, stderr_w, self._listener.fileno())
            ]
            opened += handed
            targets = (0, 1, 2, LISTENER_FD)
            pid = os.posix_spawn(
                sys.executable,
                # `-P` keeps modules of the current directory out.
                [sys.executable, "-P", "-s", "-m", "shoal.runtime.replica.sidecar"],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(handed, targets, strict=True)
                ],
                setsid=True,
                # A cluster that ends a job signals all of its processes. The last replies still pass here.
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
