"""A burst of requests from wrk: how many were answered, how many failed, how long they took."""

from __future__ import annotations

import random
import re
import subprocess
import tempfile
from dataclasses import dataclass

from benchmarks.proxy.contestants import Contestant
from benchmarks.proxy.payload import CHAT, POST_BYTES, chat
from benchmarks.proxy.samples import Case

POST = """
wrk.method = "POST"
wrk.body = [[{body}]]
wrk.headers["content-type"] = "application/json"
"""
FRESH = """
math.randomseed({seed})
local function hex(words)
  local found = ""
  for _ = 1, words do found = found .. string.format("%08x", math.random(0, 4294967295)) end
  return found
end
local is_unlike = {is_unlike}
local start, rest
function request()
  if start == nil then
    wrk.headers["x-mark"] = "here"
    local whole = wrk.format()
    local from, to = whole:find("x-mark: here", 1, true)
    start, rest = whole:sub(1, from - 1), whole:sub(to + 1)
  end
  local trace = "traceparent: 00-" .. hex(4) .. "-" .. hex(2) .. "-01"
  local first = start
  if is_unlike then
    first = start:gsub(" HTTP/1.1", "?q=" .. hex(2) .. " HTTP/1.1", 1)
    trace = trace .. "\\r\\ncookie: sid=" .. string.rep("x", math.random(1, 200))
  end
  return first .. "x-request-id: " .. hex(4) .. "\\r\\n" .. trace .. rest
end
"""
"""An id and a trace context for each request, as gateways and OpenTelemetry write them, or everything new."""
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


def burst(contestant: Contestant, port: int, case: Case, seconds: float) -> Burst:
    command = ["wrk", "-t1", f"-c{case.connections}", f"-d{max(1, round(seconds))}s", "--latency"]
    for header in contestant.headers:
        command += ["-H", header]
    path = CHAT if case.method == "POST" else contestant.get
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(lua(case))
        script.flush()
        command += ["-s", script.name]
        url = f"http://127.0.0.1:{port}{contestant.under}{path}"
        done = subprocess.run(
            [*command, url], capture_output=True, text=True, check=True, timeout=seconds + 60
        )
    return parse(done.stdout)


def lua(case: Case) -> str:
    """What wrk does in addition to requesting one URL. Seeded differently each time, so that no burst repeats
    another's heads.
    """
    text = POST.format(body=chat(size=POST_BYTES).decode()) if case.method == "POST" else ""
    if not case.is_fresh:
        return text
    return text + FRESH.format(seed=random.getrandbits(48), is_unlike=str(case.is_unlike).lower())


def parse(text: str) -> Burst:
    """Parse what wrk printed."""
    requests = REQUESTS.search(text)
    bad, broken = BAD.search(text), BROKEN.search(text)
    failed = int(bad[1]) if bad else 0
    failed += sum(map(int, broken.groups())) if broken else 0
    return Burst(int(requests[1]) if requests else 0, failed, _latency(text, 50), _latency(text, 99))


def _latency(text: str, share: int) -> float:
    match = re.search(rf"^\s+{share}%\s+([\d.]+)(us|ms|s|m)$", text, re.MULTILINE)
    return float(match[1]) * UNITS[match[2]] if match else 0.0
