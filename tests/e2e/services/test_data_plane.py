"""The data plane as real processes: start, tables, reloads, crashes around it, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from shoal.serving.feed import write_whole
from shoal.serving.table import ServiceConfig, ServingReport, ServingTable
from tests.support.serving.data_plane_lab import (
    ClientConnection,
    Conversation,
    FakeReplica,
    HttpMessage,
    read_head,
    reply,
    request_bytes,
    service,
    yield_to_loop,
)
from tests.support.serving.haproxy import needs_haproxy
from tests.support.serving.sidecars import write_pair

DEADLINE_S = 60.0


class Running:
    """A running data plane and its files."""

    def __init__(self, place: Path, *kind: str) -> None:
        self.kind = kind
        self.table = place / "table.json"
        self.report = place / "report.json"
        self.version = 0
        self.replicas: list[FakeReplica] = []
        self.wires: list[ClientConnection] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.process: asyncio.subprocess.Process
        self.log: IO[bytes] | None = None
        """None: the test's own output."""
        self.port = 0

    def serve(self, *services: ServiceConfig) -> None:
        self.version += 1
        write_whole(self.table, msgspec.json.encode(ServingTable(version=self.version, services=services)))

    async def replica(self, name: str = "one", **fields: Any) -> FakeReplica:
        self.replicas.append(await FakeReplica(name, **fields).start())
        return self.replicas[-1]

    async def start(self, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "shoal.serving",
            "--listen",
            "127.0.0.1:0",
            "--table",
            str(self.table),
        ]
        self.process = await asyncio.create_subprocess_exec(
            *command,
            *self.kind,
            "--report",
            str(self.report),
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=self.log,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        self.port = int(line.rpartition(b":")[2])

    async def connect(self, tls: ssl.SSLContext | None = None) -> ClientConnection:
        self.wires.append(ClientConnection(*await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)))
        return self.wires[-1]

    async def ask(self, data: bytes) -> HttpMessage:
        wire = await self.connect()
        try:
            return await wire.ask(data)
        finally:
            wire.close()

    async def is_closed(self) -> bool:
        """Return whether no process listens any more."""
        try:
            (await self.connect()).close()
        except OSError:
            return True
        return False

    async def stop(self) -> int:
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@pytest.fixture
async def running(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    started = Running(tmp_path, *getattr(request, "param", ()))
    yield started
    for task in started.tasks:
        task.cancel()
    with contextlib.suppress(ProcessLookupError, AttributeError):
        started.process.kill()
        await started.process.wait()
    for wire in started.wires:
        wire.writer.transport.abort()
    await yield_to_loop()
    for replica in started.replicas:
        await replica.stop()


of_each_kind = pytest.mark.parametrize(
    "running",
    [(), pytest.param(("--haproxy",), marks=needs_haproxy)],
    ids=["embedded", "haproxy"],
    indirect=True,
)
by_haproxy = pytest.mark.parametrize(
    "running", [pytest.param(("--haproxy",), marks=needs_haproxy)], ids=["haproxy"], indirect=True
)


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)


async def until_asked(replica: FakeReplica) -> None:
    async def has_begun() -> bool:
        return bool(replica.requests)

    await eventually(has_begun)


class Load:
    """Callers that send requests until stopped, each on its own kept connection; all replies are kept."""

    def __init__(self, running: Running, callers: int = 8) -> None:
        self._running = running
        self._is_over = False
        self.statuses: list[int] = []
        self._tasks = [asyncio.ensure_future(self._call(n)) for n in range(callers)]
        running.tasks += self._tasks

    async def _call(self, number: int) -> None:
        wire: ClientConnection | None = None
        while not self._is_over:
            wire = wire or await self._running.connect()
            body = b"x" * 10 if number % 2 else b""
            header = f"idempotency-key: {number}"
            answer = await wire.ask(
                request_bytes("/p/s/", header, method="POST" if body else "GET", body=body)
            )
            self.statuses.append(answer.status)
            if answer.get("connection") == "close":
                wire.close()
                wire = None

    async def more(self, count: int) -> None:
        """Wait for this many further replies."""
        wanted = len(self.statuses) + count

        async def enough() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return len(self.statuses) >= wanted

        await eventually(enough)

    async def end(self) -> list[int]:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return [status for status in self.statuses if status != 200]


