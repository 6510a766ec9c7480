"""Replicas on a real control plane cannot be called past the balancer."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client.credentials import LOCAL, Credentials
from tests.support.planes.real import RealPlane, until
from tests.support.serving.service import RepeatingCaller, ServedApp, server_pid

pytestmark = pytest.mark.slow
PATH = "/default/hello/"
SERVER = """
import http.server, os, socketserver, sys, time
KEY = os.environ["SHOAL_REPLICA_KEY"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers["content-length"] or 0))
        time.sleep(float(os.environ.get("TAKES_S", "0")) if self.path != "/health" else 0)
        body = f"{os.environ['SHOAL_JOB_NUMBER']} {self.headers}".encode()
        is_known = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if is_known else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *_): pass
class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer): pass
if "SHOAL_SOCKET" in os.environ:
    server = OnSocket(os.environ["SHOAL_SOCKET"], Handler)
else:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
server.serve_forever()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    plane = RealPlane(tmp_path / "home", "--serve-on", "127.0.0.1:0", demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    started = ServedApp(plane, folder)
    (folder / "server.py").write_text(SERVER)
    yield started
    plane.down()


def address_of(served: ServedApp) -> str:
    url = until(lambda: served.plane.shoal.services.show("hello")["url"], "the data plane listens")
    return str(url).removeprefix("http://").partition("/")[0]


def token_of(served: ServedApp) -> str:
    return str(Credentials(served.plane.home).token(LOCAL))


def keys(served: ServedApp) -> dict[str, str]:
    """Return the keys of the replicas by their addresses, as data planes receive them."""
    table = served.table()
    assert table is not None
    return {replica.address: replica.secret for service in table.services for replica in service.replicas}


def call(address: str, path: str, *, bearer: str = "") -> tuple[int, str]:
    link = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(link):
        link.request("GET", path, headers={"Authorization": f"Bearer {bearer}"} if bearer else {})
        answer = link.getresponse()
        return answer.status, answer.read().decode()


def test_replica_with_its_key_answers_only_the_balancer_and_never_sees_a_callers_token(
    served: ServedApp,
) -> None:
    served.serve(replicas=2)
    served.until_ready(2)
    replica_keys, token = keys(served), token_of(served)
    (first_address, first_key), (_, others) = replica_keys.items()
    for wrong in ("", "guess", others, token):
        assert call(first_address, "/", bearer=wrong)[0] == 401
    assert call(first_address, "/", bearer=first_key)[0] == 200
    status, body = call(address_of(served), PATH, bearer=token)
    assert status == 200
    assert token.rpartition("_")[2] not in body
    assert any(key in body for key in replica_keys.values())
    assert call(address_of(served), PATH, bearer=first_key)[0] == 401


def test_keys_are_in_no_event_no_output_and_only_the_data_planes_file(served: ServedApp) -> None:
    served.serve(replicas=1)
    served.until_ready(1)
    [key] = keys(served).values()
    served.plane.command("scale", "hello", "2")
    served.until_ready(2)
    for arguments in (
        ("events", "-n", "1000", "--json"),
        ("services", "hello", "--json"),
        ("queue", "--json"),
    ):
        assert key not in served.plane.command(*arguments).stdout
    files = [path for path in served.plane.home.rglob("*") if path.is_file() and not path.is_symlink()]
    holding = [path for path in files if key.encode() in path.read_bytes()]
    assert [path.name for path in holding] == ["serving-table.json"]
    assert holding[0].stat().st_mode & 0o077 == 0
    assert "service hello scaled to 2..2 by" in served.plane.command("events", "-n", "1000").stdout


def test_service_on_unix_sockets_is_served_and_has_no_port(served: ServedApp) -> None:
    served.serve(replicas=2, port="socket")
    addresses = served.until_ready(2)
    assert all(address.startswith("unix:") for address in addresses)
    assert served.plane.shoal.services.show("hello")["servers"][0]["address"].startswith("unix:")
    with RepeatingCaller(address_of(served), PATH, token_of(served)) as caller:
        until(lambda: len(caller.answers) == 2, "both are given requests")
    assert set(caller.statuses) == {200}
    served.plane.command("stop", "hello")
    until(lambda: not served.plane.shoal.services.all(), "the service is gone")
    until(lambda: not list((served.plane.home / "sockets").iterdir()), "its sockets are gone")


def test_service_in_private_networks_is_served_and_has_no_reachable_port(served: ServedApp) -> None:
    served.serve(replicas=2, network="private", env={"TAKES_S": "0", "VERSION": "1"})
    addresses = served.until_ready(2)
    assert all(address.startswith("broker:") for address in addresses)
    with pytest.raises(OSError):
        call("127.0.0.1:8000", "/")
    with RepeatingCaller(address_of(served), PATH, token_of(served)) as caller:
        until(lambda: len(caller.answers) == 2, "both are given requests")
    assert set(caller.statuses) == {200}


def test_uvicorn_listens_on_the_socket_it_is_given(served: ServedApp) -> None:
    app = "async def app(scope, receive, send):\n"
    app += "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
    app += "    await send({'type': 'http.response.body', 'body': b'from uvicorn'})\n"
    (served.file.parent / "app.py").write_text(app)
    run = f"exec {sys.executable} -m uvicorn --uds $SHOAL_SOCKET --lifespan off app:app"
    served.serve(replicas=1, port="socket", run=run)
    served.until_ready(1)
    assert call(address_of(served), PATH, bearer=token_of(served)) == (200, "from uvicorn")


def until_answered(callers: list[RepeatingCaller], times: int) -> None:
    """Wait until each caller has got this many further replies."""
    before = [caller.statuses.total() for caller in callers]

    def are_answered() -> bool:
        pairs = zip(callers, before, strict=True)
        return all(caller.statuses.total() >= count + times for caller, count in pairs)

    until(are_answered, f"everybody is answered {times} times more")


def test_no_post_fails_when_a_replica_of_a_repeatable_service_is_killed(served: ServedApp) -> None:
    served.serve(replicas=2, repeatable=True, env={"TAKES_S": "0.05", "VERSION": "1"})
    served.until_ready(2)
    address, token = address_of(served), token_of(served)
    callers = [RepeatingCaller(address, PATH, token, body=b"{}") for _ in range(8)]
    with contextlib.ExitStack() as all_of_them:
        for caller in callers:
            all_of_them.enter_context(caller)
        for _ in range(3):
            until_answered(callers, 3)
            [(first, at), *_] = served.replicas().items()
            os.kill(server_pid(at), signal.SIGKILL)
            served.until_other(first)
            served.until_ready(2)
        until_answered(callers, 3)
    assert {status for caller in callers for status in caller.statuses} == {200}
