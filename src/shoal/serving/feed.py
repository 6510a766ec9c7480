"""Where tables come from: a file that somebody replaces. Bad ones are told of and change nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from shoal.serving.plane import DataPlane
from shoal.serving.table import Table

log = logging.getLogger(__name__)

EVERY_S = 0.25


class FileFeed:
    """Replace the file by renaming another over it: a half-written one is refused, but costs time."""

    def __init__(self, path: Path, plane: DataPlane) -> None:
        self._path = path
        self._plane = plane
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> None:
        """Take the table if it is newer. May be repeated."""
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return
            self._seen = seen
            self._plane.swap(msgspec.json.decode(self._path.read_bytes(), type=Table))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("table %s not taken, version %d stays: %s", self._path, self._plane.version, error)

    async def keep_reading(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.read()
