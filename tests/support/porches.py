"""A porch as a process of its own before a server of the test's, and those who come to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator

from shoal.clock import SystemClock
from shoal.control.services.porches import Porches
from shoal.identity.authority import Pair, make_authority, make_server
from shoal.porch import name_of, visitor
from shoal.runtime.porch.brief import LISTENER, Brief, in_memory
from shoal.runtime.porch.process import Porch
from shoal.wire import Papers

ATTEMPT, OTHER = "att_000one", "att_000two"
PATIENCE_S = 30.0


def papers_of(pair: Pair, authority: Pair) -> Papers:
    return Papers(
        certificate=pair.certificate.decode(), key=pair.key.decode(), authority=authority.certificate.decode()
    )


class Cluster:
    """An authority, and what it certifies."""

    def __init__(self) -> None:
        self.authority = make_authority("a test's", time.time())
        self.porches = Porches(self.authority, SystemClock())

    def control_plane(self) -> Papers:
        """What a control plane shows to nodes."""
        return papers_of(make_server(self.authority, ["localhost"], time.time()), self.authority)

    def visitor(self) -> ssl.SSLContext:
        return visitor(self.porches.visitors())


@contextlib.contextmanager
def a_porch(cluster: Cluster, server: str, attempt_id: str = ATTEMPT) -> Iterator[str]:
    """Where it is, as data planes are told."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        brief = Brief(papers=cluster.porches.before(attempt_id), server=server, supervisor=os.getpid())
        told = in_memory(brief)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "shoal.runtime.porch"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, told, 0),  # first: it may be the number that the next one takes
                (os.POSIX_SPAWN_DUP2, listener.fileno(), LISTENER + 100),
                (os.POSIX_SPAWN_DUP2, LISTENER + 100, LISTENER),
            ],
        )
        os.close(told)
    try:
        yield f"tls:127.0.0.1:{port}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class ThreadPorches:
    """Porches in threads of this process, for replicas in this process."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._made = 0
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def before(self, server: str) -> tuple[str, str]:
        """Where a new one is, and what its certificate says."""
        self._made += 1
        attempt_id = f"att_{self._made}"
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        brief = Brief(papers=self.cluster.porches.before(attempt_id), server=server, supervisor=0)
        porch = Porch(listener, brief, SystemClock(), max_passages=1000)
        thread = threading.Thread(target=self._run, args=(porch, listener), daemon=True)
        thread.start()
        self._threads.append(thread)
        return f"tls:127.0.0.1:{listener.getsockname()[1]}", name_of(attempt_id)

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def _run(self, porch: Porch, listener: socket.socket) -> None:
        while not self._is_over:
            porch.turn(0.05)
        porch.close()
        listener.close()


def connected(address: str, context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    """Blocking. Nothing was read yet."""
    host, _, port = address.removeprefix("tls:").rpartition(":")
    link = socket.create_connection((host, int(port)), PATIENCE_S)
    return context.wrap_socket(link, server_hostname=name, suppress_ragged_eofs=False)


def all_of(link: socket.socket) -> bytes:
    """What comes until the end."""
    told = b""
    with contextlib.suppress(ssl.SSLZeroReturnError):  # an end, where ours was told before
        while piece := link.recv(1 << 16):
            told += piece
    return told
