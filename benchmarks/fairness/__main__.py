"""`python -m benchmarks.fairness [--rounds 3]`: one caller at a hundred times its share, over real sockets.

Ten callers ask one request at a time. They run alone, then beside a caller that keeps a hundred requests
open, then beside the same caller when all have one token and cannot be told apart. Each round has all three.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from benchmarks.measure import milliseconds, percentile, table, times
from shoal.serving.admission.accounts import digest_of
from shoal.serving.feed import write_whole
from shoal.serving.table import AllowedCaller, ReplicaConfig, ServiceConfig, ServingTable

TAKES_S = 0.1
REPLICAS, CAP = 4, 16
OTHERS, GREEDY = 10, 100
PHASE_S = 5.0
NAMES = tuple(f"other-{number}" for number in range(OTHERS))


@contextmanager
def data_plane() -> Iterator[int]:
    """Yield its port. None of its processes is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-fairness-") as place,
        _started("benchmarks.fairness.upstream", str(REPLICAS), str(TAKES_S)) as ports,
    ):
        write_whole(Path(place) / "table", msgspec.json.encode(_table(ports.split())))
        with _started("shoal.serving", "--listen", "127.0.0.1:0", "--table", f"{place}/table") as address:
            yield int(address.rpartition(":")[2])


@contextmanager
def _started(module: str, *options: str) -> Iterator[str]:
    """Yield the first line that the program prints, while it runs."""
    command = [sys.executable, "-m", module, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.kill()


def _table(ports: list[str]) -> ServingTable:
    callers = [AllowedCaller(digest=digest_of(name), name=name, project="p") for name in (*NAMES, "greedy")]
    replicas = [ReplicaConfig(replica_id=port, address=f"127.0.0.1:{port}", release=1) for port in ports]
    service = ServiceConfig(project="p", name="s", replicas=tuple(replicas), cap=CAP, callers=tuple(callers))
    return ServingTable(version=1, services=(service,))


async def call(port: int, token: str, until: float, pause_s: float, took: list[float]) -> None:
    """Send one request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"GET /p/s/ HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token}\r\n\r\n".encode()
    await asyncio.sleep(random.uniform(0, TAKES_S))
    while time.monotonic() < until:
        began = time.monotonic()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        assert head.startswith(b"HTTP/1.1 200 "), head
        took.append(time.monotonic() - began)
        await asyncio.sleep(random.uniform(0, 2 * pause_s))
    writer.close()


async def phase(
    port: int, *, has_greedy: bool, is_one_token: bool, seconds: float
) -> tuple[list[float], int]:
    """Return how long the requests of the ten took, and how many of the greedy caller's were answered."""
    until = time.monotonic() + seconds
    took: list[float] = []
    greedy: list[float] = []
    async with asyncio.TaskGroup() as group:
        for name in NAMES:
            group.create_task(call(port, "greedy" if is_one_token else name, until, 0.02, took))
        for _ in range(GREEDY if has_greedy else 0):
            group.create_task(call(port, "greedy", until, 0.0, greedy))
    return took, len(greedy)


PHASES = {
    "alone": {"has_greedy": False, "is_one_token": False},
    "beside the greedy one": {"has_greedy": True, "is_one_token": False},
    "the same, all with one token": {"has_greedy": True, "is_one_token": True},
}


async def measure(port: int, rounds: int, seconds: float) -> dict[str, tuple[list[float], int]]:
    by_phase: dict[str, tuple[list[float], int]] = {name: ([], 0) for name in PHASES}
    await phase(port, has_greedy=True, is_one_token=False, seconds=1.0)
    for _ in range(rounds):
        for name, kind in PHASES.items():
            took, greedy = await phase(port, **kind, seconds=seconds)
            by_phase[name] = ([*by_phase[name][0], *took], by_phase[name][1] + greedy)
    return by_phase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=PHASE_S, help="of each phase of a round")
    options = parser.parse_args()
    with data_plane() as port:
        measured = uvloop.run(measure(port, options.rounds, options.seconds))
    base = measured["alone"][0]
    rows = [
        [
            name,
            str(len(took)),
            str(greedy),
            milliseconds(percentile(took, 0.5)),
            milliseconds(percentile(took, 0.99)),
            times(percentile(took, 0.99), percentile(base, 0.99)),
        ]
        for name, (took, greedy) in measured.items()
    ]
    slots = (
        f"{REPLICAS} replicas of {CAP} slots, {milliseconds(TAKES_S)} a request, half more or less; measured"
    )
    title = f"Ten callers with one request each, one with {GREEDY} at once"
    heads = ("the ten", "their requests", "the greedy one's", "p50", "p99", "p99, of alone")
    print(table(title, heads, rows, [slots]))


if __name__ == "__main__":
    main()
