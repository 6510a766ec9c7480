"""The admin address: a connection there costs a bounded time, and many connections a bounded number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shoal.serving.plane import DataPlane
from shoal.serving.report import MAX_OPEN, AdminConnection


class AdminClient:
    def __init__(self, server: asyncio.Server) -> None:
        self.address = server.sockets[0].getsockname()
        self.connections: dict[AdminConnection, None] = {}

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def ask(self, raw: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(raw)
        reply = await reader.read()
        writer.close()
        return reply


@pytest.fixture
async def admin() -> AsyncIterator[AdminClient]:
    connections: dict[AdminConnection, None] = {}
    plane = DataPlane()
    server = await asyncio.get_running_loop().create_server(
        lambda: AdminConnection(plane, "secret", connections, within_s=0.3), "127.0.0.1", 0
    )
    opened = AdminClient(server)
    opened.connections = connections
    yield opened
    for admin in list(connections):
        admin.abort()
    server.close()
    await server.wait_closed()


async def test_health_is_open_and_metrics_need_the_token(admin: AdminClient) -> None:
    head = b"GET /-/%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    assert (await admin.ask(head % (b"health", b""))).startswith(b"HTTP/1.1 200")
    assert (await admin.ask(head % (b"metrics", b""))).startswith(b"HTTP/1.1 401")
    assert (await admin.ask(head % (b"metrics", b"Authorization: Bearer secret\r\n"))).startswith(
        b"HTTP/1.1 200"
    )


@pytest.mark.parametrize(
    "begun", [b"", b"GET /-/health HT", b"\r\n"], ids=["nothing", "half a line", "a line"]
)
async def test_admin_request_that_does_not_end_is_cut_off(admin: AdminClient, begun: bytes) -> None:
    reader, writer = await admin.connect()
    writer.write(begun)
    with contextlib.suppress(ConnectionError):  # closed as well
        assert b" 200 " not in await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_many_admin_connections_do_not_lock_out_others(admin: AdminClient) -> None:
    held = [await admin.connect() for _ in range(MAX_OPEN * 2)]
    assert (await admin.ask(b"GET /-/health HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert len(admin.connections) <= MAX_OPEN
    for _, writer in held:
        writer.close()
