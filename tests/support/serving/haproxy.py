"""A real HAProxy, driven by this process, beside replicas and callers that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.serving.haproxy.config_files import HaproxyFiles
from shoal.serving.haproxy.plane import HaproxyPlane, find_haproxy
from shoal.serving.haproxy.render import HaproxySettings
from shoal.serving.table import ServiceConfig, ServingReport
from tests.support.serving.data_plane_lab import DataPlaneLab

HAPROXY = find_haproxy()
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="no HAProxy here: apt-get install haproxy")


class HaproxyLab(DataPlaneLab):
    plane: HaproxyPlane

    def __init__(self, plane: HaproxyPlane, port: int) -> None:
        super().__init__(port)
        self.plane = plane

    def serve(self, *services: ServiceConfig) -> None:
        assert self.plane.swap(self.table(self.plane.version + 1, services))

    def report(self) -> ServingReport:
        return self.plane.report()

    async def drain(self, within_s: float) -> None:
        await self.plane.drain(within_s)

    def refresh_health(self) -> None:
        self.plane._send_health()


@contextlib.asynccontextmanager
async def running_haproxy(folder: Path) -> AsyncIterator[HaproxyLab]:
    assert HAPROXY is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        place = HaproxySettings(listener=listener.fileno(), max_connections=1000)
        plane = HaproxyPlane(HaproxyFiles(HAPROXY, folder, place, None))
        await plane.start()
        keeping = asyncio.ensure_future(plane.keep_running())
        lab = HaproxyLab(plane, listener.getsockname()[1])
        try:
            yield lab
        finally:
            keeping.cancel()
            await lab.clear()
