"""HAProxy as a child of this process: start it, give it tables, read its counters, restart it when it dies.

This process owns the listening socket and HAProxy inherits it, so callers wait while no HAProxy accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from shoal.clock import SystemClock
from shoal.serving.haproxy import runtime_api
from shoal.serving.haproxy.config_files import SOCKET, HaproxyFiles
from shoal.serving.haproxy.render import CALLERS, FRESH, HaproxyConfig, HaproxySettings, render
from shoal.serving.haproxy.runtime_api import HaproxyMaster
from shoal.serving.haproxy.statistics import StatTotals, parse_stat
from shoal.serving.haproxy.validation import ignored_settings, resolve_addresses, supported_table
from shoal.serving.proxy.local_reply import Freshness
from shoal.serving.table import ReplicaConfig, ServingReport, ServingTable

log = logging.getLogger(__name__)

START_S = 30.0
AGAIN_S = 1.0
"""Between HAProxy's death and the next start."""
LAST_IDLE_S = 2.0
"""How long idle connections stay open at the end, because a request may be on its way."""
TLS_EVERY_S = 10.0
HEALTH_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded before a child process uses it


class HaproxyPlane:
    """`swap` blocks while HAProxy reloads. Nothing else in this process is urgent."""

    def __init__(self, files: HaproxyFiles) -> None:
        self.process_id = os.urandom(8).hex()
        self.version = 0
        self.epoch = ""
        self._files = files
        self._master = HaproxyMaster(files.folder / SOCKET)
        self._process: Process | None = None
        self._rendering = render(ServingTable(version=0), files.settings)
        self._leaving: set[str] = set()
        """Servers that get no new requests and are not deleted yet, as `backend/name`."""
        self._replicas: dict[str, ReplicaConfig] = {}
        """By server, for every table that some worker may still know."""
        self._sums = StatTotals()
        self._warned: set[str] = set()
        self.freshness = Freshness(SystemClock())
        self._fresh_workers: frozenset[int] = frozenset()
        """Workers that answer that the data plane is healthy."""

    def swap(self, table: ServingTable) -> bool:
        """Use this table, except what HAProxy does not support. Return False if the one in use is as new.

        `ValueError`: HAProxy cannot serve it, and continues as before. `OSError`: HAProxy runs and does not
        answer; the table is not taken, and may be given again.
        """
        if table.epoch == self.epoch and table.version <= self.version:
            return False
        table, left_out = supported_table(resolve_addresses(table))
        after, before = render(table, self._files.settings), self._rendering
        is_reload = runtime_api.needs_reload(before, after, self._leaving)
        try:
            if is_reload:
                self._files.check(after)
            self._files.write(after)
            if self._process is not None:
                self._apply(before, after, is_reload=is_reload)
        except OSError as error:
            if self._process is not None and self._process.returncode is None:
                raise  # HAProxy serves on and may know half of the table: the same table is tried again
            # HAProxy has died. The next one reads the files as written.
            log.warning("HAProxy does not answer: %s", error)
        except ValueError:
            self._files.write(before)
            raise
        self._rendering = after
        self._replicas |= {
            name: server.replica for name, server in runtime_api.servers_by_name(after).items()
        }
        self.version, self.epoch = table.version, table.epoch
        self._warn(table, left_out)
        return True

    def _warn(self, table: ServingTable, left_out: list[str]) -> None:
        sentences = {f"left out: {sentence}" for sentence in left_out}
        sentences |= {
            f"`{service.project}/{service.name}` asks for {setting}"
            for service in table.services
            for setting in ignored_settings(service)
        }
        for sentence in sorted(sentences - self._warned):
            log.warning("HAProxy does not support all of the table: %s", sentence)
        self._warned = sentences

    # Commands to a running HAProxy.

    def _apply(self, before: HaproxyConfig, after: HaproxyConfig, *, is_reload: bool) -> None:
        self._update_callers(before, after)
        if is_reload or not self._update_servers(before, after):
            try:
                self._reload()
            except ValueError:
                self._update_callers(after, before)
                raise

    def _update_callers(self, before: HaproxyConfig, after: HaproxyConfig) -> None:
        """Change the callers in every worker. Old workers get a last request on connections that
        were idle.
        """
        pids = self._master.processes().all
        for command in runtime_api.caller_commands(before.callers, after.callers):
            for pid in pids:
                self._master.send_to_worker(pid, command)

    def _update_servers(self, before: HaproxyConfig, after: HaproxyConfig) -> bool:
        """Change the servers. Return False if HAProxy refuses and must be reloaded."""
        gone = runtime_api.removed_servers(before, after)
        self._leaving |= set(gone)
        commands = [*runtime_api.add_commands(before, after), *runtime_api.weight_commands(before, after)]
        commands += [f"set server {name} state maint" for name in gone]
        for pid in self._master.processes().current:
            for command in commands:
                answer = self._master.send_to_worker(pid, command)
                if answer and "registered" not in answer:
                    # The command is not logged, because the server's name in it is a secret.
                    log.warning("HAProxy refused a change of servers and is reloaded: %s", answer)
                    return False
        return True

    def _reload(self) -> None:
        """Reload. `ValueError`: HAProxy refuses, and continues as before."""
        if not self._master.reload():
            raise ValueError("HAProxy did not start with a configuration that it had found valid")
        self._leaving.clear()

    def renew(self) -> None:
        """Read the certificate again and reload. If it is no good, the previous one stays."""
        try:
            self._files.check(self._rendering, is_renewal=True)
            self._reload()
        except (OSError, ValueError) as error:
            log.warning("HAProxy keeps its certificate and configuration: %s", error)

    # Counters.

    def report(self) -> ServingReport:
        """Return the report. `OSError`: HAProxy does not answer."""
        workers = self._master.processes()
        for name in list(self._leaving):
            answers = [self._master.send_to_worker(pid, f"del server {name}") for pid in workers.current]
            if not any("still" in answer for answer in answers):
                self._leaving.discard(name)
        rows = {pid: parse_stat(self._master.send_to_worker(pid, "show stat")) for pid in workers.all}
        empty = {name for name, servers in self._rendering.servers.items() if not servers}
        self._sums.take(rows, self._replicas, empty)
        names = self._sums.server_names | runtime_api.servers_by_name(self._rendering).keys()
        self._replicas = {name: replica for name, replica in self._replicas.items() if name in names}
        serving_report = self._sums.report(self.process_id, self.version, self._replicas)
        return msgspec.structs.replace(serving_report, epoch=self.epoch)

    # Life of the process.

    async def start(self) -> None:
        """Start HAProxy, and return when it serves. `OSError`: it does not. `ValueError`: its
        files are bad.
        """
        if self._process is None:
            self._files.check(self._rendering)
            self._files.write(self._rendering)
        self._leaving.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            *self._files.command,
            cwd=self._files.folder,
            pass_fds=(self._files.settings.listener,),
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
        """Run until cancelled."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            log.warning("HAProxy ended with %d; it is started again", code)
            await asyncio.sleep(AGAIN_S)
            try:
                await self.start()
            except OSError as error:
                log.warning("%s", error)

    async def keep_sending_health(self) -> None:
        """Run until cancelled. Every worker learns within a second whether its table is stale."""
        while True:
            try:
                self._send_health()
            except OSError as error:
                log.warning("HAProxy does not answer: %s", error)
            await asyncio.sleep(HEALTH_EVERY_S)

    def _send_health(self) -> None:
        workers = frozenset(self._master.processes().all)
        fresh = frozenset() if self.freshness.is_stale else workers
        informed = self._fresh_workers & workers
        for pid in fresh - informed:
            self._master.send_to_worker(pid, f"add map {CALLERS} {FRESH} yes")
        for pid in informed - fresh:
            self._master.send_to_worker(pid, f"del map {CALLERS} {FRESH}")
        self._fresh_workers = fresh

    async def keep_fresh(self) -> None:
        """Run until cancelled. Reload when the certificate changes."""
        seen = self._files.stamp()
        while True:
            await asyncio.sleep(TLS_EVERY_S)
            stamp = self._files.stamp()
            if stamp != seen:
                seen = stamp
                self.renew()

    async def drain(self, within_s: float) -> None:
        """Accept nothing new, finish open requests, then end. After `within_s`, the rest is cut off."""
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
        """Wait until no worker accepts. Then close the socket for all, because the master has it as well."""
        while not ended.done() and not self._master.has_stopped():
            await asyncio.wait([ended], timeout=0.02)
        with socket.socket(fileno=os.dup(self._files.settings.listener)) as listener:
            listener.shutdown(socket.SHUT_RDWR)

    def _is_busy(self) -> bool:
        try:
            serving_report = self.report()
        except OSError:
            return False
        return any(count.in_flight or count.queued for count in serving_report.counts)


def _dies_with_its_parent() -> None:
    """End HAProxy as soon as this process ends, however it ends, so that the next one gets the port."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


