"""Read tables from a file or the control plane, and send reports to either.

A bad table is logged and changes nothing. While the control plane is away, the last table stays in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.serving.leader_client import LeaderClient
from shoal.serving.proxy.local_reply import Freshness
from shoal.serving.table import ServingReport, ServingTable

log = logging.getLogger(__name__)

FILE_EVERY_S = 0.25
URL_EVERY_S = 1.0
PROMPT_S = 0.05
REPORT_EVERY_S = 1.0


class TableSource(Protocol):
    every_s: float

    async def read(self, current: str) -> bytes | None:
        """Return the table as JSON, or None if `current` is the newest. `OSError`: the source does not
        answer.
        """
        ...

    async def keep(self, table: bytes) -> None:
        """Keep a table that the data plane has taken, for its next start. `OSError`: it was not written."""
        ...


class TableConsumer(Protocol):
    """The part of a data plane that takes tables."""

    version: int
    freshness: Freshness

    def swap(self, table: ServingTable) -> bool:
        """Use this table as a whole. False: the one in use is as new. `ValueError`: the one in use stays."""
        ...


class FileSource:
    """A table in a file. To change it, rename another file over it."""

    every_s = FILE_EVERY_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def read(self, current: str) -> bytes | None:
        stat = self._path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        return self._path.read_bytes()

    async def keep(self, table: bytes) -> None:
        """Do nothing: the file itself stays."""


class LeaderSource:
    """Sends the current version as an entity tag; 304 means that there is no newer table.

    Every table that the data plane has taken is written to `cache`, so that it starts without a control
    plane. A table that was refused must not replace the last good one there.
    """

    def __init__(self, server: LeaderClient, where: str, cache: Path | None) -> None:
        self._server = server
        self._where = where
        self._cache = cache
        # A reply that waits for news is followed by the next request at once, or later news would be late.
        self.every_s = PROMPT_S if "wait_s=" in where else URL_EVERY_S

    def cached_table(self) -> bytes | None:
        try:
            return self._cache.read_bytes() if self._cache is not None else None
        except FileNotFoundError:
            return None

    async def read(self, current: str) -> bytes | None:
        headers = {"if-none-match": f'"{current}"'}
        status, body = await asyncio.to_thread(self._server.request, "GET", self._where, headers=headers)
        if status == 304:
            return None
        if status != 200:
            raise OSError(f"{self._where} answers {status}")
        return body

    async def keep(self, table: bytes) -> None:
        if self._cache is not None:
            await asyncio.to_thread(write_whole, self._cache, table)


class TableFeed:
    def __init__(self, source: TableSource, plane: TableConsumer) -> None:
        self._source = source
        self._plane = plane
        self._epoch = ""
        self._last_error = ""
        self._is_well = True
        self.on_new_table: Callable[[], None] | None = None
        """Called whenever another table comes into use."""

    async def read(self) -> None:
        """Take the table if there is a newer one. Idempotent."""
        try:
            version = self._plane.version
            raw = await self._source.read(f"{self._epoch}-{version}" if self._epoch else str(version))
            if raw is not None:
                self.take(raw)
            self._plane.freshness.confirm()
            if raw is not None:
                await self._source.keep(raw)
            self._last_error = ""
            self._is_well = True
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            self._is_well = False
            if str(error) != self._last_error:
                self._last_error = str(error)
                log.warning("no new table, version %d stays: %s", self._plane.version, error)

    def take(self, raw: bytes) -> None:
        """Use the table. `ValueError`: it is not a table, or an older one; the one in use stays."""
        table = msgspec.json.decode(raw, type=ServingTable)
        if not self._plane.swap(table) and table.version < self._plane.version:
            raise ValueError(f"version {table.version} is older")
        self._epoch = table.epoch
        if self.on_new_table is not None:
            self.on_new_table()

    async def keep_reading(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(self._source.every_s if self._is_well else URL_EVERY_S)
            await self.read()


class ServingReporter:
    """Sends this process's report to the control plane, or writes it to a file."""

    def __init__(self, report: Callable[[], ServingReport], server: LeaderClient, where: str | Path) -> None:
        self._report = report
        self._server = server
        self._where = where
        self._is_due = asyncio.Event()

    def send_soon(self) -> None:
        """Send at once, because the control plane waits to hear which table is in use."""
        self._is_due.set()

    async def send(self, *, is_last: bool = False) -> None:
        """Send one report. A report that does not arrive is followed by a newer one."""
        try:
            body = msgspec.json.encode(msgspec.structs.replace(self._report(), is_last=is_last))
            if isinstance(self._where, Path):
                await asyncio.to_thread(write_whole, self._where, body)
            else:
                await asyncio.to_thread(self._server.request, "POST", self._where, body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.debug("report not delivered: %s", error)

    async def keep_sending(self) -> None:
        """Run until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), REPORT_EVERY_S)
            self._is_due.clear()
            await self.send()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that readers see it before or after, never half. Mode 0600, because tables hold
    secrets.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
