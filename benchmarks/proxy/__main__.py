"""CPU of a proxy per request, latency added, and memory: Shoal beside nginx, HAProxy and others, in one run.

    python -m benchmarks.proxy [--rounds 5] [--only "Shoal;nginx"] [--cases "POST 4 KB, 32"] [--no-ray]

All proxies stay up. In each round every proxy gets a short burst of each case, in random order, and is
compared with nginx's burst of the same round. The figure is the median of those ratios, because a busy
machine slows all of them down. CPU is what the kernel charged to the proxy's processes, not wall time. The
proxies have one core; the callers and the servers behind them have the others. Ray Serve has no proxy without
its replicas, so it gets rounds of its own beside Shoal in front of the same program, on all cores. A
contestant that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import private_network
from benchmarks.measure import megabytes, table
from benchmarks.processes import BenchmarkError, free_ports
from benchmarks.proxy.contestants import ALL_ON, PROXIES, WHOLE, Contestant, LeftOut, Maker
from benchmarks.proxy.goals import goals
from benchmarks.proxy.running import Field, Running, on
from benchmarks.proxy.samples import Case, Samples

UNARY = (
    Case("GET 1 KB, 32 connections", "GET", 32),
    Case("GET 1 KB, 256 connections", "GET", 256),
    Case("POST 4 KB, 32 connections", "POST", 32),
    Case("POST 4 KB, 256 connections", "POST", 256),
)
FRESH = (
    Case("GET 1 KB, 32 connections, an id and a trace each", "GET", 32, is_fresh=True),
    Case("POST 4 KB, 32 connections, an id and a trace each", "POST", 32, is_fresh=True),
)
UNLIKE = (
    Case("GET 1 KB, 32 connections, a query and a cookie each", "GET", 32, is_fresh=True, is_unlike=True),
)
STREAMS = (Case("64 event streams", "stream", 64), Case("256 event streams", "stream", 256))
REST = Case("GET 1 KB, one request at a time", "GET", 1)
END_TO_END = (
    Case("end to end: GET 1 KB, 32 connections", "GET", 32),
    Case("end to end: POST 4 KB, 32 connections", "POST", 32),
)
EVENTS = Case("end to end: 64 event streams", "stream", 64)
NUM_BEHIND = 2
BURST_S = 1.0


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def behind(field: Field, *command: str) -> list[Running]:
    """Servers for the proxies to have behind them. `words` start one; its port follows them."""
    ports = free_ports(NUM_BEHIND)
    return [field.begin(Contestant("direct", [sys.executable, *command, str(port)]), port) for port in ports]


def start(makers: Sequence[Maker], field: Field, servers: list[Running], wanted: list[str]) -> list[Running]:
    """Start those that are installed. The others are named with the reason."""
    running: list[Running] = []
    for make in makers:
        [port] = free_ports(1)
        try:
            contestant = make(field.folder, port, [server.port for server in servers])
            if not wanted or contestant.name in wanted:
                say(f"starting {contestant.name}")
                running.append(field.begin(contestant, port))
        except (LeftOut, BenchmarkError) as error:
            say(f"left out: {make.__name__}: {error}")
    return running


def measure(contestants: Sequence[Running], cases: Sequence[Case], rounds: int, samples: Samples) -> None:
    """Send every case to every proxy in every round, in random order. A proxy that has just started warms up
    first.
    """
    for running in contestants:
        running.sample(cases[0], BURST_S)
    for done in range(rounds):
        began = time.monotonic()
        for case in cases:
            for running in random.sample(contestants, len(contestants)):
                samples.add(case, running.contestant.name, running.sample(case, BURST_S))
        say(f"round {done + 1} of {rounds} took {time.monotonic() - began:.0f} s")


def costs(samples: Samples, case: Case, names: Sequence[str], beside: str, rounds: int) -> str:
    """Of one case: CPU, ratio, rate, and what the callers saw."""
    rows = []
    for name in names:
        is_direct = name == "direct"
        has_ratio = not is_direct and beside in names
        rows.append(
            [
                name,
                "-" if is_direct else f"{samples.cpu_us(case, name):.1f}",
                f"{samples.cost(case, name, beside):.2f}x" if has_ratio else "-",
                f"{samples.rate(case, name):,.0f}",
                f"{samples.p50_s(case, name) * 1000:.2f} ms",
                f"{samples.p99_s(case, name) * 1000:.2f} ms",
                str(samples.failed(case, name)),
            ]
        )
    what = "event" if case.method == "stream" else "request"
    header = ["", f"CPU us of {what}", f"beside {beside}", f"{what}s/s", "p50", "p99", "failed"]
    return table(f"{case.title} (measured, median of {rounds} rounds)", header, rows)


def at_rest(samples: Samples, contestants: Sequence[Running], rounds: int) -> str:
    """What a proxy adds if no request waits, and its memory after all of this."""
    p50_s, p99_s = samples.p50_s(REST, "direct"), samples.p99_s(REST, "direct")
    rows = [
        [
            name,
            f"{(samples.p50_s(REST, name) - p50_s) * 1000:+.2f} ms",
            f"{(samples.p99_s(REST, name) - p99_s) * 1000:+.2f} ms",
            megabytes(running.memory_bytes()),
        ]
        for running in contestants
        if (name := running.contestant.name) != "direct"
    ]
    note = f"direct: p50 {p50_s * 1000:.2f} ms, p99 {p99_s * 1000:.2f} ms; memory is proportional (PSS)"
    header = ["", "added p50", "added p99", "memory"]
    return table(f"{REST.title} (measured, median of {rounds} rounds)", header, rows, [note])


def proxies(samples: Samples, field: Field, cases: Sequence[Case], rounds: int, wanted: list[str]) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    with on(others or [first]):
        servers = behind(field, "-m", "benchmarks.proxy.upstream")
        with on([first]):
            contestants = start(PROXIES, field, servers, wanted)
        targets = [Running(servers[0].contestant, servers[0].port), *contestants]
        measure(targets, cases, rounds, samples)
    names = [running.contestant.name for running in targets]
    for case in cases:
        if case is REST:
            print(at_rest(samples, targets, rounds), flush=True)
        else:
            print(costs(samples, case, names, "nginx", rounds), flush=True)


def whole(samples: Samples, field: Field, rounds: int) -> None:
    """Ray Serve and Shoal, each with two processes of the same program behind."""
    server = (
        "-m uvicorn benchmarks.proxy.replica:program --no-access-log --log-level error --lifespan off --port"
    )
    contestants = start(WHOLE, field, behind(field, *server.split()), [])
    names = [running.contestant.name for running in contestants]
    measure(contestants, (*END_TO_END, EVENTS), rounds, samples)
    for case in (*END_TO_END, EVENTS):
        print(costs(samples, case, names, ALL_ON, rounds), flush=True)
    rows = [[running.contestant.name, megabytes(running.memory_bytes())] for running in contestants]
    print(table("end to end: memory of the proxy", ["", "PSS"], rows), flush=True)


def chosen(cases: Sequence[Case], beginnings: str) -> tuple[Case, ...]:
    """Return the cases whose titles begin with these words. If none does, `SystemExit` names all titles."""
    begins = tuple(word.strip() for word in beginnings.split(";") if word.strip())
    matching = tuple(case for case in cases if case.title.startswith(begins))
    if not matching:
        titles = "; ".join(case.title for case in cases)
        sys.exit(f"error: no case begins with `{beginnings}`\nhint: --cases takes some of: {titles}")
    return matching


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of rows, separated by semicolons")
    parser.add_argument("--no-ray", action="store_true", help="leave out what needs Ray")
    parser.add_argument("--streams", action="store_true", help="event streams alone, without Ray")
    parser.add_argument(
        "--cases", default="", help="how their titles begin, separated by semicolons; without Ray"
    )
    options = parser.parse_args()
    has_ray = not options.no_ray and not options.streams and not options.cases
    cases: Sequence[Case] = STREAMS if options.streams else (*UNARY, *FRESH, *UNLIKE, REST, *STREAMS)
    if options.cases:
        cases = chosen(cases, options.cases)
    try:
        private_network.enter()
    except BenchmarkError as error:
        say(f"left out: Ray Serve listens on every address, and {error}")
        has_ray = False
    wanted = [word.strip() for word in options.only.split(";") if word.strip()]
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="proxy-", ignore_cleanup_errors=True) as name:
        with Field(Path(name)) as field:
            proxies(samples, field, cases, options.rounds, wanted)
        if has_ray:
            with Field(Path(name)) as field:
                whole(samples, field, options.rounds)
    rows = [goal.row() for goal in goals(samples, UNARY, FRESH, STREAMS, REST, UNLIKE, END_TO_END)]
    print(table("goals, judged by Shoal with everything on", ["", "goal", "measured", ""], rows))


if __name__ == "__main__":
    main()
