"""A service on a real control plane: served, found in the table, scaled, repaired and stopped."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.control.first import load_key
from shoal.identity import data_plane_token
from shoal.serving.table import Table
from tests.support.real_plane import RealPlane, until
from tests.support.shares import processes_with

pytestmark = pytest.mark.slow
SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{os.environ['VERSION']} {os.environ['SHOAL_JOB_NUMBER']}".encode()
        self.send_response(500 if "BROKEN" in os.environ and self.path == "/work" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


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
        table = self.table()
        assert table is not None
        replicas = (one for service in table.services for one in service.replicas if not one.is_draining)
        return {one.replica_id: one.address for one in replicas}

    def addresses(self) -> list[str]:
        return list(self.replicas().values())

    def until_other(self, replica_id: str) -> None:
        until(lambda: {*self.replicas()} - {replica_id}, "another one is ready")

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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    plane = RealPlane(tmp_path / "home", demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield Served(plane, folder)
    plane.down()


def test_service_is_served_scaled_by_hand_and_stopped(served: Served) -> None:
    made = served.serve(replicas=2)
    assert (made["ref"], made["newest_release"]) == ("default/hello", 1)
    addresses = served.until_ready(2)
    assert len({ask(address) for address in addresses}) == 2
    assert all(ask(address).startswith("1 ") for address in addresses)
    shown = served.plane.command("services", "hello").stdout
    assert shown.count("ready") == 3
    assert "hello@1.2" in served.plane.command("queue").stdout
    served.plane.command("scale", "hello", "3")
    served.until_ready(3)
    served.plane.command("scale", "hello", "1")
    served.until_ready(1)
    table = served.table()
    assert table is not None
    assert served.table(after=table.version) is None
    assert "stopping" in served.plane.command("stop", "hello").stdout
    until(lambda: not served.plane.shoal.services.all(), "the service is gone")
    newer = served.table(after=table.version, wait_s=20.0)
    assert newer is not None
    assert newer.services == ()
    assert served.plane.command("queue").stdout.startswith("no open jobs")


def test_replica_that_dies_or_stops_answering_is_replaced_once(served: Served) -> None:
    readiness = {"path": "/health", "interval": 0.1, "timeout": 1, "failures": 1, "dead_after": "1s"}
    served.serve(replicas=1, readiness=readiness)
    served.until_ready(1)
    for harm in (signal.SIGKILL, signal.SIGSTOP):
        [(before, address)] = served.replicas().items()
        os.kill(pid_at(address), harm)
        served.until_other(before)
    assert len(served.plane.shoal.services.show("hello")["servers"]) == 1


def test_killed_control_plane_goes_on_with_the_replicas_there_are(served: Served) -> None:
    served.serve(replicas=2)
    before = sorted(map(ask, served.until_ready(2)))
    served.plane.kill()
    served.plane.up()
    assert sorted(map(ask, served.addresses())) == before
    served.plane.command("scale", "hello", "3")
    served.until_ready(3)
    jobs = served.plane.shoal.jobs(name="hello")
    assert sum(1 for _ in jobs) == 3
