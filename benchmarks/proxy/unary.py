"""A burst of requests from wrk: how many were answered, how many failed, how long they took."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

from benchmarks.proxy.contestants import Contestant
from benchmarks.proxy.payload import CHAT, POST_BYTES, chat

POST = """
wrk.method = "POST"
wrk.body = [[{body}]]
wrk.headers["content-type"] = "application/json"
"""
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
REQUESTS = re.compile(r"(\d+) requests in")
BAD = re.compile(r"Non-2xx or 3xx responses: (\d+)")
BROKEN = re.compile(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)")


@dataclass(frozen=True)
class Burst:
    requests: int
    failed: int
    p50_s: float
    p99_s: float


def burst(contestant: Contestant, port: int, method: str, connections: int, seconds: float) -> Burst:
    words = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency"]
    for header in contestant.headers:
        words += ["-H", header]
    path = CHAT if method == "POST" else contestant.get
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        if method == "POST":
            script.write(POST.format(body=chat(size=POST_BYTES).decode()))
            script.flush()
            words += ["-s", script.name]
        url = f"http://127.0.0.1:{port}{contestant.under}{path}"
        done = subprocess.run([*words, url], capture_output=True, text=True, check=True, timeout=seconds + 60)
    return parse(done.stdout)


def parse(text: str) -> Burst:
    """What wrk printed."""
    requests = REQUESTS.search(text)
    bad, broken = BAD.search(text), BROKEN.search(text)
    failed = int(bad[1]) if bad else 0
    failed += sum(map(int, broken.groups())) if broken else 0
    return Burst(int(requests[1]) if requests else 0, failed, _latency(text, 50), _latency(text, 99))


def _latency(text: str, share: int) -> float:
    found = re.search(rf"^\s+{share}%\s+([\d.]+)(us|ms|s|m)$", text, re.MULTILINE)
    return float(found[1]) * UNITS[found[2]] if found else 0.0
