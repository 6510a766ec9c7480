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
import time
from asyncio.subprocess import Process

import msgspec

from shoal.clock import SystemClock
from shoal.serving.freshness import Freshness
from shoal.serving.haproxy import changes
from shoal.serving.haproxy.addresses import resolved
from shoal.serving.haproxy.files import SOCKET, Files
from shoal.serving.haproxy.master import Master
from shoal.serving.haproxy.render import CALLERS, FRESH, Rendering, render
from shoal.serving.haproxy.statistics import Sums, parse_stat
from shoal.serving.haproxy.words import beyond, speakable
from shoal.serving.table import Replica, Report, Table

log = logging.getLogger(__name__)

START_S = 30.0
AGAIN_S = 1.0
"""Between its death and the next start."""
LAST_IDLE_S = 2.0
"""A connection without a request is kept for so long when everything stops: one may be on its way."""
TLS_EVERY_S = 10.0
HEALTH_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # before there is a child to use it


class HaproxyPlane:
    """`swap` blocks while HAProxy reloads: nothing else in this process is in a hurry."""

    def __init__(self, files: Files) -> None:
        self.process_id = os.urandom(8).hex()
        self.version = 0
        self.epoch = ""
        self._files = files
        self._master = Master(files.folder / SOCKET)
        self._process: Process | None = None
        self._rendering = render(Table(version=0), files.place)
        self._leaving: set[str] = set()
        """Servers that get nothing any more and are not deleted yet, as `backend/name`."""
        self._replicas: dict[str, Replica] = {}
        """By server, of every table that some worker may still know."""
        self._sums = Sums()
        self._warned: set[str] = set()
        self.freshness = Freshness(SystemClock())
        self._fresh_workers: frozenset[int] = frozenset()
        """Those that answer that the data plane is well."""

    def swap(self, table: Table) -> bool:
        """From now on this table, but for what HAProxy cannot be told. False: the one in use is as new.

        `ValueError`: HAProxy cannot serve it; what it serves is what it served. `OSError`: it lives and
        does not answer; the table is not taken, and may be given again.
        """
        if table.epoch == self.epoch and table.version <= self.version:
            return False
        table, found = speakable(resolved(table))
        after, before = render(table, self._files.place), self._rendering
        is_reload = changes.needs_reload(before, after, self._leaving)
        try:
            if is_reload:
                self._files.check(after)
            self._files.keep(after)
            if self._process is not None:
                self._tell(before, after, is_reload=is_reload)
        except OSError as error:
            if self._process is not None and self._process.returncode is None:
                raise  # it serves on, and may have been told half of it: the same table is tried again
            # It has died; the next one reads what was kept.
            log.warning("HAProxy does not answer: %s", error)
        except ValueError:
            self._files.keep(before)
            raise
        self._rendering = after
        self._replicas |= {name: server.replica for name, server in changes.flat(after).items()}
        self.version, self.epoch = table.version, table.epoch
        self._warn(table, found)
        return True

    def _warn(self, table: Table, left_out: list[str]) -> None:
        told = {f"left out: {sentence}" for sentence in left_out}
        told |= {
            f"`{service.project}/{service.name}` asks for {what}"
            for service in table.services
            for what in beyond(service)
        }
        for sentence in sorted(told - self._warned):
            log.warning("HAProxy does not do all of it: %s", sentence)
        self._warned = told

    # To a running one.

    def _tell(self, before: Rendering, after: Rendering, *, is_reload: bool) -> None:
        self._call(before, after)
        if is_reload or not self._change(before, after):
            try:
                self._reload()
            except ValueError:
                self._call(after, before)
                raise

    def _call(self, before: Rendering, after: Rendering) -> None:
        """In every worker: old ones get a last request on connections that were idle."""
        pids = self._master.processes().all
        for command in changes.called(before.callers, after.callers):
            for pid in pids:
                self._master.tell(pid, command)

    def _change(self, before: Rendering, after: Rendering) -> bool:
        """Its servers. False: it would not, and has to be reloaded."""
        gone = changes.removed(before, after)
        self._leaving |= set(gone)
        commands = [*changes.added(before, after), *changes.weighed(before, after)]
        commands += [f"set server {name} state maint" for name in gone]
        for pid in self._master.processes().current:
            for command in commands:
                answer = self._master.tell(pid, command)
                if answer and "registered" not in answer:
                    # Not the command: the server's name in it is a secret.
                    log.warning("HAProxy takes no change of servers, and is reloaded: %s", answer)
                    return False
        return True

    def _reload(self) -> None:
        """`ValueError`: it would not, and goes on as before."""
        if not self._master.reload():
            raise ValueError("HAProxy did not start with a configuration that it had found valid")
        self._leaving.clear()

    def renew(self) -> None:
        """Read the certificate again, and reload; if it is no good, the one before stays."""
        try:
            self._files.check(self._rendering, is_renewal=True)
            self._reload()
        except (OSError, ValueError) as error:
            log.warning("HAProxy goes on as it is: %s", error)

    # What it counts.

    def report(self) -> Report:
        """`OSError`: it does not say."""
        seen = self._master.processes()
        for name in list(self._leaving):
            answers = [self._master.tell(pid, f"del server {name}") for pid in seen.current]
            if not any("still" in answer for answer in answers):
                self._leaving.discard(name)
        rows = {pid: parse_stat(self._master.tell(pid, "show stat")) for pid in seen.all}
        empty = {name for name, servers in self._rendering.servers.items() if not servers}
        self._sums.take(rows, self._replicas, empty)
        known = self._sums.names | changes.flat(self._rendering).keys()
        self._replicas = {name: one for name, one in self._replicas.items() if name in known}
        told = self._sums.report(self.process_id, self.version, self._replicas)
        return msgspec.structs.replace(told, epoch=self.epoch)

    # Its life.

    async def start(self) -> None:
        """Returns when it serves. `OSError`: it does not. `ValueError`: it cannot, as its files are."""
        if self._process is None:
            self._files.check(self._rendering)
            self._files.keep(self._rendering)
        self._leaving.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            *self._files.command,
            cwd=self._files.folder,
            pass_fds=(self._files.place.listener,),
            preexec_fn=_dies_with_its_parent,
        )
        deadline = time.monotonic() + START_S
        while not self._master.is_serving():
            if process.returncode is not None or time.monotonic() > deadline:
                if process.returncode is None:
                    process.kill()
                raise OSError("HAProxy did not start")
            await asyncio.sleep(0.02)

    async def keep_running(self) -> None:
        """Until cancelled."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.warning("HAProxy ended with %d; it is started again", code)
            await asyncio.sleep(AGAIN_S)
            try:
                await self.start()
            except OSError as error:
                log.warning("%s", error)

    async def keep_telling_health(self) -> None:
        """Until cancelled: every worker knows within a second whether its table is stale."""
        while True:
            try:
                self._tell_health()
            except OSError as error:
                log.warning("HAProxy does not answer: %s", error)
            await asyncio.sleep(HEALTH_EVERY_S)

    def _tell_health(self) -> None:
        workers = frozenset(self._master.processes().all)
        fresh = frozenset() if self.freshness.is_stale else workers
        known = self._fresh_workers & workers
        for pid in fresh - known:
            self._master.tell(pid, f"add map {CALLERS} {FRESH} yes")
        for pid in known - fresh:
            self._master.tell(pid, f"del map {CALLERS} {FRESH}")
        self._fresh_workers = fresh

    async def keep_fresh(self) -> None:
        """Until cancelled: a certificate that was renewed is taken."""
        seen = self._files.stamp()
        while True:
            await asyncio.sleep(TLS_EVERY_S)
            stamp = self._files.stamp()
            if stamp != seen:
                seen = stamp
                self.renew()

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
        with socket.socket(fileno=os.dup(self._files.place.listener)) as listener:
            listener.shutdown(socket.SHUT_RDWR)

    def _is_busy(self) -> bool:
        try:
            told = self.report()
        except OSError:
            return False
        return any(count.in_flight or count.queued for count in told.counts)


def _dies_with_its_parent() -> None:
    """At once, however that one ends: whoever is started next has the port."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
