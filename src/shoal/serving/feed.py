"""Where tables come from and where reports go: a file, or the control plane's address.

Bad tables are told of and change nothing; while the control plane is away, what is known is served.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.serving.table import Report, Table

log = logging.getLogger(__name__)

FILE_EVERY_S = 0.25
URL_EVERY_S = 1.0
ANSWER_S = 5.0
MAX_TABLE_BYTES = 256 << 20


class Source(Protocol):
    every_s: float

    async def read(self, version: int) -> bytes | None:
        """The table as JSON; None if it is as it was. `OSError`: nobody can say."""
        ...


class Fed(Protocol):
    """A data plane, as far as tables are concerned."""

    version: int

    def swap(self, table: Table) -> bool:
        """From now on this table, whole. False: the one in use is as new. `ValueError`: it stays."""
        ...


class FileSource:
    """Replace the file by renaming another over it."""

    every_s = FILE_EVERY_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def read(self, version: int) -> bytes | None:
        stat = self._path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        return self._path.read_bytes()


class UrlSource:
    """Asks with the version it has as an entity tag; 304 says that there is no newer one.

    Every table is also kept in `cache`, so that a data plane starts without a control plane.
    """

    every_s = URL_EVERY_S

    def __init__(self, url: str, token: str, cache: Path | None) -> None:
        self._url = url
        self._token = token
        self._cache = cache

    def remembered(self) -> bytes | None:
        try:
            return self._cache.read_bytes() if self._cache is not None else None
        except FileNotFoundError:
            return None

    async def read(self, version: int) -> bytes | None:
        headers = {"if-none-match": f'"{version}"'}
        status, body = await asyncio.to_thread(talk, "GET", self._url, self._token, headers=headers)
        if status == 304:
            return None
        if status != 200:
            raise OSError(f"{self._url} answers {status}")
        if self._cache is not None:
            await asyncio.to_thread(write_whole, self._cache, body)
        return body


class Feed:
    def __init__(self, source: Source, plane: Fed) -> None:
        self._source = source
        self._plane = plane
        self._told = ""

    async def read(self) -> None:
        """Take the table if there is a newer one. May be repeated."""
        try:
            raw = await self._source.read(self._plane.version)
            if raw is not None:
                self.take(raw)
            self._told = ""
        except (OSError, msgspec.MsgspecError, ValueError, http.client.HTTPException) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("no new table, version %d stays: %s", self._plane.version, error)

    def take(self, raw: bytes) -> None:
        """`ValueError`: it is no table, or one that cannot be; the one in use stays."""
        table = msgspec.json.decode(raw, type=Table)
        if not self._plane.swap(table) and table.version < self._plane.version:
            raise ValueError(f"version {table.version} is older")

    async def keep_reading(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._source.every_s)
            await self.read()


async def keep_reporting(report: Callable[[], Report], where: str, token: str) -> None:
    """Until cancelled. A report that does not arrive is followed by a newer one."""
    while True:
        await asyncio.sleep(1.0)
        try:
            body = msgspec.json.encode(report())
            if "://" in where:
                await asyncio.to_thread(talk, "POST", where, token, body)
            else:
                await asyncio.to_thread(write_whole, Path(where), body)
        except (OSError, http.client.HTTPException) as error:
            log.debug("report not delivered: %s", error)


def talk(
    method: str, url: str, token: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """One request to the control plane. Blocks."""
    parts = urllib.parse.urlsplit(url)
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    link = made(parts.hostname or "", parts.port, timeout=ANSWER_S)
    sent = {"content-type": "application/json", **(headers or {})}
    if token:
        sent["authorization"] = f"Bearer {token}"
    try:
        link.request(method, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), body, sent)
        answer = link.getresponse()
        return answer.status, answer.read(MAX_TABLE_BYTES)
    finally:
        link.close()


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the file before or after, never half of it. For nobody else: tables hold secrets."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
