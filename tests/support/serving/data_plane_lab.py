"""A data plane in the test's own loop, replicas that answer as told, callers that send what they like."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.serving.haproxy.plane import HaproxyPlane
from shoal.serving.housekeeping import keep_checking, keep_sweeping
from shoal.serving.plane import DataPlane
from shoal.serving.report import report
from shoal.serving.table import AllowedCaller, ReplicaConfig, ServiceConfig, ServingReport, ServingTable
from tests.support.serving.sidecars import ThreadSidecars

PATIENCE_S = 30.0
TOKEN = "shl_made_up_token"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()


@dataclass
class HttpMessage:
    """A request or a response as it stood on the wire."""

    start_line: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    raw_head: bytes = b""

    @property
    def status(self) -> int:
        return int(self.start_line.split(" ")[1])

    @property
    def path(self) -> str:
        return self.start_line.split(" ")[1]

    def values(self, name: str) -> list[str]:
        return [value for seen, value in self.headers if seen == name]

    def get(self, name: str) -> str:
        return next(iter(self.values(name)), "")


async def read_head(reader: asyncio.StreamReader) -> HttpMessage:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
    pairs = [line.split(":", 1) for line in lines]
    return HttpMessage(first, [(name.lower(), value.strip()) for name, value in pairs], b"", raw)


async def read_body(reader: asyncio.StreamReader, head: HttpMessage, *, until_close: bool) -> bytes:
    if head.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size = int((await reader.readuntil(b"\r\n")).partition(b";")[0].strip(), 16)
            if not size:
                while await reader.readuntil(b"\r\n") != b"\r\n":
                    pass  # trailers
                return body
            piece = await reader.readexactly(size + 2)
            assert piece.endswith(b"\r\n")
            body += piece[:-2]
    if head.get("content-length"):
        return await reader.readexactly(int(head.get("content-length")))
    return await reader.read() if until_close else b""


def reply(body: bytes = b"ok", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


Behaviour = Callable[["Conversation"], Awaitable[None]]


@dataclass
class Conversation:
    """One request at a replica, its head read."""

    replica: FakeReplica
    request: HttpMessage
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def body(self) -> bytes:
        self.request.body = await read_body(self.reader, self.request, until_close=False)
        return self.request.body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


async def hang_up(conversation: Conversation) -> None:
    conversation.writer.transport.abort()


async def stay_silent(conversation: Conversation) -> None:
    await conversation.reader.read()


async def answer_ok(conversation: Conversation) -> None:
    await conversation.body()
    await conversation.send(reply(conversation.replica.name.encode()))


@dataclass
class FakeReplica:
    name: str = "one"
    behaviour: Behaviour = answer_ok
    release: int = 1
    requests: list[HttpMessage] = field(default_factory=list)
    num_connections: int = 0
    num_lost: int = 0
    address: str = ""
    certified_as: str = ""
    """By the porch before it, if there is one."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, path: str | None = None, port: int = 0) -> FakeReplica:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._serve, path)
            self.address = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
            self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def stop(self) -> None:
        """As if killed: of connections that were just coming, too, nothing is left."""
        if self._server is not None:
            self._server.close()
            await yield_to_loop()
            for writer in list(self._writers):
                writer.transport.abort()
            await yield_to_loop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            while True:
                request = await read_head(reader)
                self.requests.append(request)
                await self.behaviour(Conversation(self, request, reader, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            self.num_lost += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    def table_entry(self, **changes: Any) -> ReplicaConfig:
        known: dict[str, Any] = {"replica_id": self.name, "address": self.address, "release": self.release}
        known |= {"name": self.certified_as}
        return ReplicaConfig(**{**known, **changes})


def service(*replicas: FakeReplica | ReplicaConfig, **changes: Any) -> ServiceConfig:
    known: dict[str, Any] = {"project": "p", "name": "s", "is_public": True}
    told = tuple(one.table_entry() if isinstance(one, FakeReplica) else one for one in replicas)
    return ServiceConfig(**{**known, "replicas": told, **changes})


def callers(*names: str) -> tuple[AllowedCaller, ...]:
    """Each with the token `token-NAME`."""
    return tuple(
        AllowedCaller(digest=hashlib.sha256(f"token-{name}".encode()).hexdigest(), name=name, project="p")
        for name in names
    )


def request_bytes(path: str = "/p/s/", *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: shoal.test", *headers]
    if body or method in {"POST", "PUT"}:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def private_service(*replicas: Any, **changes: Any) -> ServiceConfig:
    """A service for `ana` and `bo`."""
    return service(*replicas, **{"is_public": False, "callers": callers("ana", "bo"), **changes})


def request_as(name: str, path: str = "/p/s/", **options: Any) -> bytes:
    return request_bytes(path, f"authorization: Bearer token-{name}", **options)


@dataclass
class ClientConnection:
    """A caller's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, *, is_head: bool = False) -> HttpMessage:
        async with asyncio.timeout(PATIENCE_S):
            message = await read_head(self.reader)
            if not is_head and message.status >= 200 and message.status not in {204, 304}:
                message.body = await read_body(self.reader, message, until_close=True)
            return message

    async def ask(self, data: bytes, *, is_head: bool = False) -> HttpMessage:
        await self.send(data)
        return await self.receive(is_head=is_head)

    async def is_closed(self) -> bool:
        """Waits for the other end to close; what still comes is thrown away."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.reader.read()
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.writer.close()


class DataPlaneLab(ABC):
    """A data plane of whichever kind, and everything around it."""

    plane: DataPlane | HaproxyPlane

    def __init__(self, port: int) -> None:
        self.port = port
        self.replicas: list[FakeReplica] = []
        self.connections: list[ClientConnection] = []
        self.sidecars: ThreadSidecars | None = None
        """They stand before replicas that are made from now on."""

    @abstractmethod
    def serve(self, *services: ServiceConfig) -> None:
        """A newer table; in use when this returns."""

    @abstractmethod
    def report(self) -> ServingReport: ...

    @abstractmethod
    async def drain(self, within_s: float) -> None: ...

    def refresh_health(self) -> None:  # noqa: B027 - the embedded data plane needs no telling
        """From now on the health check answers by what is known now."""

    def queued(self) -> int:
        return sum(count.queued for count in self.report().counts)

    def in_flight(self) -> int:
        return sum(count.in_flight for count in self.report().counts)

    async def add_replica(
        self, name: str = "one", behaviour: Behaviour = answer_ok, **fields: Any
    ) -> FakeReplica:
        made = await FakeReplica(name, behaviour, **fields).start()
        if self.sidecars is not None:
            made.address, made.certified_as = self.sidecars.start_before(made.address)
        self.replicas.append(made)
        return made

    def table(self, version: int, services: tuple[ServiceConfig, ...]) -> ServingTable:
        papers = self.sidecars.authority.identities.for_data_planes() if self.sidecars is not None else None
        return ServingTable(version=version, services=services, tls_identity=papers)

    async def connect(self) -> ClientConnection:
        wire = ClientConnection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.connections.append(wire)
        return wire

    async def ask(self, data: bytes) -> HttpMessage:
        """On a connection of its own."""
        wire = await self.connect()
        return await wire.ask(data, is_head=data.startswith(b"HEAD"))

    async def clear(self) -> None:
        for wire in self.connections:
            wire.writer.transport.abort()  # what nobody reads would keep it open
        await yield_to_loop()
        await self.drain(1.0)
        for replica in self.replicas:
            await replica.stop()
        abort_all()  # what is left says goodbye to a porch, which may take its time
        await yield_to_loop()


class EmbeddedLab(DataPlaneLab):
    """The embedded one, in this process."""

    plane: DataPlane

    def __init__(self, plane: DataPlane, port: int) -> None:
        super().__init__(port)
        self.plane = plane

    def serve(self, *services: ServiceConfig) -> None:
        assert self.plane.swap(self.table(self.plane.version + 1, services))

    def report(self) -> ServingReport:
        return report(self.plane)

    async def drain(self, within_s: float) -> None:
        await self.plane.drain(within_s)
        await asyncio.gather(*self.plane._tasks)  # connections on their way, for callers who left


@contextlib.asynccontextmanager
async def running_lab(**options: Any) -> AsyncIterator[EmbeddedLab]:
    plane = DataPlane(**options)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    await plane.listen(listener)
    lab = EmbeddedLab(plane, listener.getsockname()[1])
    loop = asyncio.get_running_loop()
    keeping = [loop.create_task(keep_sweeping(plane)), loop.create_task(keep_checking(plane))]
    try:
        yield lab
    finally:
        for task in keeping:
            task.cancel()
        await lab.clear()


def abort_all() -> None:
    """Every connection of this loop. One that is open when the loop ends is a warning in another test."""
    known = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]
    for transport in [one for one in known.values() if one._sock is not None]:
        transport.abort()


async def yield_to_loop() -> None:
    """As many of the loop as it takes to accept a connection, or to close one."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Polls; fails loudly, and late enough for a busy machine."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)