@of_each_kind
async def test_no_request_fails_while_replicas_are_killed_and_replaced(running: Running) -> None:
    first, second = await running.replica("a"), await running.replica("b")
    running.serve(service(first, second))
    await running.start()
    load = Load(running)
    await load.more(200)
    await first.stop()
    await load.more(200)
    third = await running.replica("c", release=2)
    running.serve(service(second, third))

    async def third_is_used() -> bool:
        return bool(third.requests)

    await eventually(third_is_used)
    await load.more(200)
    running.serve(service(second.table_entry(is_draining=True), third))
    await load.more(200)
    assert await load.end() == []
    assert await running.stop() == 0


async def test_no_request_fails_while_processes_are_replaced(running: Running) -> None:
    running.serve(service(await running.replica()))
    await running.start("--processes", "2")
    load = Load(running)
    await load.more(100)
    for _ in range(2):
        before = set(children_of(running.process.pid))
        running.process.send_signal(signal.SIGHUP)

        async def are_replaced(before: set[int] = before) -> bool:
            now = set(children_of(running.process.pid))
            return len(now) == 2 and not now & before

        await eventually(are_replaced)
        await load.more(100)
    assert await load.end() == []
    assert await running.stop() == 0


@of_each_kind
async def test_port_in_use_is_shared_only_with_a_successor(running: Running, tmp_path: Path) -> None:
    running.serve(service(await running.replica()))
    await running.start("--processes", "1")
    again = ["--listen", f"127.0.0.1:{running.port}", "--table", str(running.table), "--processes", "1"]
    command = [sys.executable, "-m", "shoal.serving", *again, *running.kind]
    with (tmp_path / "stranger").open("wb") as log:
        stranger = await asyncio.create_subprocess_exec(*command, stderr=log)
        assert await asyncio.wait_for(stranger.wait(), DEADLINE_S) == 1
    assert b"Address already in use" in (tmp_path / "stranger").read_bytes()
    assert (await running.ask(request_bytes())).status == 200
    first = running.process
    await running.start("--processes", "1", *again[:2], "--replaces")
    first.terminate()
    assert await asyncio.wait_for(first.wait(), DEADLINE_S) == 0
    assert (await running.ask(request_bytes())).status == 200


async def test_processes_stay_while_their_successors_cannot_start(running: Running, tmp_path: Path) -> None:
    running.serve(service(await running.replica()))
    token, log = tmp_path / "token", tmp_path / "log"
    token.write_text("plane")
    token.chmod(0o600)
    with log.open("wb") as running.log:
        await running.start("--processes", "2", "--token-file", str(token))
    before = set(children_of(running.process.pid))
    token.unlink()
    running.process.send_signal(signal.SIGHUP)

    async def is_told() -> bool:
        return log.read_text().count("its successor cannot serve") == 2

    await eventually(is_told)
    for _ in range(8):
        assert (await running.ask(request_bytes())).status == 200
    assert before <= set(children_of(running.process.pid))
    token.write_text("plane")
    token.chmod(0o600)
    running.process.send_signal(signal.SIGHUP)

    async def are_replaced() -> bool:
        now = set(children_of(running.process.pid))
        return len(now) == 2 and not now & before

    await eventually(are_replaced)
    assert (await running.ask(request_bytes())).status == 200


