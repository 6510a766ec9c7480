"""What a porch costs: CPU of a request to a replica behind one, against the same replica at its own port.

    python -m benchmarks.porch [--requests 20000] [--rounds 5]

One data plane serves both ways to one server, in turn. CPU is that of the data plane and of the porch,
on loopback: TLS at both ends and the second hop, without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks import http_load
from benchmarks.measure import table, times
from benchmarks.processes import BenchmarkError, answers, free_ports, spawn, stop, usage, wait_until
from shoal.clock import SystemClock
from shoal.control.services.porches import Porches
from shoal.identity.authority import make_authority
from shoal.porch import name_of
from shoal.runtime.porch.brief import LISTENER, Brief, in_memory
from shoal.serving.table import Replica, Service, Table

ROOT = Path(__file__).resolve().parents[1]
ATTEMPT = "att_benchmark"
CONNECTIONS = 32
START_S = 30.0
CASES = (
    ("GET 1 KB", "GET", b""),
    ("POST 4 KB", "POST", b"x" * 4096),
    ("POST 1 MB", "POST", b"x" * (1 << 20)),
)
FEWER = 50
"""Of the largest requests."""


def start_porch(porches: Porches, server: str) -> tuple[int, int]:
    """Its process and its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        told = in_memory(Brief(papers=porches.before(ATTEMPT), server=server, supervisor=os.getpid()))
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "shoal.runtime.porch"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, listener.fileno(), LISTENER + 100),
                (os.POSIX_SPAWN_DUP2, told, 0),
                (os.POSIX_SPAWN_DUP2, LISTENER + 100, LISTENER),
            ],
        )
        os.close(told)
        return pid, int(listener.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[int, dict[str, tuple[int, ...]]]]:
    """The data plane's port, and by service whose CPU its requests take."""
    behind, port = free_ports(2)
    porches = Porches(make_authority("benchmark", time.time()), SystemClock())
    server = spawn(
        [sys.executable, "-m", "benchmarks.proxy.upstream", str(behind)],
        log=folder / "server.log",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    porch, at = start_porch(porches, f"127.0.0.1:{behind}")
    ways = {
        "direct": Replica(replica_id="direct", address=f"127.0.0.1:{behind}", release=1),
        "porch": Replica(replica_id="porch", address=f"tls:127.0.0.1:{at}", release=1, name=name_of(ATTEMPT)),
    }
    services = tuple(
        Service(project="p", name=name, replicas=(replica,), is_public=True) for name, replica in ways.items()
    )
    told = folder / "table.json"
    told.write_bytes(msgspec.json.encode(Table(version=1, services=services, papers=porches.visitors())))
    words = ["-m", "shoal.serving", "--listen", f"127.0.0.1:{port}", "--table", str(told)]
    plane = spawn([sys.executable, *words], log=folder / "plane.log")
    try:
        wait_until(lambda: answers(port) and answers(behind) and answers(at), START_S, "everything listens")
        yield port, {"direct": (plane.pid,), "porch": (plane.pid, porch)}
    finally:
        stop([plane.pid, server.pid, porch])


def cost_us(port: int, pids: tuple[int, ...], name: str, case: tuple[str, str, bytes], count: int) -> float:
    """CPU of one request, in microseconds."""
    _, method, body = case
    count = count // FEWER if len(body) > 1 << 16 else count
    raw = http_load.request(method, f"/p/{name}/", {}, body)
    before = usage(pids).cpu_s
    http_load.run(port, lambda _: raw, count, connections=CONNECTIONS)
    return (usage(pids).cpu_s - before) / count * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as (port, ways):
        for case in CASES:
            seen: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.rounds):
                for name, pids in ways.items():
                    seen[name].append(cost_us(port, pids, name, case, args.requests))
            direct, porch = (statistics.median(seen[name]) for name in ("direct", "porch"))
            ratio = statistics.median(b / a for a, b in zip(*seen.values(), strict=True))
            rows.append((case[0], f"{direct:.1f}", f"{porch:.1f}", times(ratio, 1.0)))
    header = ("request", "direct, us of CPU", "through a porch", "times")
    notes = (f"medians of {args.rounds} rounds; {CONNECTIONS} connections",)
    print(table("CPU of a request, data plane and porch", header, rows, notes))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
