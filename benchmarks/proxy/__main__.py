"""CPU of a proxy for each request, latency added, memory: Shoal beside nginx, HAProxy and others, in one run.

    python -m benchmarks.proxy [--cycles 6] [--seconds 2] [--only Shoal,nginx]

All proxies stay up; in each cycle every one gets a short burst, in random order, and is compared with nginx's
burst of the same cycle. The figure is the median of those ratios: a busy machine slows all of them down. CPU
is what the kernel charged to the proxy's processes, not wall time. A contestant that is not installed is left
out and named.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import megabytes, milliseconds, table
from benchmarks.processes import answers, descendants, free_ports, spawn, stop, usage, wait_until
from benchmarks.proxy.contestants import EVERYBODY, Contestant
from benchmarks.proxy.unary import Burst, burst

CASES = {
    "GET 1 KB, 32 connections": ("GET", 32),
    "GET 1 KB, 256 connections": ("GET", 256),
    "POST 4 KB, 32 connections": ("POST", 32),
    "POST 4 KB, 256 connections": ("POST", 256),
}
STREAMS = (64, 256)
PACED = "GET 1 KB, one connection"
UPSTREAMS = 2


@dataclass
class Running:
    contestant: Contestant
    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Of all its processes, as exact as the scheduler's own count."""
        return sum(map(_charged_s, descendants([self.process.pid])))


def _charged_s(pid: int) -> float:
    charged = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        charged += int(path.read_text().split()[0]) / 1e9
    return charged


def one_burst(running: Running, method: str, connections: int, seconds: float) -> tuple[float, Burst]:
    """CPU microseconds a request, and what the callers saw."""
    before = running.cpu_s()
    seen = burst(running.contestant, running.port, method, connections, seconds)
    return (running.cpu_s() - before) / max(seen.requests, 1) * 1e6, seen


def streams(running: Running, count: int) -> tuple[float, dict[str, float]]:
    """CPU microseconds an event, and how late events were."""
    path = f"{running.contestant.path.rstrip('/')}/sse"
    words = [sys.executable, "-m", "benchmarks.proxy.streams", str(running.port), path, str(count)]
    before = running.cpu_s()
    done = subprocess.run(
        [*words, *running.contestant.headers], capture_output=True, text=True, check=True, timeout=120
    )
    seen: dict[str, float] = json.loads(done.stdout)
    return (running.cpu_s() - before) / max(seen["came"], 1) * 1e6, seen


def measure_unary(
    everybody: list[Running], direct: Contestant, port: int, cycles: int, seconds: float
) -> None:
    for title, (method, connections) in CASES.items():
        costs: dict[str, list[float]] = defaultdict(list)
        rates: dict[str, float] = defaultdict(float)
        failed: dict[str, int] = defaultdict(int)
        for _ in range(cycles):
            for running in random.sample(everybody, len(everybody)):
                cost, seen = one_burst(running, method, connections, seconds)
                name = running.contestant.name
                costs[name].append(cost)
                rates[name] = max(rates[name], seen.requests / seconds)
                failed[name] += seen.failed
        rows = [
            [
                name,
                f"{statistics.median(costs[name]):.1f}",
                _beside(costs, name),
                f"{rates[name]:,.0f}",
                str(failed[name]),
            ]
            for name in costs
        ]
        header = ["", "CPU us a request", "beside nginx", "best requests/s", "failed"]
        print(table(f"{title}, measured, median of {cycles} paired bursts", header, rows), flush=True)
    measure_paced(everybody, direct, port, cycles, seconds)


def measure_paced(
    everybody: list[Running], direct: Contestant, port: int, cycles: int, seconds: float
) -> None:
    """What a proxy adds when nothing waits for anything: one connection, one request after the other."""
    p50: dict[str, list[float]] = defaultdict(list)
    p99: dict[str, list[float]] = defaultdict(list)
    for _ in range(cycles):
        for contestant, at in random.sample(
            [(direct, port), *((r.contestant, r.port) for r in everybody)], len(everybody) + 1
        ):
            seen = burst(contestant, at, "GET", 1, seconds)
            p50[contestant.name].append(seen.p50_s)
            p99[contestant.name].append(seen.p99_s)
    base50, base99 = statistics.median(p50[direct.name]), statistics.median(p99[direct.name])
    memory = {r.contestant.name: usage(descendants([r.process.pid])).pss_bytes for r in everybody}
    rows = [
        [
            name,
            f"{(statistics.median(p50[name]) - base50) * 1000:+.2f} ms",
            f"{(statistics.median(p99[name]) - base99) * 1000:+.2f} ms",
            megabytes(memory[name]) if name in memory else "-",
        ]
        for name in p50
    ]
    notes = [f"direct: p50 {milliseconds(base50)}, p99 {milliseconds(base99)}"]
    print(table(f"{PACED}, measured", ["", "added p50", "added p99", "memory"], rows, notes), flush=True)


def measure_streams(everybody: list[Running], cycles: int) -> None:
    for count in STREAMS:
        costs: dict[str, list[float]] = defaultdict(list)
        late: dict[str, list[float]] = defaultdict(list)
        missing: dict[str, int] = defaultdict(int)
        for _ in range(cycles):
            for running in random.sample(everybody, len(everybody)):
                cost, seen = streams(running, count)
                name = running.contestant.name
                costs[name].append(cost)
                late[name].append(seen["p50_s"])
                missing[name] += int(seen["expected"] - seen["came"])
        rows = [
            [
                name,
                f"{statistics.median(costs[name]):.1f}",
                _beside(costs, name),
                f"{statistics.median(late[name]) * 1000:.2f} ms",
                str(missing[name]),
            ]
            for name in costs
        ]
        header = ["", "CPU us an event", "beside nginx", "p50 delay", "missing"]
        print(
            table(f"{count} event streams, measured, median of {cycles} paired runs", header, rows),
            flush=True,
        )


def _beside(costs: dict[str, list[float]], name: str) -> str:
    if "nginx" not in costs:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(costs[name], costs['nginx'], strict=True)):.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    asked = parser.parse_args()
    wanted = [word.strip() for word in asked.only.split(",") if word.strip()]
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="proxy-") as name:
        folder = Path(name)
        try:
            behind = free_ports(UPSTREAMS)
            for port in behind:
                words = [sys.executable, "-m", "benchmarks.proxy.upstream", str(port)]
                started.append(_begin(words, folder, port))
            everybody = []
            for make in EVERYBODY:
                [port] = free_ports(1)
                contestant = make(folder, port, behind)
                if contestant is None:
                    sys.stderr.write(f"left out, not installed: {make.__name__}\n")
                elif not wanted or contestant.name in wanted:
                    started.append(_begin(contestant.command, folder, port))
                    everybody.append(Running(contestant, port, started[-1]))
            direct = Contestant("direct", [])
            measure_unary(everybody, direct, behind[0], asked.cycles, asked.seconds)
            measure_streams(everybody, asked.cycles)
        finally:
            stop({pid for one in started for pid in descendants([one.pid])})


def _begin(command: list[str], folder: Path, port: int) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    process = spawn(
        command,
        log=folder / f"{port}.log",
        env={"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": "/usr/bin:/bin"},
    )
    wait_until(lambda: answers(port), 30.0, f"{Path(command[0]).name} answering on {port}")
    return process


if __name__ == "__main__":
    main()