def children_of(pid: int) -> list[int]:
    """Return the process's children; none if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


async def test_process_that_dies_is_replaced(running: Running) -> None:
    running.serve(service(await running.replica()))
    await running.start("--processes", "1")
    assert (await running.ask(request_bytes())).status == 200
    os.kill(children_of(running.process.pid)[0], signal.SIGKILL)
    # Its listening socket lives on in the parent, so callers wait for the next process instead of failing.
    assert (await running.ask(request_bytes())).status == 200


async def test_stopping_process_has_a_successor_while_it_finishes(running: Running) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        if seen.request.path == "/slow":
            await gate.wait()
        await seen.send(reply(seen.request.path.encode()))

    replica = await running.replica("one", behaviour=slow)
    running.serve(service(replica))
    await running.start("--processes", "1")
    [first] = children_of(running.process.pid)
    pending = asyncio.ensure_future(running.ask(request_bytes("/p/s/slow")))
    await until_asked(replica)
    os.kill(first, signal.SIGTERM)

    async def has_successor() -> bool:
        return len(children_of(running.process.pid)) == 2

    await eventually(has_successor)
    assert (await running.ask(request_bytes("/p/s/quick"))).body == b"/quick"
    assert first in children_of(running.process.pid)
    gate.set()
    assert (await pending).body == b"/slow"

    async def is_gone() -> bool:
        return first not in children_of(running.process.pid)

    await eventually(is_gone)


def family_of(pid: int) -> list[int]:
    """Return its children and their children."""
    return [process for child in children_of(pid) for process in (child, *family_of(child))]


@by_haproxy
async def test_no_request_fails_while_haproxy_is_reloaded(running: Running) -> None:
    replica = await running.replica()
    running.serve(service(replica))
    await running.start()
    load = Load(running)
    for number in range(5):
        await load.more(50)
        before = set(family_of(running.process.pid))
        running.serve(service(replica), service(replica, name=f"other{number}"))

        async def is_served(path: str = f"/p/other{number}/") -> bool:
            return (await running.ask(request_bytes(path))).status == 200

        await eventually(is_served)
        assert set(family_of(running.process.pid)) - before, "it was reloaded"
    await load.more(50)
    assert await load.end() == []
    assert await running.stop() == 0


@by_haproxy
@pytest.mark.parametrize("which", [0, 1], ids=["master", "worker"])
async def test_dead_haproxy_is_restarted(running: Running, which: int) -> None:
    running.serve(service(await running.replica()))
    await running.start()
    assert (await running.ask(request_bytes())).status == 200
    before = family_of(running.process.pid)
    os.kill(before[which], signal.SIGKILL)

    async def is_new() -> bool:
        now = family_of(running.process.pid)
        return len(now) == 2 and not set(now) & set(before)

    await eventually(is_new)
    assert (await running.ask(request_bytes())).status == 200


@by_haproxy
async def test_haproxy_does_not_outlive_its_data_plane(running: Running) -> None:
    replica = await running.replica()
    running.serve(service(replica))
    await running.start()
    running.serve(service(replica, cap=7))  # a reload: the master has re-executed itself

    async def is_reloaded() -> bool:
        path = running.report
        return path.exists() and msgspec.json.decode(path.read_bytes(), type=ServingReport).version == 2

    await eventually(is_reloaded)
    running.process.kill()
    await eventually(running.is_closed)


@of_each_kind
async def test_stop_finishes_open_requests(running: Running) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply(b"late"))

    replica = await running.replica("one", behaviour=slow)
    running.serve(service(replica))
    await running.start()
    pending = asyncio.ensure_future(running.ask(request_bytes()))
    await until_asked(replica)
    running.process.terminate()
    await eventually(running.is_closed)
    gate.set()
    assert (await pending).body == b"late"
    assert await asyncio.wait_for(running.process.wait(), DEADLINE_S) == 0


@of_each_kind
async def test_bad_table_changes_nothing(running: Running) -> None:
    running.serve(service(await running.replica()))
    await running.start()
    write_whole(running.table, b"{half a tab")
    assert (await running.ask(request_bytes())).body == b"one"
    running.version = 10
    running.serve(service(await running.replica("new")))

    async def is_new() -> bool:
        return (await running.ask(request_bytes())).body == b"new"

    await eventually(is_new)


async def test_requests_are_reported_and_measured(running: Running, tmp_path: Path) -> None:
    running.serve(service(await running.replica()))
    (tmp_path / "token").write_text("operator\n")
    (tmp_path / "token").chmod(0o600)
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    admin = listener.sockets[0].getsockname()[1]
    listener.close()
    await running.start("--admin", f"127.0.0.1:{admin}", "--token-file", str(tmp_path / "token"))
    for _ in range(3):
        await running.ask(request_bytes())

    async def is_told() -> bool:
        if not running.report.exists():
            return False
        report = msgspec.json.decode(running.report.read_bytes(), type=ServingReport)
        return report.version == 1 and [(c.release, c.requests) for c in report.counts] == [(1, 3)]

    await eventually(is_told)

    async def page(path: str, *headers: str) -> HttpMessage:
        running.wires.append(ClientConnection(*await asyncio.open_connection("127.0.0.1", admin)))
        return await running.wires[-1].ask(request_bytes(path, *headers))

    assert json.loads((await page("/-/health")).body) == {"status": "ok", "version": 1}
    assert (await page("/-/metrics")).status == 401
    shown = (await page("/-/metrics", "authorization: Bearer operator")).body.decode()
    assert 'shoal_serving_requests_total{project="p",service="s",release="1"} 3' in shown
    assert 'shoal_serving_first_byte_seconds_bucket{project="p",service="s",release="1",le="+Inf"} 3' in shown


@of_each_kind
async def test_table_of_the_control_plane_outlives_it(running: Running, tmp_path: Path) -> None:
    replica = await running.replica()
    reports: list[bytes] = []

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_head(reader)
        assert request.get("authorization") == "Bearer plane"
        if request.start_line.startswith("POST"):
            reports.append(await reader.readexactly(int(request.get("content-length"))))
            writer.write(reply(b""))
        elif request.get("if-none-match") == '"5"':
            writer.write(b"HTTP/1.1 304 Not Modified\r\n\r\n")
        else:
            writer.write(reply(msgspec.json.encode(ServingTable(version=5, services=(service(replica),)))))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(control, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/table"
    (tmp_path / "token").write_text("plane")
    (tmp_path / "token").chmod(0o600)
    running.table = Path("unused")
    options = ("--table", url, "--cache", str(tmp_path / "cache"), "--token-file", str(tmp_path / "token"))
    await running.start(*options, "--report", url)
    assert (await running.ask(request_bytes())).status == 200

    async def has_reported() -> bool:
        return bool(reports)

    await eventually(has_reported)
    assert msgspec.json.decode(reports[0], type=ServingReport).version == 5
    server.close()
    assert (await running.ask(request_bytes())).status == 200
    assert await running.stop() == 0
    await running.start(*options)
    assert (await running.ask(request_bytes())).status == 200
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kept", [b"", b"{half a tab", b"[]"])
async def test_broken_cache_does_not_stop_a_data_plane_from_starting(
    running: Running, tmp_path: Path, kept: bytes
) -> None:
    """It runs without a control plane as well: there is nothing to serve, and it says so."""
    (tmp_path / "cache").write_bytes(kept)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/table"
    running.table = Path("unused")
    await running.start("--table", url, "--cache", str(tmp_path / "cache"))
    assert (await running.ask(request_bytes())).status == 401
    assert await running.stop() == 0


@of_each_kind
async def test_tls_is_served_and_the_replica_is_told_the_scheme(running: Running, tmp_path: Path) -> None:
    replica = await running.replica()
    running.serve(service(replica))
    cert, key = write_pair(tmp_path)
    await running.start("--tls-cert", str(cert), "--tls-key", str(key))
    trust = ssl.create_default_context(cafile=str(cert))
    trust.check_hostname = False
    wire = await running.connect(trust)
    for _ in range(3):
        assert (await wire.ask(request_bytes(method="POST", body=b"x" * 100_000))).status == 200
    assert replica.requests[0].get("x-forwarded-proto") == "https"
    wire.close()
    plain = await running.connect()
    await plain.send(request_bytes())
    assert await plain.is_closed()


@by_haproxy
async def test_renewed_certificate_is_used_and_a_broken_one_is_not(running: Running, tmp_path: Path) -> None:
    replica = await running.replica()
    running.serve(service(replica))
    cert, key = write_pair(tmp_path)
    await running.start("--tls-cert", str(cert), "--tls-key", str(key))

    async def shown() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", running.port))

    first = await shown()
    write_pair(tmp_path)
    running.process.send_signal(signal.SIGHUP)

    async def is_renewed() -> bool:
        return await shown() != first

    await eventually(is_renewed)
    renewed = await shown()
    write_whole(cert, b"broken")
    running.process.send_signal(signal.SIGHUP)
    running.serve(service(replica), service(replica, name="other"))
    trust = ssl.create_default_context(cadata=renewed)
    trust.check_hostname = False

    async def is_served() -> bool:
        return (await (await running.connect(trust)).ask(request_bytes("/p/other/"))).status == 200

    await eventually(is_served)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of the process and its children."""
    pages = [int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in (pid, *family_of(pid))]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


@of_each_kind
async def test_slow_callers_cost_little_memory_and_do_not_slow_others(running: Running) -> None:
    size = 64 << 20

    async def flood(seen: Conversation) -> None:
        if seen.request.path != "/flood":
            await seen.send(reply(str(len(await seen.body())).encode()))
            return
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            await seen.send(b"x" * (1 << 16))

    running.serve(service(await running.replica("one", behaviour=flood), cap=1000))
    await running.start()
    assert (await running.ask(request_bytes())).status == 200
    before = resident_bytes(running.process.pid)
    for _ in range(300):
        await (await running.connect()).send(b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 20_000)
    readers = []
    for _ in range(40):
        raw = socket.create_connection(("127.0.0.1", running.port))
        raw.sendall(request_bytes("/p/s/flood"))
        readers.append(raw)
    answer = await running.ask(request_bytes("/p/s/", method="POST", body=b"z" * (8 << 20)))
    assert answer.body == str(8 << 20).encode()
    grown = resident_bytes(running.process.pid) - before
    assert grown < 128 << 20, (
        f"{grown >> 20} MiB more for 300 unfinished heads and 40 answers of 64 MiB unread"
    )
    for raw in readers:
        raw.close()
    assert (await running.ask(request_bytes())).status == 200
