"""`python -m benchmarks.scaling [--plot FILE.png]`: load takes a service from no replica to eight and back.

Starts a cluster of simulated nodes with real servers on them, raises and lowers the number of callers, and
shows what followed, second by second. Every request is counted: one that fails is a failure of the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.shoal import PROJECT, Shoal
from benchmarks.processes import wait_until
from benchmarks.scaling.load import Callers
from benchmarks.scaling.timeline import Moment, draw, lines, num_turns, steps

MOST = 8
PHASES = ((4, 0), (8, 1), (8, 16), (14, 64), (8, 16), (8, 1))
"""Seconds, and the number of callers during them. Then no callers, until the service sleeps."""
EVERY_S = 0.5
SLEEPS_WITHIN_S = 120.0
SERVER = """exec python3 - <<'END'
import http.server, os, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        time.sleep(0.2 if self.path == "/work" else 0)
        self.wfile.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer.request_queue_size = 128
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
END"""
SPEC = {
    "kind": "service",
    "name": "scaled",
    "run": SERVER,
    "workdir": None,
    "resources": {"gpus": 1},
    "replicas": f"0..{MOST}",
    "cap": 8,
    "readiness": {"path": "/health", "interval": 0.1},
    # Of minutes, seconds are made: what is shown is the order of things.
    "scale": {"target": "concurrency", "value": 8, "window": 2, "cooldown": 5, "to_zero_after": 5},
    "drain": "10s",
    "grace": "1s",
}


class Watch:
    """Records the state every half second."""

    def __init__(self, cluster: Shoal, service_id: str, callers: Callers) -> None:
        self._cluster = cluster
        self._path = f"/v1/services/{service_id}"
        self._callers = callers
        self._began = self._at = time.monotonic()
        self._answered = 0
        self.moments: list[Moment] = []
        self.shown: dict[str, Any] = {}

    def look(self) -> Moment:
        time.sleep(max(0.0, self._at + EVERY_S - time.monotonic()))
        self.shown = self._cluster.request("GET", self._path)
        now, answered = time.monotonic(), self._callers.answered
        moment = Moment(
            at=now - self._began,
            rps=(answered - self._answered) / (now - self._at),
            in_flight=self._callers.outstanding,
            queued=(self.shown["load"] or {"queued": 0})["queued"],
            wanted=self.shown["replicas"],
            ready=self.shown["ready"],
        )
        self._at, self._answered = now, answered
        self.moments.append(moment)
        return moment


def drive(cluster: Shoal) -> tuple[Watch, Callers]:
    service_id = cluster.request("POST", "/v1/services", {"spec": SPEC, "project": PROJECT})["id"]

    def url() -> str:
        return str(cluster.request("GET", f"/v1/services/{service_id}")["url"] or "")

    wait_until(lambda: bool(url()), 60, "a data plane for the service")
    port = int(url().split("/")[2].rpartition(":")[2])
    with Callers(port, f"/{PROJECT}/scaled/work", cluster.token) as callers:
        watch = Watch(cluster, service_id, callers)
        for seconds, count in PHASES:
            callers.wanted = count
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                watch.look()
        callers.wanted = 0
        ends = time.monotonic() + SLEEPS_WITHIN_S
        while watch.look().wanted + watch.moments[-1].ready > 0 and time.monotonic() < ends:
            pass
    return watch, callers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the timeline as .png or .svg")
    options = parser.parse_args()
    with Shoal(demo="2x4") as cluster:
        watch, callers = drive(cluster)
    counts = steps(watch.moments)
    print("\n".join(lines(watch.moments)))
    print(f"\nreplicas wanted: {', then '.join(map(str, counts))}; {num_turns(counts)} change of direction")
    for resize in watch.shown["resizes"]:
        print(f"  {resize['replicas']}: {resize['because']}")
    print(f"requests: {callers.sent} sent, {callers.answered} answered, {len(callers.failures)} failed")
    print(f"the longest, held for a cold start: {callers.longest_s:.1f} s")
    if options.plot:
        draw(watch.moments, options.plot)
        print(f"the timeline is in {options.plot}")
    is_so = counts[-1] == 0 and max(counts) == MOST and callers.sent == callers.answered
    if not is_so:
        print("FAILED: " + "; ".join(callers.failures[:5] or [f"the replicas were {counts}"]))
    return 0 if is_so else 1


if __name__ == "__main__":
    sys.exit(main())
