"""One simulated life: troubles drawn from the seed, then peace, in which everything must come to an end."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from hashlib import sha256

import msgspec
import structlog

from shoal.model.node import NodeState
from shoal.sim.history.facts import facts_of
from shoal.sim.history.replay import DecisionReplay
from shoal.store import EventFilter, JobFilter
from tests.sim.driver import run_now
from tests.sim.invariants import InvariantChecker
from tests.sim.world import LOOPS, SimWorld

STEPS = 400
MAX_KEYS = 12
QUIET_KEYS = 5
PEACE_TURNS = 400
ENDLESS_AFTER_TURNS = 12


class BrokenPromise(AssertionError):
    """A promise was broken; carries the seed and the story that led there."""


def simulate(seed: int, steps: int = STEPS) -> SimWorld:
    """Run one seed. Raises `BrokenPromise` with the seed and the history."""
    world = SimWorld(seed)
    auditor = InvariantChecker(world)
    try:
        world.wake("heal")
        world.driver.drain()
        for _ in range(steps):
            _one_turn(world)
            auditor.check()
        _peace(world, auditor)
    except Exception as error:
        story = "\n".join(world.history[-60:])
        again = f"replay it with: python -m tests.sim.story {seed} 1"
        raise BrokenPromise(f"seed {seed}: {type(error).__name__}: {error}\n{again}\n{story}") from error
    return world


def _one_turn(world: SimWorld) -> None:
    """One turn: mostly work, sometimes trouble."""
    dice = world.dice
    world.driver.tick += 1
    for loop, chance in LOOP_CHANCES.items():
        if dice.random() < chance:
            world.wake(loop)
    if world.has_few_jobs and dice.random() < 0.1:
        _checkpoint_saves(world)
    if world.driver.awake() and dice.random() < 0.8:
        world.driver.step()
        return
    troubles = TROUBLES_OF_GANGS if world.has_gangs else TROUBLES
    action = dice.choices(list(troubles), weights=list(troubles.values()))[0]
    action(world)


LOOP_CHANCES = {"place": 0.1, "watch": 0.08, "heal": 0.03}
"""Chance, each turn, that a loop that is not running begins."""


def _time(world: SimWorld) -> None:
    world.clock.advance(world.dice.choice([0.1, 0.5, 1, 1, 2, 2, 5, 5, 10]))


def _long_time(world: SimWorld) -> None:
    world.clock.advance(world.dice.choice([30, 70, 250]))


def _renewals(world: SimWorld) -> None:
    world.deliver_renewals()


def _submit(world: SimWorld) -> None:
    unanswered = [key for key in world.requests if key not in world.accepted]
    if unanswered and world.dice.random() < 0.5:
        world.submit(world.dice.choice(unanswered))
    elif len(world.requests) < (QUIET_KEYS if world.has_few_jobs else MAX_KEYS):
        world.submit(f"k{len(world.requests)}")
    elif world.accepted:
        world.submit(world.dice.choice(sorted(world.accepted)))


def _stop(world: SimWorld) -> None:
    """Anything; or, where it hurts most, what is being handed over."""
    known = world.accepted_jobs()
    holding = run_now(world.disk.inner.read(lambda tx: tx.attempts.holding()))
    begun = [job.job_id for job, attempt in holding if attempt.state == "starting" and job.job_id in known]
    if begun and world.dice.random() < 0.7:
        world.stop(world.dice.choice(begun))
    elif known:
        world.stop(world.dice.choice(known))


def _retry(world: SimWorld) -> None:
    if world.accepted:
        world.retry(world.dice.choice(world.accepted_jobs()))


def _crash(world: SimWorld) -> None:
    world.crash()


def _stall(world: SimWorld) -> None:
    name = world.driver.stall(world.dice.choice([10, 40]))
    if name is not None:
        world.log(f"stall {name}")


def _cut(world: SimWorld) -> None:
    node = world.dice.choice(world.nodes)
    world.log(f"cut {node}")
    world.cluster.cut(node)


def _heal(world: SimWorld) -> None:
    node = world.dice.choice(world.nodes)
    world.log(f"heal {node}")
    world.cluster.heal(node)


def _doubtful_node(world: SimWorld) -> None:
    """Something does not die on a node, and nobody says whose it is; or somebody has seen to it, rather where
    something was held for it.
    """
    holding = run_now(world.disk.inner.read(lambda tx: tx.attempts.holding()))
    held = {node for _, attempt in holding for node in attempt.doubted_nodes} & world.cluster.doubtful_nodes
    busy = {
        order.identity.node for order in world.cluster.running() if world.cluster.is_cut(order.identity.node)
    }
    node = world.dice.choice(sorted(held or busy) or world.nodes)
    if node in world.cluster.doubtful_nodes:
        world.log(f"clear {node}")
        world.cluster.doubtful_nodes.remove(node)
    else:
        world.log(f"doubt {node}")
        world.cluster.doubtful_nodes.add(node)


def _power(world: SimWorld) -> None:
    off = [node for node in world.nodes if world.cluster.is_off(node)]
    if off:
        world.log(f"power on {off[0]}")
        world.cluster.power_on(off[0])
    else:
        node = world.dice.choice(world.nodes)
        world.log(f"power off {node}")
        world.cluster.power_off(node)


def _declare_dead(world: SimWorld) -> None:
    """Operators tell the truth: only of a node that is off."""
    off = [node for node in world.nodes if world.cluster.is_off(node)]
    if off:
        world.set_node(world.dice.choice(off), NodeState.DEAD)


def _node(world: SimWorld) -> None:
    states = [NodeState.CORDONED, NodeState.DRAINING, NodeState.READY, NodeState.READY, NodeState.READY]
    world.set_node(world.dice.choice(world.nodes), world.dice.choice(states))


def _window(world: SimWorld) -> None:
    """Maintenance is declared or taken back."""
    known = run_now(world.disk.inner.read(lambda tx: tx.windows.all()))
    if known and world.dice.random() < 0.3:
        world.cancel_window(world.dice.choice(known).window_id)
    else:
        in_s, for_s = world.dice.choice([0.0, 5.0, 40.0]), world.dice.choice([60.0, 200.0])
        world.declare_window(world.dice.choice(world.nodes), in_s, for_s)


def _kill(world: SimWorld) -> None:
    running = world.cluster.running()
    if not running:
        return
    gangs = [order for order in running if len(order.ranks.nodes) > 1]
    order = world.dice.choice(gangs if gangs and world.dice.random() < 0.6 else running)
    what = world.dice.choice(["supervisor", "rank"])
    world.log(f"kill the {what} of {order.identity.attempt_id} on {order.identity.node}")
    kill = world.cluster.kill_supervisor if what == "supervisor" else world.cluster.kill_rank
    kill(order.identity.attempt_id, order.identity.node)


def _orphan(world: SimWorld) -> None:
    """A supervisor dies before its ranks. What nobody has seen yet is gone before its fence could pass: a
    fence is only as good as who keeps it. What was seen may live on for as long as it likes.
    """
    holding = run_now(world.disk.inner.read(lambda tx: tx.attempts.holding()))
    seen = [(attempt.attempt_id, node) for _, attempt in holding for node in attempt.orphans_left]
    if seen:
        attempt_id, node = world.dice.choice(seen)
        world.log(f"leftovers of {attempt_id} on {node} live on")
        world.cluster.orphan(attempt_id, node, world.dice.choice([100, 300, 700]))
        return
    shares = [o for o in world.cluster.running() if not world.cluster.is_cut(o.identity.node)]
    if shares:
        order = world.dice.choice(shares)
        world.log(f"orphan {order.identity.attempt_id} on {order.identity.node}")
        world.cluster.orphan(order.identity.attempt_id, order.identity.node, 30)


def _checkpoint_saves(world: SimWorld) -> None:
    """Some of what runs is heard to have saved its work."""
    holding = run_now(world.disk.inner.read(lambda tx: tx.attempts.holding()))
    for _, attempt in holding:
        if world.dice.random() < 0.5:
            seconds = world.dice.choice([0, 5, 30])
            world.log(f"{attempt.attempt_id} has saved {seconds} s ago")
            world.core.running.checkpoint_times.note_checkpoint(
                attempt.attempt_id, world.clock.now() - seconds
            )


def _disk(world: SimWorld) -> None:
    world.disk.failure_chance = world.dice.choice([0.0, 0.0, 0.0, 0.3, 1.0])
    world.log(f"the disk fails {world.disk.failure_chance:.0%} of commits")


def _jump(world: SimWorld) -> None:
    by = world.dice.choice([3600, -3600])
    world.log(f"the wall clock jumps by {by} s")
    world.clock.jump(by)


TROUBLES = {
    _time: 30,
    _long_time: 4,
    _renewals: 25,
    _submit: 20,
    _stop: 5,
    _retry: 2,
    _crash: 3,
    _stall: 8,
    _cut: 3,
    _heal: 5,
    _power: 2,
    _declare_dead: 1,
    _node: 2,
    _window: 3,
    _kill: 6,
    _orphan: 4,
    _doubtful_node: 3,
    _checkpoint_saves: 6,
    _disk: 2,
    _jump: 1,
}
TROUBLES_OF_GANGS = {
    **TROUBLES,
    _time: 40,
    _stop: 1,
    _kill: 16,
    _power: 8,
    _submit: 10,
    _window: 1,
    _heal: 12,
}
"""More of what takes one share away and leaves the others."""


def _peace(world: SimWorld, auditor: InvariantChecker) -> None:
    """No more trouble: whatever was accepted must reach its end, and nothing may be left running."""
    world.log("peace")
    world.disk.failure_chance = 0.0
    world.faults = 0.0
    world.crash()
    world.cluster.doubtful_nodes.clear()
    for node in world.nodes:
        world.cluster.heal(node)
        world.cluster.power_on(node)
        world.set_node(node, NodeState.READY)
    for window in run_now(world.disk.inner.read(lambda tx: tx.windows.all())):
        world.cancel_window(window.window_id)
    for key in world.requests:
        world.submit(key)
    for turn in range(PEACE_TURNS):
        world.driver.drain()
        auditor.check()
        if set(world.requests) <= set(world.accepted) and _is_over(world):
            break
        world.clock.advance(10)
        world.deliver_renewals(lost=0, repeated=0)
        if world.has_few_jobs:
            _checkpoint_saves(world)
        for loop in LOOPS:
            world.wake(loop)
        if turn % ENDLESS_AFTER_TURNS == ENDLESS_AFTER_TURNS - 1:
            _stop_endless(world)
    else:
        raise AssertionError(f"not over after {PEACE_TURNS} turns of peace: {_open_jobs(world)}")
    auditor.check(should_read_all=True)
    bad = run_now(world.disk.inner.read(lambda tx: tx.events.verify()))
    assert bad is None, f"the event log does not verify: {bad}"
    _decide_again(world)


def _decide_again(world: SimWorld) -> None:
    """Every decision of this life follows from the log alone."""
    events = run_now(world.disk.inner.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30)))
    for verdict in DecisionReplay(world.core.planning.planner.policy).verdicts(
        facts_of(msgspec.to_builtins(events))
    ):
        world.log(f"decision {verdict.decision.seq} made again")
        assert verdict.is_equal, f"decided {verdict.decision}; from the same facts now {verdict.starts}"


def _open_jobs(world: SimWorld) -> list[str]:
    page = run_now(world.disk.inner.read(lambda tx: tx.jobs.page(JobFilter(), None, 1000)))
    return [f"{job.job_id} {attempt.state}" for job, attempt in page if job.is_open]


def _is_over(world: SimWorld) -> bool:
    return not _open_jobs(world) and not world.cluster.running() and not world.cluster.tasks()


def _stop_endless(world: SimWorld) -> None:
    """Some scripts run for ever: people stop those."""
    for order in world.cluster.running():
        world.stop(order.identity.job_id)


def fingerprint(world: SimWorld) -> str:
    """Two lives with the same one were the same life: the event log's last hash covers every event."""
    told = sha256("\n".join(world.history).encode()).hexdigest()
    head = run_now(world.disk.inner.read(lambda tx: tx.events.head()))
    return f"{head.seq} {head.hash} {told}"


