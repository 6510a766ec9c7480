"""A benchmark that measures wrongly is worse than none."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks import http_load
from benchmarks.measure import Doorbell, percentile, table, timed, times
from benchmarks.processes import BenchmarkError, descendants, is_gone, spawn, stop, wait_until


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([7.0], 0.5) == 7


def test_a_ratio_without_a_peer_is_a_dash() -> None:
    assert times(3.0, 2.0) == "1.50x"
    assert times(3.0, None) == "-"


def test_table_columns_line_up() -> None:
    _, _, header, _, first, second, *_ = table(
        "t", ["a", "bb"], [["long cell", "1"], ["x", "22"]]
    ).splitlines()
    assert header.index("bb") == first.index("1") == second.index("22") == len("long cell") + 2


def test_every_task_is_timed_once() -> None:
    seen: list[int] = []
    _, each = timed(seen.append, 20, at_once=4)
    assert sorted(seen) == list(range(20))
    assert len(each) == 20


def test_the_doorbell_hears_a_job_and_knows_when() -> None:
    with Doorbell() as doorbell:
        before = time.time()
        subprocess.run(["sh", "-c", doorbell.script("job-1")], check=True)
        rang = doorbell.wait("job-1", 20)
        assert before <= rang <= time.time()
        with pytest.raises(TimeoutError, match="job-2"):
            doorbell.wait("job-2", 0.01)


class Echo(BaseHTTPRequestHandler):
    """Answers with the request's body; `/teapot` is refused."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(418 if self.path == "/teapot" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield int(server.server_address[1])
        server.shutdown()
        thread.join()


def test_load_sends_every_request_once_over_all_connections(port: int) -> None:
    def render(index: int) -> bytes:
        return http_load.request("POST", "/", {}, f"{index};".encode() * 30_000)

    load = http_load.run(port, render, 25, connections=4)
    assert sorted(int(body.partition(b";")[0]) for body in load.bodies) == list(range(25))
    assert {len(set(body.split(b";"))) for body in load.bodies} == {2}
    assert len(load.each_s) == 25
    assert load.rate > 0


def test_load_stops_at_an_answer_that_was_not_expected(port: int) -> None:
    with pytest.raises(BenchmarkError, match="418"):
        http_load.run(port, lambda _: http_load.request("POST", "/teapot", {}), 3, connections=1)


def test_stop_ends_a_process_that_ignores_sigterm(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stubborn")
    ready = folder / "ready"
    script = f"trap '' TERM; sleep 600 & : > {ready}; wait; wait"
    process = spawn(["sh", "-c", script], log=folder / "log")
    while not ready.exists():
        time.sleep(0.01)
    tree = descendants([process.pid])
    assert len(tree) == 2
    stop(tree, grace_s=0.3)
    process.wait(timeout=20)
    wait_until(lambda: all(is_gone(pid) for pid in tree), 20, "the end of the whole tree")
