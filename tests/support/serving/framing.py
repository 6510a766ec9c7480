"""Bytes in, requests out, without a socket: what tests of framing put in pieces and compare."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.serving.balance.replica import LiveReplica
from shoal.serving.exchange.ending import end
from shoal.serving.exchange.exchange import Exchange
from shoal.serving.exchange.states import ExchangeEnd
from shoal.serving.plane import DataPlane
from shoal.serving.proxy.downstream import Downstream
from shoal.serving.proxy.upstream import ConnectionSeeker
from shoal.serving.table import ReplicaConfig, ServingTable
from tests.support.serving.data_plane_lab import service


def split_at(raw: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(raw) + 1) for cut in cuts})
    return [raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True) if a != b]


class RecordingTransport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_open = True

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_open = False

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_open = False

    def is_closing(self) -> bool:
        return not self.is_open

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class OfflineDataPlane(DataPlane):
    """Opens no connection: what would be sent to a replica stays in the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[ConnectionSeeker] = []
        replica = ReplicaConfig(replica_id="r", address="127.0.0.1:1", release=1)
        self.swap(ServingTable(version=1, services=(service(replica),)))

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        self.seen.append(seeker)


def request_head(exchange: Exchange) -> bytes:
    """The head for a replica, as far as it is the request's."""
    entry, query, _, own_headers, _ = exchange.request
    return entry.start + query + entry.prefix + own_headers


async def parse_requests(parts: list[bytes]) -> tuple[list[tuple[bytes, bytes, bool]], bytes]:
    """Requests as they would go on, each once the one before has been answered, and what was answered."""
    plane, pipe = OfflineDataPlane(), RecordingTransport()
    client = Downstream(plane)
    client.connection_made(pipe)
    found: list[tuple[bytes, bytes, bool]] = []

    def finish() -> None:
        while client.exchange is not None and client.exchange.is_whole and plane.seen:
            exchange = client.exchange
            found.append((request_head(exchange), exchange.body.joined(), True))
            end(exchange, ExchangeEnd.REPLIED, is_error=False)
            client.finish()

    for part in parts:
        if pipe.is_open:
            client.data_received(part)
            finish()
            await asyncio.sleep(0)
            finish()
    while pipe.is_open and client._buffer.data and client.exchange is None:
        before = client._buffer.data
        await asyncio.sleep(0)
        finish()
        if client._buffer.data == before:
            break
    if client.exchange is not None:
        exchange = client.exchange
        found.append((request_head(exchange), exchange.body.joined(), False))
    client.connection_lost(None)
    assert all(live.outstanding == 0 for live in plane.services["p", "s"].replicas.values())
    assert plane.services["p", "s"].waiting.count == 0
    assert plane.held.bytes == 0
    assert all(account.admitted == 0 for account in plane.services["p", "s"].accounts.values())
    return found, pipe.sent
