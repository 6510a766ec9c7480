"""TLS connections: unfinished handshakes are limited in number and time, and lock out no client."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvloop

from shoal.identity.authority import make_authority, make_server
from shoal.tls_listener import TlsListener

RUNNERS: tuple[Callable[..., Any], ...] = (asyncio.run, uvloop.run)


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def server_context() -> ssl.SSLContext:
    now = time.time()
    pair = make_server(make_authority("cluster", now), ["localhost"], now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(pair.certificate + pair.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def silent(address: tuple[str, int], local: str = "127.0.0.1") -> socket.socket:
    """A connection that never begins its handshake."""
    link = socket.socket()
    link.bind((local, 0))
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, address)
    return link


async def echoed(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address, ssl=client_context())
    try:
        writer.write(b"hello")
        return await reader.readexactly(5)
    finally:
        writer.close()


@pytest.mark.parametrize("run", RUNNERS)
def test_the_oldest_handshake_ends_for_one_too_many(run: Callable[..., Any]) -> None:
    async def main() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        address = sock.getsockname()
        listener = TlsListener(sock, Echo, server_context(), handshake_s=60, max_handshakes=3)
        links = [await silent(address) for _ in range(8)]
        assert await echoed(address) == b"hello"
        assert listener.num_handshakes <= 3
        ended = [asyncio.get_running_loop().sock_recv(link, 1) for link in links[:6]]
        assert await asyncio.wait_for(asyncio.gather(*ended), 10) == [b""] * 6
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), 10)
        for link in links:
            link.close()

    run(main())


def test_flood_of_one_address_ends_no_handshake_of_another() -> None:
    async def main() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        listener = TlsListener(sock, Echo, server_context(), handshake_s=60, max_handshakes=8)
        mine = await silent(sock.getsockname(), "127.0.0.2")
        links = [await silent(sock.getsockname()) for _ in range(30)]
        loop = asyncio.get_running_loop()
        assert await asyncio.wait_for(loop.sock_recv(links[20], 1), 10) == b""
        with pytest.raises(BlockingIOError):
            mine.recv(1)
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), 10)
        for link in (mine, *links):
            link.close()

    asyncio.run(main())


@pytest.mark.parametrize("run", RUNNERS)
def test_a_handshake_that_does_not_end_is_ended(run: Callable[..., Any]) -> None:
    async def main() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        listener = TlsListener(sock, Echo, server_context(), handshake_s=0.1)
        link = await silent(sock.getsockname())
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(link, b"\x16\x03\x01")
        assert await asyncio.wait_for(loop.sock_recv(link, 1), 10) == b""
        assert await echoed(sock.getsockname()) == b"hello"
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), 10)
        link.close()

    run(main())
