"""Heavy-tailed requests in virtual time, through the real balancer and the real fair queue.

    python -m benchmarks.balancing [--requests 40000] [--seeds 3]

The first table shows what the defaults are worth: p99 of the wait for a slot, as a ratio to random placement
of the same requests. In the second table one caller asks for a hundred times its share.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.measure import table
from shoal.serving.admission.accounts import CallerAccount
from shoal.serving.balance.balancer import NO_HINTS, RoutingHints
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.balance.service import LiveService
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.table import ReplicaConfig, ServiceConfig

REPLICAS = 16
NO_CAP = 1 << 30

Draw = Callable[[random.Random], float]


def lognormal(source: random.Random) -> float:
    """Mean 1, squared coefficient of variation about 6."""
    return math.exp(source.gauss(-0.98, 1.4))


def pareto(source: random.Random) -> float:
    """Mean about 1; the variance would be infinite without the cut at 200."""
    return float(min(200.0, (1.0 - source.random()) ** (-1 / 1.5) / 3.0))


@dataclass
class SimulatedRequest:
    """A request of the simulation, with what `LiveService` needs of one."""

    at: float
    lasts: float
    account: CallerAccount
    world: World
    weight_bytes: int = 1
    hints: RoutingHints = NO_HINTS
    replica: LiveReplica | None = None

    def bind(self, replica: LiveReplica) -> None:
        self.replica = replica
        replica.outstanding += 1
        self.account.bound += 1
        self.world.service.balancer.bound(replica, self.hints)
        self.world.arrive(self, replica)

    def refuse(self, refused: ProxyRefusal) -> None:
        raise AssertionError(refused.detail)


@dataclass
class World:
    """Replicas with `slots` each. A request sent to a full replica waits there, as in a server without a
    limit.
    """

    slots: int
    cap: int
    now: float = 0.0
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    """The caller, how long it waited for a slot, how long it used the slot."""

    def __post_init__(self) -> None:
        replicas = tuple(
            ReplicaConfig(replica_id=f"r{n}", address="127.0.0.1:1", release=1) for n in range(REPLICAS)
        )
        spec = ServiceConfig(
            project="p", name="s", replicas=replicas, cap=self.cap, queue_count=NO_CAP, queue_bytes=NO_CAP
        )
        self.service = LiveService(spec)
        self.lines: dict[str, deque[SimulatedRequest]] = {
            ratios_by_policy.replica_id: deque() for ratios_by_policy in replicas
        }
        self.running = dict.fromkeys(self.lines, 0)
        self.ends: list[tuple[float, int, SimulatedRequest]] = []
        self._order = itertools.count()

    def arrive(self, request: SimulatedRequest, replica: LiveReplica) -> None:
        name = replica.spec.replica_id
        if self.running[name] < self.slots:
            self._begin(request, name)
        else:
            self.lines[name].append(request)

    def _begin(self, request: SimulatedRequest, name: str) -> None:
        self.running[name] += 1
        self.waits.append((request.account.name, self.now - request.at, request.lasts))
        heapq.heappush(self.ends, (self.now + request.lasts, next(self._order), request))

    def end_one(self) -> None:
        self.now, _, request = heapq.heappop(self.ends)
        assert request.replica is not None
        name = request.replica.spec.replica_id
        self.running[name] -= 1
        request.replica.outstanding -= 1
        request.account.bound -= 1
        if self.lines[name]:
            self._begin(self.lines[name].popleft(), name)
        self.service.pump()


Place = Callable[[World, SimulatedRequest], None]


def at_random(source: random.Random) -> Place:
    return lambda world, request: request.bind(source.choice(list(world.service.replicas.values())))


def in_turn() -> Place:
    turns = itertools.count()

    def place(world: World, request: SimulatedRequest) -> None:
        request.bind(list(world.service.replicas.values())[next(turns) % REPLICAS])

    return place


def balanced(world: World, request: SimulatedRequest) -> None:
    """Place requests as the data plane does."""
    replica = None if world.service.waiting.count else world.service.pick()
    if replica is not None:
        request.bind(replica)
    else:
        world.service.wait(request)


def run(world: World, place: Place, arrivals: Iterator[tuple[float, float, str]]) -> None:
    for at, lasts, caller in arrivals:
        while world.ends and world.ends[0][0] <= at:
            world.end_one()
        world.now = at
        place(world, SimulatedRequest(at, lasts, world.service.account(caller), world))
    while world.ends:
        world.end_one()


def stream(
    source: random.Random, draw: Draw, rate: float, count: int, caller: str = "all"
) -> Iterator[tuple[float, float, str]]:
    at = 0.0
    for _ in range(count):
        at += source.expovariate(rate)
        yield at, draw(source), caller


def p99(waits: list[float]) -> float:
    return sorted(waits)[int(len(waits) * 0.99)]


def policies(seed: int, slots: int, load: float, draw: Draw, count: int) -> dict[str, float]:
    """Return p99 of the wait, in mean service times."""
    every: dict[str, tuple[int, Place]] = {
        "random": (NO_CAP, at_random(random.Random(seed + 1))),
        "in turn": (NO_CAP, in_turn()),
        "least outstanding, bound at once": (NO_CAP, balanced),
        "least outstanding, bound late (Shoal)": (slots, balanced),
    }
    waits_p99 = {}
    for name, (cap, place) in every.items():
        arrivals = stream(random.Random(seed), draw, load * REPLICAS * slots, count)
        world = World(slots, cap)
        run(world, place, arrivals)
        waits_p99[name] = p99([wait for _, wait, _ in world.waits[count // 10 :]])
    return waits_p99


def fairness(seed: int, count: int) -> dict[str, float]:
    """Return p99 of the time to an answer, as seen by eight callers that together use 40 % of the
    capacity.
    """
    slots, share = 8, 0.05 * REPLICAS * 8

    def seen(*, is_greedy: bool, is_fair: bool = True) -> float:
        streams = [stream(random.Random(seed + n), lognormal, share, count, f"modest-{n}") for n in range(8)]
        if is_greedy:
            streams.append(stream(random.Random(seed), lognormal, share * 100, count * 100, "greedy"))
        arrivals = ((at, lasts, caller if is_fair else "all") for at, lasts, caller in heapq.merge(*streams))
        world = World(slots, slots)
        run(
            world,
            balanced,
            itertools.takewhile(lambda ratios_by_policy: ratios_by_policy[0] < count / share, arrivals),
        )
        return p99([wait + lasts for caller, wait, lasts in world.waits if caller != "greedy"])

    return {
        "alone": seen(is_greedy=False),
        "beside a caller at 100 times its share": seen(is_greedy=True),
        "the same, if all stood in one line": seen(is_greedy=True, is_fair=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for draw, slots, load in itertools.product((lognormal, pareto), (1, 8), (0.7, 0.85, 0.95)):
        runs = [policies(seed, slots, load, draw, options.requests) for seed in range(options.seeds)]
        ratios = {
            name: statistics.median(
                ratios_by_policy[name] / ratios_by_policy["random"] for ratios_by_policy in runs
            )
            for name in runs[0]
        }
        shown = [f"{ratio:.3f}" for ratio in ratios.values()]
        rows.append([f"{draw.__name__}, {slots} slots, load {load:g}", *shown])
    print(table("p99 of the wait for a slot, as a ratio to random", ["requests", *ratios], rows))
    waits_p99 = fairness(0, options.requests // 20)
    rows = [[name, f"{value:.2f}", f"{value / waits_p99['alone']:.2f}x"] for name, value in waits_p99.items()]
    print(table("p99 of the time to an answer, in mean service times", ["modest callers", "p99", ""], rows))


if __name__ == "__main__":
    main()
