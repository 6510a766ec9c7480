"""Where tables come from and where reports go: a file, or the control plane's address.

Bad tables are told of and change nothing; while the control plane is away, what is known is served.
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

from shoal.serving.freshness import Freshness
from shoal.serving.server import Server
from shoal.serving.table import Report, Table

log = logging.getLogger(__name__)

FILE_EVERY_S = 0.25
URL_EVERY_S = 1.0
PROMPT_S = 0.05
REPORT_EVERY_S = 1.0


class Source(Protocol):
    every_s: float

    async def read(self, known: str) -> bytes | None:
        """The table as JSON; None if it is the `known` one. `OSError`: nobody can say."""
        ...


class Fed(Protocol):
    """A data plane, as far as tables are concerned."""

    version: int
    freshness: Freshness

    def swap(self, table: Table) -> bool:
        """From now on this table, whole. False: the one in use is as new. `ValueError`: it stays."""
        ...


class FileSource:
    """Replace the file by renaming another over it."""

    every_s = FILE_EVERY_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def read(self, known: str) -> bytes | None:
        stat = self._path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        return self._path.read_bytes()


class ServerSource:
    """Asks with what it has as an entity tag; 304 says that there is no newer one.

    Every table is also kept in `cache`, so that a data plane starts without a control plane.
    """

    def __init__(self, server: Server, where: str, cache: Path | None) -> None:
        self._server = server
        self._where = where
        self._cache = cache
        # An answer that waits for news is asked for anew at once: what comes meanwhile is known late.
        self.every_s = PROMPT_S if "wait_s=" in where else URL_EVERY_S

    def remembered(self) -> bytes | None:
        try:
            return self._cache.read_bytes() if self._cache is not None else None
        except FileNotFoundError:
            return None

    async def read(self, known: str) -> bytes | None:
        headers = {"if-none-match": f'"{known}"'}
        status, body = await asyncio.to_thread(self._server.talk, "GET", self._where, headers=headers)
        if status == 304:
            return None
        if status != 200:
            raise OSError(f"{self._where} answers {status}")
        if self._cache is not None:
            await asyncio.to_thread(write_whole, self._cache, body)
        return body


class Feed:
    def __init__(self, source: Source, plane: Fed) -> None:
        self._source = source
        self._plane = plane
        self._epoch = ""
        self._told = ""
        self._is_well = True
        self.on_taken: Callable[[], None] | None = None
        """Called whenever another table is in use."""

    async def read(self) -> None:
        """Take the table if there is a newer one. May be repeated."""
        try:
            version = self._plane.version
            raw = await self._source.read(f"{self._epoch}-{version}" if self._epoch else str(version))
            if raw is not None:
                self.take(raw)
            self._plane.freshness.confirm()
            self._told = ""
            self._is_well = True
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            self._is_well = False
            if str(error) != self._told:
                self._told = str(error)
                log.warning("no new table, version %d stays: %s", self._plane.version, error)

    def take(self, raw: bytes) -> None:
        """`ValueError`: it is no table, or an older one; the one in use stays."""
        table = msgspec.json.decode(raw, type=Table)
        if not self._plane.swap(table) and table.version < self._plane.version:
            raise ValueError(f"version {table.version} is older")
        self._epoch = table.epoch
        if self.on_taken is not None:
            self.on_taken()

    async def keep_reading(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._source.every_s if self._is_well else URL_EVERY_S)
            await self.read()


class Reporter:
    """Tells what this process counts: to the control plane, or into a file."""

    def __init__(self, report: Callable[[], Report], server: Server, where: str | Path) -> None:
        self._report = report
        self._server = server
        self._where = where
        self._asked = asyncio.Event()

    def soon(self) -> None:
        """Tell at once: somebody waits to hear which table is in use."""
        self._asked.set()

    async def tell(self, *, is_last: bool = False) -> None:
        """Once. A report that does not arrive is followed by a newer one."""
        try:
            body = msgspec.json.encode(msgspec.structs.replace(self._report(), is_last=is_last))
            if isinstance(self._where, Path):
                await asyncio.to_thread(write_whole, self._where, body)
            else:
                await asyncio.to_thread(self._server.talk, "POST", self._where, body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.debug("report not delivered: %s", error)

    async def keep_telling(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), REPORT_EVERY_S)
            self._asked.clear()
            await self.tell()


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the file before or after, never half of it. For nobody else: tables hold secrets."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
