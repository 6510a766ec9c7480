"""The operators' door: a connection there costs a bounded time, and many of them a bounded number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from shoal.serving.admin import MAX_OPEN, Admin
from shoal.serving.plane import DataPlane


class Door:
    def __init__(self, server: asyncio.Server) -> None:
        self.address = server.sockets[0].getsockname()
        self.connections: dict[Admin, None] = {}

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def ask(self, raw: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(raw)
        told = await reader.read()
        writer.close()
        return told


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    connections: dict[Admin, None] = {}
    plane = DataPlane()
    server = await asyncio.get_running_loop().create_server(
        lambda: Admin(plane, "secret", connections, within_s=0.3), "127.0.0.1", 0
    )
    made = Door(server)
    made.connections = connections
    yield made
    for admin in list(connections):
        admin.abort()
    server.close()
    await server.wait_closed()


async def test_health_is_open_and_metrics_need_the_token(door: Door) -> None:
    head = b"GET /-/%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    assert (await door.ask(head % (b"health", b""))).startswith(b"HTTP/1.1 200")
    assert (await door.ask(head % (b"metrics", b""))).startswith(b"HTTP/1.1 401")
    assert (await door.ask(head % (b"metrics", b"Authorization: Bearer secret\r\n"))).startswith(
        b"HTTP/1.1 200"
    )


@pytest.mark.parametrize(
    "begun", [b"", b"GET /-/health HT", b"\r\n"], ids=["nothing", "half a line", "a line"]
)
async def test_a_request_that_does_not_end_is_ended(door: Door, begun: bytes) -> None:
    reader, writer = await door.connect()
    writer.write(begun)
    with contextlib.suppress(ConnectionError):  # closed as well
        assert b" 200 " not in await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_many_connections_keep_nobody_out(door: Door) -> None:
    held = [await door.connect() for _ in range(MAX_OPEN * 2)]
    assert (await door.ask(b"GET /-/health HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert len(door.connections) <= MAX_OPEN
    for _, writer in held:
        writer.close()