SPARE_FILES = 200
"""Descriptors besides two for each connection: idle connections to servers, checks, HAProxy's own."""
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where Debian installs HAProxy. Few users have these folders in their PATH."""


def find_haproxy(program: str = "haproxy") -> str | None:
    """Return the program's path, or None."""
    return shutil.which(program) or shutil.which(program, path=SYSTEM_PATH)


@contextlib.asynccontextmanager
async def open_haproxy_plane(
    program: str,
    listener: socket.socket,
    *,
    tls: tuple[Path, Path] | None = None,
    num_threads: int = 0,
    max_connections: int = 10_000,
) -> AsyncIterator[HaproxyPlane]:
    """Make a data plane that is not started yet, with a temporary folder of its own."""
    settings = HaproxySettings(
        listener=listener.fileno(),
        max_connections=min(max_connections, _max_connections()),
        num_threads=num_threads,
        has_tls=tls is not None,
    )
    with tempfile.TemporaryDirectory(prefix="shoal-haproxy-") as folder:
        yield HaproxyPlane(HaproxyFiles(program, Path(folder), settings, tls))


def _max_connections() -> int:
    """Return the number of caller connections for which this process and its children may open
    enough files.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = os.sysconf("SC_OPEN_MAX")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(100, (hard - SPARE_FILES) // 2)
