"""Callers of a service who keep their connections, count every request, and look at every answer.

A service on a real control plane, as its owner, a data plane and a caller see it.
"""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from shoal.control.bootstrap import load_signing_key
from shoal.identity import data_plane_token
from shoal.serving.table import ServingTable
from tests.support.planes.real import RealPlane, until
from tests.support.runtime.tasks import pids_with

PAUSE_S = 0.03
MAX_REQUESTS = 200_000
"""Requests of one caller: a load has an end, also when nobody ends it."""


class FailedRequest(NamedTuple):
    kind: str
    replica_id: str
    """Who had begun to answer; empty: nobody had."""
    error: str


class CallerConnection:
    """One connection that is kept, opened anew where it was closed after an answer that said so."""

    def __init__(self, address: str, path: str, token: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=120)
        self._path = path
        self._headers = {"authorization": f"Bearer {token}"}
        self.replica_id = ""
        self.version = ""

    def send(self, method: str, path: str, body: str = "", **headers: str) -> http.client.HTTPResponse:
        self.replica_id = self.version = ""
        sent = body.encode() if method == "POST" else None
        self._connection.request(method, self._path + path, sent, {**self._headers, **headers})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"{answer.status}: {answer.read().decode()}")
        return answer

    def strip_sender(self, text: str) -> str:
        """What was said, once it is noted who said it."""
        self.version, self.replica_id, said = text.split(" ", 2)
        return said

    def close(self) -> None:
        self._connection.close()


def get(connection: CallerConnection, number: int) -> bool:
    """Whether it was answered, all of it and rightly."""
    said = connection.strip_sender(connection.send("GET", f"echo?{number}").read().decode())
    return said == f"/echo?{number}"


def post(connection: CallerConnection, number: int) -> bool:
    return (
        connection.strip_sender(connection.send("POST", "", f"plain {number}").read().decode())
        == f"plain {number}"
    )


def post_with_key(connection: CallerConnection, number: int) -> bool:
    answer = connection.send("POST", "", f"keyed {number}", **{"idempotency-key": f"key-{number}"})
    return connection.strip_sender(answer.read().decode()) == f"keyed {number}"


def stream(connection: CallerConnection, number: int) -> bool:
    answer = connection.send("GET", f"stream?{number}")
    events = []
    while line := answer.readline():
        if line.startswith(b"data: "):
            events.append(connection.strip_sender(line.decode()[6:-1]))
    return events == [f"{place} /stream?{number}" for place in range(20)]


class CountingCaller(threading.Thread):
    """One caller: one request after the other."""

    def __init__(self, connection: CallerConnection, ask: Callable[[CallerConnection, int], bool]) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self._ask = ask
        self.is_over = threading.Event()
        self.num_sent = self.num_right = 0
        self.failures: list[FailedRequest] = []
        self.versions: Counter[str] = Counter()

    def run(self) -> None:
        for number in itertools.takewhile(lambda _: not self.is_over.is_set(), range(MAX_REQUESTS)):
            self.num_sent += 1
            try:
                is_right, told = self._ask(self._connection, number), "not what was asked for"
            except (OSError, http.client.HTTPException, ValueError) as error:
                is_right, told = False, repr(error)
            if is_right:
                self.num_right += 1
                self.versions[self._connection.version] += 1
            else:
                self.failures.append(FailedRequest(self._ask.__name__, self._connection.replica_id, told))
                self._connection.close()  # an answer that was cut off ended with its connection
            time.sleep(PAUSE_S)
        self._connection.close()


class CallerCrowd:
    """Askers of these kinds, from `with` to its end."""

    def __init__(
        self, address: str, path: str, token: str, *kinds: Callable[[CallerConnection, int], bool]
    ) -> None:
        self.callers = [CountingCaller(CallerConnection(address, path, token), kind) for kind in kinds]

    def __enter__(self) -> Self:
        for asker in self.callers:
            asker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for asker in self.callers:
            asker.is_over.set()
        for asker in self.callers:
            asker.join(180)

    @property
    def num_sent(self) -> int:
        return sum(asker.num_sent for asker in self.callers)

    @property
    def num_right(self) -> int:
        return sum(asker.num_right for asker in self.callers)

    @property
    def versions(self) -> set[str]:
        return {version for asker in self.callers for version in asker.versions}

    def failures(self, *, except_replicas: frozenset[str] = frozenset()) -> list[FailedRequest]:
        """What failed, but for answers that these replicas had begun when they were killed."""
        found = [fault for asker in self.callers for fault in asker.failures]
        return [fault for fault in found if fault.replica_id not in except_replicas]

    def wait_for_more(self, count: int = 2) -> None:
        """Until every one of them was answered, or failed, so many times more."""
        before = [asker.num_right + len(asker.failures) for asker in self.callers]
        until(
            lambda: all(
                asker.num_right + len(asker.failures) >= seen + count
                for asker, seen in zip(self.callers, before, strict=True)
            ),
            f"everybody is answered {count} times",
        )