def summary(world: SimWorld) -> Counter[str]:
    """What a life was made of, so that a simulation in which nothing happens cannot pass unnoticed."""
    seen: Counter[str] = Counter()
    for line in world.history:
        words = line.split(maxsplit=1)[1]
        seen.update([name for start, name in COUNTED_LINES.items() if words.startswith(start)])
        seen["answers repeated"] += words.endswith("repeated=True")
    for event in run_now(world.disk.inner.read(lambda tx: tx.events.page(0, limit=100_000))):
        if event.kind == "job.ended":
            seen[f"jobs {event.data['outcome']}"] += 1
        elif event.kind == "job.evicted":
            seen[f"evictions by {event.data['ground']}"] += 1
        elif event.kind == "attempt.regrouped":
            inner = event.data["event"]
            where = inner["task"] and inner["task"]["node"]
            is_same = where == inner["failure"]["node"]
            kind = "the same node" if is_same else "another node"
            seen["ranks started anew" if where is None else f"shares replaced on {kind}"] += 1
        elif event.kind == "attempt.noted":
            seen["doubts withdrawn"] += event.data["event"]["type"] == "OrphanCleared"
        elif event.kind == "job.grows":
            seen["growths"] += 1
        elif event.kind == "attempt.ended":
            seen["attempts ended"] += 1
            seen["fences passed"] += event.data["event"]["type"] == "FenceExpired"
    return seen


COUNTED_LINES = {
    "accepted": "submissions answered",
    "submit": "submissions",
    "the control plane is killed": "crashes",
    "kill the supervisor": "supervisors killed",
    "kill the rank": "ranks killed",
    "leftovers": "leftovers that live on",
    "orphan": "supervisors killed before their ranks",
    "doubt": "nodes where something does not die",
    "cut": "partitions",
    "stall": "stalls",
    "power off": "nodes powered off",
    "the disk fails 30%": "failing disks",
    "the disk fails 100%": "full disks",
    "the wall clock": "clock jumps",
    "draining": "drains",
    "dead": "nodes declared dead",
    "maintenance": "maintenance windows",
    "stop": "stops",
    "retry": "retries",
}
"""How a line of the history begins, and what it counts as."""


def main() -> None:
    """`python -m tests.sim.story SEED COUNT`: that many seeds, and what happened in them."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    silence_logs()
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen.update(summary(simulate(seed)))
    for name, number in sorted(seen.items()):
        print(f"{number:9d} {name}")
    print(f"{count} seeds from {first} on: no promise broken")


def silence_logs() -> None:
    """What the control plane logs about planted faults is no news here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


if __name__ == "__main__":
    main()
