"""HAProxy as a child of this process: started, told of tables, counted, started again when it dies.

The listening socket is ours and inherited, so that callers wait while there is nobody to accept.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.serving.feed import write_whole
from shoal.serving.haproxy import changes
from shoal.serving.haproxy.master import Master
from shoal.serving.haproxy.render import CALLERS, TLS, Place, Rendering, as_map, render
from shoal.serving.haproxy.statistics import Sums, parse_stat
from shoal.serving.haproxy.words import beyond
from shoal.serving.table import Replica, Report, Table

log = logging.getLogger(__name__)

START_S = 30.0
AGAIN_S = 1.0
"""Between its death and the next start."""
LAST_IDLE_S = 2.0
"""A connection without a request is kept for so long when everything stops: one may be on its way."""
TLS_EVERY_S = 10.0
PR_SET_PDEATHSIG = 1
CONFIG = "haproxy.cfg"
CANDIDATE = "next.cfg"
SOCKET = "master.sock"


class HaproxyPlane:
    """`folder` is for its files alone, and for nobody else to read. `swap` blocks while HAProxy reloads."""

    def __init__(
        self, program: str, folder: Path, place: Place, tls: tuple[Path, Path] | None = None
    ) -> None:
        self.process_id = os.urandom(8).hex()
        self.version = 0
        self._program = program
        self._folder = folder
        self._place = place
        self._tls = tls
        self._master = Master(folder / SOCKET)
        self._process: Process | None = None
        self._rendering = render(Table(version=0), place)
        self._leaving: dict[str, Replica] = {}
        """Servers that are taken out and may have requests yet, as `backend/name`."""
        self._sums = Sums()
        self._warned: set[str] = set()

    def swap(self, table: Table) -> bool:
        """From now on this table, whole. False: the one in use is as new.

        `ValueError`: HAProxy cannot serve it; what it serves is what it served.
        """
        if table.version <= self.version:
            return False
        after, before = render(_resolved(table), self._place), self._rendering
        is_reload = changes.needs_reload(before, after, self._leaving)
        if is_reload:
            self._check(after)
        self._keep(after)
        if self._process is not None:
            try:
                self._tell(before, after, is_reload=is_reload)
            except OSError as error:  # it is dying; the next one reads what was written
                log.warning("HAProxy does not answer: %s", error)
            except ValueError:
                self._keep(before)
                self._say_all(changes.called(after.callers, before.callers))
                raise
        self._rendering = after
        self.version = table.version
        self._warn(table)
        return True

    def _warn(self, table: Table) -> None:
        told = {
            f"`{service.project}/{service.name}` asks for {what}"
            for service in table.services
            for what in beyond(service)
        }
        for sentence in sorted(told - self._warned):
            log.warning("HAProxy does not do all of it: %s", sentence)
        self._warned = told

    def _check(self, rendering: Rendering) -> None:
        """`ValueError`: HAProxy would not start with it."""
        if not (self._folder / CALLERS).exists():
            self._write(CALLERS, "")
        for name, text in rendering.routes.items():
            self._write(name, text)
        if self._tls is not None:
            self._write(TLS, "\n".join(file.read_text() for file in self._tls))
        self._write(CANDIDATE, rendering.config)
        done = subprocess.run(
            [self._program, "-c", "-f", CANDIDATE],
            cwd=self._folder,
            pass_fds=(self._place.listener,),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(f"HAProxy refuses its configuration: {done.stderr.strip()[-1000:]}")

    def _keep(self, rendering: Rendering) -> None:
        """For the next start, or reload."""
        self._write(CALLERS, as_map(rendering.callers))
        self._write(CONFIG, rendering.config)

    def _write(self, name: str, text: str) -> None:
        write_whole(self._folder / name, text.encode())

    # To a running one.

    def _tell(self, before: Rendering, after: Rendering, *, is_reload: bool) -> None:
        self._say_all(changes.called(before.callers, after.callers))
        self._say_all(changes.weighed(before, after))
        gone = changes.removed(before, after)
        if is_reload or not self._add(before, after):
            self._reload()
            self._leaving = {}
        known = changes.flat(before)
        for name in gone:
            self._leaving[name] = known[name].replica
            self._say_all([f"set server {name} state maint"])
        self.tidy()

    def _say_all(self, commands: Iterable[str]) -> None:
        """To every worker: old ones may get requests yet, on connections that were idle."""
        pids = self._master.processes().all
        for command in commands:
            for pid in pids:
                self._master.tell(pid, command)

    def _add(self, before: Rendering, after: Rendering) -> bool:
        seen = self._master.processes()
        for command in changes.added(before, after):
            for pid in seen.all:
                answer = self._master.tell(pid, command)
                if pid in seen.current and answer and "registered" not in answer:
                    # Not the command: the server's name in it is a secret.
                    log.warning("HAProxy takes no new server, and is reloaded: %s", answer)
                    return False
        return True

    def _reload(self) -> None:
        """`ValueError`: it would not, and goes on as before."""
        if not self._master.reload():
            raise ValueError("HAProxy did not start with a configuration that it had found valid")

    def tidy(self) -> None:
        """Delete servers that have finished what they had. May be repeated."""
        pids = self._master.processes().all if self._leaving else ()
        for name in list(self._leaving):
            answers = [self._master.tell(pid, f"del server {name}") for pid in pids]
            if not any("still" in answer for answer in answers):
                del self._leaving[name]

    def renew(self) -> None:
        """Read the certificate again, and reload; if it is no good, the one before stays."""
        if self._process is None:
            return
        try:
            self._check(self._rendering)
            self._reload()
        except (OSError, ValueError) as error:
            log.warning("HAProxy goes on as it is: %s", error)

    # What it counts.

    def report(self) -> Report:
        """`OSError`: it does not say."""
        self.tidy()
        replicas = {name: server.replica for name, server in changes.flat(self._rendering).items()}
        replicas |= self._leaving
        rows = {pid: parse_stat(self._master.tell(pid, "show stat")) for pid in self._master.processes().all}
        self._sums.take(rows, replicas)
        return self._sums.report(self.process_id, self.version, replicas)

    # Its life.

    async def start(self) -> None:
        """Returns when it serves. `OSError`: it does not."""
        if not (self._folder / CONFIG).exists():
            self._check(self._rendering)
            self._keep(self._rendering)
        self._process = await asyncio.create_subprocess_exec(
            *(self._program, "-W", "-q", "-S", f"unix@{SOCKET},mode,600", "-f", CONFIG),
            cwd=self._folder,
            pass_fds=(self._place.listener,),
            preexec_fn=_dies_with_its_parent,
        )
        deadline = time.monotonic() + START_S
        while not self._master.is_serving():
            if self._process.returncode is not None or time.monotonic() > deadline:
                raise OSError("HAProxy did not start; see its log")
            await asyncio.sleep(0.02)

    async def keep_running(self) -> None:
        """Until cancelled."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.warning("HAProxy ended with %d; it is started again", code)
            await asyncio.sleep(AGAIN_S)
            self._leaving = {}
            try:
                await self.start()
            except OSError as error:
                log.warning("%s", error)

    async def keep_fresh(self) -> None:
        """Until cancelled: a certificate that was renewed is taken."""
        seen = self._stamp()
        while True:
            await asyncio.sleep(TLS_EVERY_S)
            stamp = self._stamp()
            if stamp != seen:
                seen = stamp
                self.renew()

    def _stamp(self) -> tuple[int, ...]:
        try:
            return tuple(file.stat().st_mtime_ns for file in self._tls or ())
        except OSError:
            return ()

    async def drain(self, within_s: float) -> None:
        """Take nothing new, finish what is there, then end. After `within_s`, what is left is cut off."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        ended = asyncio.ensure_future(process.wait())
        process.send_signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(within_s):
                await self._until_closed(ended)
                await asyncio.sleep(min(LAST_IDLE_S, within_s / 2))
                while not ended.done() and self._is_busy():
                    await asyncio.wait([ended], timeout=0.1)
        except TimeoutError:
            log.warning("requests were cut off after %g s", within_s)
        if not ended.done():
            process.terminate()
        await ended

    async def _until_closed(self, ended: asyncio.Future[int]) -> None:
        """Until no worker accepts. The socket is then closed for all: the master has it, too."""
        while not ended.done() and not self._master.has_stopped():
            await asyncio.wait([ended], timeout=0.02)
        with socket.socket(fileno=os.dup(self._place.listener)) as listener:
            listener.shutdown(socket.SHUT_RDWR)

    def _is_busy(self) -> bool:
        try:
            told = self.report()
        except OSError:
            return False
        return any(count.in_flight or count.queued for count in told.counts)


def _dies_with_its_parent() -> None:
    """At once, however that one ends: whoever is started next has the port."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _resolved(table: Table) -> Table:
    """With addresses instead of names: HAProxy takes no name for a server that is added while it runs."""
    return msgspec.structs.replace(
        table,
        services=tuple(
            msgspec.structs.replace(
                service,
                replicas=tuple(
                    msgspec.structs.replace(replica, address=_address(replica.address))
                    for replica in service.replicas
                ),
            )
            for service in table.services
        ),
    )


def _address(told: str) -> str:
    host, _, port = told.rpartition(":")
    if told.startswith(("unix:", "[")) or not port.isdigit() or host.replace(".", "").isdigit():
        return told
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"the replica's address `{told}` cannot be found: {error}") from None
    name = str(found[4][0])
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
