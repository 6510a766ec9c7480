"""A server that can sleep, on a real cluster: it sleeps without requests, and no request is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client.credentials import LOCAL, Credentials
from tests.support.planes.real import RealPlane, until
from tests.support.serving.service import RepeatingCaller, ServedApp

pytestmark = pytest.mark.slow
ABLE = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    is_asleep, wakes = False, 0
    def do_GET(self):
        if self.path == "/is_sleeping":
            self.answer(200, '{"is_sleeping": %s}' % str(Handler.is_asleep).lower())
        elif self.path == "/health" or not Handler.is_asleep:
            self.answer(200, f"{Handler.wakes} {os.environ['SHOAL_JOB_NUMBER']}")
        else:
            self.answer(500, "asleep")
    def do_POST(self):
        Handler.is_asleep = self.path.startswith("/sleep")
        Handler.wakes += self.path == "/wake_up"
        self.answer(200, "")
    def answer(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


UNABLE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        was_forked = "shoal_warm.zygote" in sys.modules
        text = f"{os.getpid()}-{was_forked} {os.environ['SHOAL_JOB_NUMBER']}"
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedApp]:
    plane = RealPlane(tmp_path / "home", "--serve-on", "127.0.0.1:0", demo="1x2")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield ServedApp(plane, folder)
    plane.down()


def sleeping(served: ServedApp, server: str) -> tuple[str, str]:
    """Put this server to sleep; return its address and a token for it."""
    (served.file.parent / "server.py").write_text(server)
    served.serve(replicas=1, scale={"sleep_after": 1, "window": 1})
    url = until(lambda: served.plane.shoal.services.show("hello")["url"], "the data plane listens")
    until_asleep(served)
    address = str(url).removeprefix("http://").partition("/")[0]
    return address, str(Credentials(served.plane.home).token(LOCAL))


def until_asleep(served: ServedApp) -> None:
    def states() -> list[str]:
        return [server["state"] for server in served.plane.shoal.services.show("hello")["servers"]]

    until(lambda: states() == ["asleep"], "it sleeps")


def test_last_replica_sleeps_without_requests_and_wakes_for_the_next_ones(served: ServedApp) -> None:
    address, token = sleeping(served, ABLE)
    for wakes in ("1", "2"):
        until_asleep(served)
        with RepeatingCaller(address, "/default/hello/", token) as caller:
            until(lambda: sum(caller.statuses.values()) > 5, "held requests are answered")
        assert set(caller.statuses) == {200}
        assert set(caller.answers) == {wakes}
    assert sum(1 for _ in served.plane.shoal.jobs(name="hello")) == 1


def test_python_server_that_cannot_sleep_is_stopped_and_forked_again_with_its_imports(
    served: ServedApp,
) -> None:
    address, token = sleeping(served, UNABLE)
    pids = set()
    for _ in range(2):
        until_asleep(served)
        with RepeatingCaller(address, "/default/hello/", token) as caller:
            until(lambda: sum(caller.statuses.values()) > 5, "held requests are answered")
        assert set(caller.statuses) == {200}
        [answer] = caller.answers
        pid, _, was_forked = answer.partition("-")
        pids.add(pid)
        assert was_forked == "True"
    assert len(pids) == 2
    assert sum(1 for _ in served.plane.shoal.jobs(name="hello")) == 1
