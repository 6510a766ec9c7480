"""A service on a real control plane, as its owner, a data plane and a caller see it."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import msgspec

from shoal.control.first import load_key
from shoal.identity import data_plane_token
from shoal.serving.table import Table
from tests.support.real_plane import RealPlane, until
from tests.support.shares import processes_with

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


class Served:
    """What a data plane and a person see."""

    def __init__(self, plane: RealPlane, folder: Path) -> None:
        self.plane = plane
        self.file = folder / "hello.yaml"
        (folder / "server.py").write_text(SERVER)
        self._token = data_plane_token(load_key(plane.home))

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

    def table(self, after: int = 0, wait_s: float = 0.0) -> Table | None:
        url = self.plane.shoal.transport.endpoint.url.removeprefix("http://")
        link = http.client.HTTPConnection(url, timeout=60)
        try:
            path = f"/v1/serving/table?after={after}&wait_s={wait_s}"
            link.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = link.getresponse()
            body = answer.read()
            assert answer.status in (200, 304), body
            return msgspec.json.decode(body, type=Table) if answer.status == 200 else None
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


def ask(address: str, path: str = "/") -> str:
    link = http.client.HTTPConnection(address, timeout=30)
    try:
        link.request("GET", path)
        return link.getresponse().read().decode()
    finally:
        link.close()


def pid_at(address: str) -> int:
    """The server that listens there."""
    mine = f"SHOAL_PORT={address.rpartition(':')[2]}".encode()
    found = [
        pid
        for pid in processes_with("server.py")
        if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    return found[-1]


class Caller(threading.Thread):
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