SERVER = r"""
import http.server, os, time
WHO = f"{os.environ['VERSION']} {os.environ['SHOAL_JOB_ID']}"
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path.startswith("/stream"):
            return self.stream()
        time.sleep(0.2 if self.path == "/slow" else 0)
        self.answer(self.path)
    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["content-length"])).decode())
    def answer(self, said):
        body = f"{WHO} {said}".encode()
        status = "500 Broken" if "BROKEN" in os.environ and self.path == "/work" else "200 OK"
        self.wfile.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    def stream(self):
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        for number in range(20):
            event = f"data: {WHO} {number} {self.path}\n\n"
            self.wfile.write(f"{head}{len(event):x}\r\n{event}\r\n".encode())
            head = ""
            time.sleep(0.05)
        self.wfile.write(b"0\r\n\r\n")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer.request_queue_size = 128
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
"""Every answer names the version and the job that gave it, and is written in one piece: nobody sees half of
one. A stream takes a second."""


class ServedApp:
    """What a data plane and a person see."""

    def __init__(self, plane: RealPlane, folder: Path) -> None:
        self.plane = plane
        self.file = folder / "hello.yaml"
        (folder / "server.py").write_text(SERVER)
        self._token = data_plane_token(load_signing_key(plane.home))

    def serve(self, **fields: Any) -> dict[str, Any]:
        """As `shoal serve` does it, from the folder of the server."""
        spec = {
            "kind": "service",
            "name": "hello",
            "run": "exec python3 server.py",
            "env": {"VERSION": "1"},
            "readiness": {"path": "/health", "interval": 0.1, "failures": 1},
            "resources": {"gpus": 1},
            "drain": 0.2,
            **fields,
        }
        self.file.write_text(msgspec.json.encode(spec).decode())  # JSON is YAML
        done = self.plane.command("serve", str(self.file), "--json")
        assert done.returncode == 0, done.stderr
        return dict(msgspec.json.decode(done.stdout))

    def table(self, after: int = 0, wait_s: float = 0.0) -> ServingTable | None:
        url = self.plane.shoal.transport.endpoint.url.removeprefix("http://")
        link = http.client.HTTPConnection(url, timeout=60)
        try:
            path = f"/v1/serving/table?after={after}&wait_s={wait_s}"
            link.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = link.getresponse()
            body = answer.read()
            assert answer.status in (200, 304), body
            return msgspec.json.decode(body, type=ServingTable) if answer.status == 200 else None
        finally:
            link.close()

    def replicas(self) -> dict[str, str]:
        """Those that are given requests, with their addresses."""
        table = self.table(wait_s=20.0)  # one that was just started has none yet
        assert table is not None
        replicas = (one for service in table.services for one in service.replicas if not one.is_draining)
        return {one.replica_id: one.address for one in replicas}

    def nodes(self) -> list[str]:
        """Where its replicas are."""
        return [name for one in self.plane.shoal.services.show("hello")["servers"] for name in one["nodes"]]

    def addresses(self) -> list[str]:
        return list(self.replicas().values())

    def until_other(self, replica_id: str) -> None:
        """Until it is given no requests any more, and another one is."""

        def is_other() -> bool:
            now = self.replicas()
            return bool(now) and replica_id not in now

        until(is_other, f"another one than {replica_id} is ready")

    def until_ready(self, count: int) -> list[str]:
        until(lambda: len(self.addresses()) == count, f"{count} replicas are ready")
        return self.addresses()


def get_text(address: str, path: str = "/") -> str:
    link = http.client.HTTPConnection(address, timeout=30)
    try:
        link.request("GET", path)
        return link.getresponse().read().decode()
    finally:
        link.close()


def server_pid(address: str) -> int:
    """The server that listens there."""
    mine = f"SHOAL_PORT={address.rpartition(':')[2]}".encode()
    found = [
        pid
        for pid in pids_with("server.py")
        if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    return found[-1]


class RepeatingCaller(threading.Thread):
    """Asks again and again, and counts what it is answered: one request that fails is one too many."""

    def __init__(self, address: str, path: str, token: str = "", body: bytes | None = None) -> None:
        """With a body, a POST."""
        super().__init__()
        self._body = body
        self._address, self._path = address, path
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._is_over = threading.Event()
        self.answers: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()

    def run(self) -> None:
        link = http.client.HTTPConnection(self._address, timeout=60)
        while not self._is_over.is_set():
            link.request("GET" if self._body is None else "POST", self._path, self._body, self._headers)
            answer = link.getresponse()
            said = answer.read().decode()
            self.statuses[answer.status] += 1
            self.answers[said.partition(" ")[0]] += 1
            time.sleep(0.03)
        link.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self.join(60)
