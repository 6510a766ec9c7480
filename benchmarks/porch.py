"""What the replica sidecar costs: CPU of a request to a replica behind one, against the same replica at its
own port.

    python -m benchmarks.porch [--requests 20000] [--rounds 5]

One data plane serves both ways to one server, in turn. CPU is that of the data plane and of the sidecar, on
loopback: TLS at both ends and the second hop, without a network.
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
from shoal.control.services.state import SidecarIdentities
from shoal.identity.authority import make_authority
from shoal.runtime.replica.sidecar_config import LISTENER_FD, SidecarConfig, memory_file
from shoal.serving.table import ReplicaConfig, ServiceConfig, ServingTable
from shoal.sidecar_tls import sidecar_name

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
"""The largest requests are sent this many times less often."""


def start_porch(porches: SidecarIdentities, server: str) -> tuple[int, int]:
    """Its process and its port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        config_file = memory_file(
            SidecarConfig(
                tls_identity=porches.for_sidecar(ATTEMPT), server=server, supervisor_pid=os.getpid()
            )
        )
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "shoal.runtime.replica.sidecar"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, listener.fileno(), LISTENER_FD + 100),
                (os.POSIX_SPAWN_DUP2, config_file, 0),
                (os.POSIX_SPAWN_DUP2, LISTENER_FD + 100, LISTENER_FD),
            ],
        )
        os.close(config_file)
        return pid, int(listener.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[int, dict[str, tuple[int, ...]]]]:
    """Yield the data plane's port, and by service the processes whose CPU its requests use."""
    behind, port = free_ports(2)
    porches = SidecarIdentities(make_authority("benchmark", time.time()), SystemClock())
    server = spawn(
        [sys.executable, "-m", "benchmarks.proxy.upstream", str(behind)],
        log=folder / "server.log",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    porch, at = start_porch(porches, f"127.0.0.1:{behind}")
    ways = {
        "direct": ReplicaConfig(replica_id="direct", address=f"127.0.0.1:{behind}", release=1),
        "porch": ReplicaConfig(
            replica_id="porch", address=f"tls:127.0.0.1:{at}", release=1, name=sidecar_name(ATTEMPT)
        ),
    }
    services = tuple(
        ServiceConfig(project="p", name=name, replicas=(replica,), is_public=True)
        for name, replica in ways.items()
    )
    table_file = folder / "table.json"
    table_file.write_bytes(
        msgspec.json.encode(
            ServingTable(version=1, services=services, tls_identity=porches.for_data_planes())
        )
    )
    arguments = ["-m", "shoal.serving", "--listen", f"127.0.0.1:{port}", "--table", str(table_file)]
    plane = spawn([sys.executable, *arguments], log=folder / "plane.log")
    try:
        wait_until(lambda: answers(port) and answers(behind) and answers(at), START_S, "everything listens")
        yield port, {"direct": (plane.pid,), "porch": (plane.pid, porch)}
    finally:
        stop([plane.pid, server.pid, porch])


def cost_us(port: int, pids: tuple[int, ...], name: str, case: tuple[str, str, bytes], count: int) -> float:
    """Return the CPU of one request, in microseconds."""
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
