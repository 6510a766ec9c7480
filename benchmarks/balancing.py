"""Heavy-tailed requests in virtual time through the real balancer and the real fair queue.

    python -m benchmarks.balancing [--requests 40000] [--seeds 3]

The first table says what the defaults are worth: p99 of the wait for a slot, as a ratio to random placement
of the same requests. The second has one caller ask for a hundred times its share.
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
from shoal.serving.accounts import Account
from shoal.serving.balancer import ANY, Ask
from shoal.serving.problem import Refused
from shoal.serving.replica import LiveReplica
from shoal.serving.service import LiveService
from shoal.serving.table import Replica, Service

REPLICAS = 16
NO_CAP = 1 << 30

Draw = Callable[[random.Random], float]


def lognormal(source: random.Random) -> float:
    """Mean 1, squared coefficient of variation about 6."""
    return math.exp(source.gauss(-0.98, 1.4))


def pareto(source: random.Random) -> float:
    """Mean about 1, infinite variance but for the cut at 200."""
    return float(min(200.0, (1.0 - source.random()) ** (-1 / 1.5) / 3.0))


@dataclass
class Asked:
    """A request of the simulation: what `LiveService` needs of one."""

    at: float
    lasts: float
    account: Account
    world: World
    weight_bytes: int = 1
    ask: Ask = ANY
    replica: LiveReplica | None = None

    def bind(self, replica: LiveReplica) -> None:
        self.replica = replica
        replica.outstanding += 1
        self.account.bound += 1
        self.world.service.balancer.bound(replica, self.ask)
        self.world.arrive(self, replica)

    def refuse(self, refused: Refused) -> None:
        raise AssertionError(refused.detail)


@dataclass
class World:
    """Replicas with `slots` each; what is sent to a full one waits there, as in a server without a limit."""

    slots: int
    cap: int
    now: float = 0.0
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    """Whose, how long until a slot, how long in it."""

    def __post_init__(self) -> None:
        replicas = tuple(
            Replica(replica_id=f"r{n}", address="127.0.0.1:1", release=1) for n in range(REPLICAS)
        )
        spec = Service(
            project="p", name="s", replicas=replicas, cap=self.cap, queue_count=NO_CAP, queue_bytes=NO_CAP
        )
        self.service = LiveService(spec)
        self.lines: dict[str, deque[Asked]] = {one.replica_id: deque() for one in replicas}
        self.running = dict.fromkeys(self.lines, 0)
        self.ends: list[tuple[float, int, Asked]] = []
        self._order = itertools.count()

    def arrive(self, asked: Asked, replica: LiveReplica) -> None:
        name = replica.spec.replica_id
        if self.running[name] < self.slots:
            self._begin(asked, name)
        else:
            self.lines[name].append(asked)

    def _begin(self, asked: Asked, name: str) -> None:
        self.running[name] += 1
        self.waits.append((asked.account.name, self.now - asked.at, asked.lasts))
        heapq.heappush(self.ends, (self.now + asked.lasts, next(self._order), asked))

    def end_one(self) -> None:
        self.now, _, asked = heapq.heappop(self.ends)
        assert asked.replica is not None
        name = asked.replica.spec.replica_id
        self.running[name] -= 1
        asked.replica.outstanding -= 1
        asked.account.bound -= 1
        if self.lines[name]:
            self._begin(self.lines[name].popleft(), name)
        self.service.pump()


Place = Callable[[World, Asked], None]


def at_random(source: random.Random) -> Place:
    return lambda world, asked: asked.bind(source.choice(list(world.service.replicas.values())))


def in_turn() -> Place:
    turn = itertools.count()

    def place(world: World, asked: Asked) -> None:
        asked.bind(list(world.service.replicas.values())[next(turn) % REPLICAS])

    return place


def balanced(world: World, asked: Asked) -> None:
    """As the data plane does it."""
    replica = None if world.service.waiting.count else world.service.pick()
    if replica is not None:
        asked.bind(replica)
    else:
        world.service.wait(asked)


def run(world: World, place: Place, arrivals: Iterator[tuple[float, float, str]]) -> None:
    for at, lasts, caller in arrivals:
        while world.ends and world.ends[0][0] <= at:
            world.end_one()
        world.now = at
        place(world, Asked(at, lasts, world.service.account(caller), world))
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
    """p99 of the wait, in mean service times."""
    every: dict[str, tuple[int, Place]] = {
        "random": (NO_CAP, at_random(random.Random(seed + 1))),
        "in turn": (NO_CAP, in_turn()),
        "least outstanding, bound at once": (NO_CAP, balanced),
        "least outstanding, bound late (Shoal)": (slots, balanced),
    }
    found = {}
    for name, (cap, place) in every.items():
        arrivals = stream(random.Random(seed), draw, load * REPLICAS * slots, count)
        world = World(slots, cap)
        run(world, place, arrivals)
        found[name] = p99([wait for _, wait, _ in world.waits[count // 10 :]])
    return found


def fairness(seed: int, count: int) -> dict[str, float]:
    """p99 of the time to an answer that eight callers see who together take 40 % of what there is."""
    slots, share = 8, 0.05 * REPLICAS * 8

    def seen(*, is_greedy: bool, is_fair: bool = True) -> float:
        streams = [stream(random.Random(seed + n), lognormal, share, count, f"modest-{n}") for n in range(8)]
        if is_greedy:
            streams.append(stream(random.Random(seed), lognormal, share * 100, count * 100, "greedy"))
        told = ((at, lasts, who if is_fair else "all") for at, lasts, who in heapq.merge(*streams))
        world = World(slots, slots)
        run(world, balanced, itertools.takewhile(lambda one: one[0] < count / share, told))
        return p99([wait + lasts for who, wait, lasts in world.waits if who != "greedy"])

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
        ratios = {name: statistics.median(one[name] / one["random"] for one in runs) for name in runs[0]}
        shown = [f"{ratio:.3f}" for ratio in ratios.values()]
        rows.append([f"{draw.__name__}, {slots} slots, load {load:g}", *shown])
    print(table("p99 of the wait for a slot, as a ratio to random", ["requests", *ratios], rows))
    found = fairness(0, options.requests // 20)
    rows = [[name, f"{value:.2f}", f"{value / found['alone']:.2f}x"] for name, value in found.items()]
    print(table("p99 of the time to an answer, in mean service times", ["modest callers", "p99", ""], rows))


if __name__ == "__main__":
    main()
