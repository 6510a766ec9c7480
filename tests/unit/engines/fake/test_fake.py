"""The fake engine by hand: no event loop, injected faults, partitions, power cuts, leases."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import hypothesis
import pytest
from hypothesis import strategies as st

from shoal.engines.base import Observation, Submission
from shoal.engines.fake import (
    Act,
    FakeCluster,
    FakeEngine,
    Fault,
    Script,
    Verb,
    VirtualClock,
    always,
    seeded,
    seeded_faults,
)
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts
from shoal.wire import EndKind, RenewalReply, TaskPhase
from tests.support.runtime.task_specs import task_spec_of

T = TypeVar("T")
NODES = ("a", "b", "c")


def done(verb: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that must finish without waiting for anything."""
    try:
        verb.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("the fake engine waited for an event loop")


def cluster(script: Script | None = None) -> tuple[VirtualClock, FakeCluster]:
    clock = VirtualClock()
    facts = [NodeFacts(name=n, cpus=8, memory_bytes=1 << 30, disk_bytes=1 << 30) for n in NODES]
    return clock, FakeCluster(facts, clock=clock, script=script)


def submission(attempt_id: str = "att_1", nodes: tuple[str, ...] = ("a", "b"), **fields: Any) -> Submission:
    task_specs = tuple(
        task_spec_of(
            attempt_id=attempt_id,
            epoch=1,
            job_id="job_1",
            job_number=1,
            job_name="j",
            project="p",
            node=node,
            node_rank=rank,
            nodes=nodes,
            ranks_per_node=2,
            run="true",
            cpus=1,
            **fields,
        )
        for rank, node in enumerate(nodes)
    )
    return Submission(attempt_id=attempt_id, epoch=1, task_specs=task_specs)


def evidence_of(engine: FakeEngine) -> dict[str, Evidence]:
    return {o.node: o.evidence for o in done(engine.list_owned())}


def outcomes(engine: FakeEngine) -> dict[str, EndKind | None]:
    return {o.node: o.outcome.kind if o.outcome else None for o in done(engine.list_owned())}


def test_fake_task_passes_its_stages_at_the_scripted_times() -> None:
    clock, world = cluster(always(Act(claim_s=1, prepare_s=2, run_s=4)))
    engine = FakeEngine(world)
    done(engine.submit(submission(nodes=("a",))))
    seen = []
    while (at := world.next_event_at()) is not None:
        clock.advance_to(at)
        [look] = done(engine.list_owned())
        seen.append((clock.monotonic(), look.evidence, look.started_at is not None))
    assert seen == [
        (1, Evidence.ALIVE, False),
        (3, Evidence.ALIVE, True),
        (7, Evidence.ENDED, True),
    ]


def test_a_call_lost_before_has_no_effect_and_one_lost_after_has_all_of_it() -> None:
    _, world = cluster(always(Act(run_s=None)))
    before = FakeEngine(world, faults=lambda verb, _: Fault(is_lost_before=verb is Verb.SUBMIT))
    after = FakeEngine(world, faults=lambda verb, _: Fault(is_lost_after=verb is Verb.SUBMIT))
    with pytest.raises(EngineUnreachable):
        done(before.submit(submission()))
    assert world.running() == []
    with pytest.raises(EngineUnreachable):
        done(after.submit(submission()))
    assert len(world.running()) == 2
    assert done(FakeEngine(world).submit(submission())) == "fake-1"
    assert len(world.running()) == 2


def test_observations_may_be_repeated_and_stale_but_never_missing() -> None:
    clock, world = cluster(always(Act(run_s=5)))
    fault = Fault()
    engine = FakeEngine(world, faults=lambda *_: fault)
    done(engine.submit(submission(nodes=("a",))))
    [first] = done(engine.list_owned())
    clock.advance(10)
    fault = Fault(is_stale=True, copies=2)
    assert done(engine.list_owned()) == [first, first]
    done(engine.submit(submission("att_2", nodes=("b",))))
    assert {o.attempt_id for o in done(engine.list_owned())} == {"att_1", "att_2"}
    fault = Fault()
    assert {o.node: o.evidence for o in done(engine.list_owned())}["a"] is Evidence.ENDED


def test_delayed_stop_reaches_its_task_later() -> None:
    clock, world = cluster(always(Act(run_s=None)))
    engine = FakeEngine(world, faults=lambda verb, _: Fault(delay_s=5.0 if verb is Verb.CANCEL else 0.0))
    done(engine.submit(submission(nodes=("a",))))
    done(engine.cancel("att_1", 30))
    assert evidence_of(engine) == {"a": Evidence.ALIVE}
    clock.advance(5)
    assert outcomes(engine) == {"a": EndKind.STOPPED}


def test_a_stop_takes_its_time_but_not_more_than_the_grace() -> None:
    clock, world = cluster(always(Act(run_s=None, stop_s=100)))
    engine = FakeEngine(world)
    done(engine.submit(submission(nodes=("a",))))
    done(engine.cancel("att_1", 30))
    clock.advance(29)
    assert len(world.running()) == 1
    clock.advance(1)
    assert outcomes(engine) == {"a": EndKind.STOPPED}


def test_task_behind_a_partition_keeps_running_unobserved() -> None:
    clock, world = cluster(always(Act(run_s=50)))
    engine = FakeEngine(world)
    done(engine.submit(submission()))
    world.cut("b")
    assert evidence_of(engine) == {"a": Evidence.ALIVE, "b": Evidence.CLEARED}
    with pytest.raises(EngineUnreachable):
        done(engine.cancel("att_1", 0))
    with pytest.raises(EngineUnreachable):
        done(engine.read_log("att_1", "b", 0, 100))
    with pytest.raises(EngineUnreachable):
        done(engine.submit(submission("att_2", nodes=("c", "b"))))
    assert [task_spec.identity.node for task_spec in world.running()] == ["b"]
    assert [n.name for n in done(engine.nodes()) if not n.is_alive] == ["b"]
    clock.advance(50)
    world.heal("b")
    assert outcomes(engine) == {"a": EndKind.STOPPED, "b": EndKind.SUCCEEDED}


def test_a_node_powered_off_is_evidence_of_loss() -> None:
    _, world = cluster(always(Act(run_s=None)))
    engine = FakeEngine(world)
    done(engine.submit(submission()))
    world.power_off("b")
    assert outcomes(engine) == {"a": None, "b": EndKind.LOST}
    done(engine.submit(submission("att_2", nodes=("b",))))
    world.power_on("b")
    assert outcomes(engine)["b"] is EndKind.LOST
    assert [task_spec.identity.node for task_spec in world.running()] == ["a"]


def test_killed_supervisor_is_lost_and_killed_rank_reports_its_signal() -> None:
    _, world = cluster(always(Act(run_s=None)))
    engine = FakeEngine(world)
    done(engine.submit(submission()))
    world.kill_supervisor("att_1", "a")
    world.kill_rank("att_1", "b")
    assert outcomes(engine) == {"a": EndKind.LOST, "b": EndKind.SIGNALED}


def test_time_limit_ends_a_task() -> None:
    clock, world = cluster(always(Act(prepare_s=5, run_s=None)))
    engine = FakeEngine(world)
    done(engine.submit(submission(nodes=("a",), time_limit_s=10.0)))
    clock.advance(9)
    assert evidence_of(engine) == {"a": Evidence.ALIVE}
    clock.advance(1)
    assert outcomes(engine) == {"a": EndKind.TIME_LIMIT}


def leased(**fields: Any) -> Submission:
    return submission(nodes=("a",), control_url="http://c", renew_s=5.0, fence_s=60.0, **fields)


def test_renewals_come_at_the_start_then_every_renew_s_and_at_the_end() -> None:
    clock, world = cluster(always(Act(prepare_s=1, run_s=12)))
    done(FakeEngine(world).submit(leased()))
    sent = []
    for _ in range(30):
        for renewal in world.renewals():
            sent.append((clock.monotonic(), renewal.renewal.phase))
            world.deliver_reply(renewal, RenewalReply())
        clock.advance(0.5)
    assert sent == [
        (1, TaskPhase.RUNNING),
        (6, TaskPhase.RUNNING),
        (11, TaskPhase.RUNNING),
        (13, TaskPhase.ENDED),
    ]


def test_task_without_replies_fences_itself_counted_from_its_last_renewal() -> None:
    clock, world = cluster(always(Act(run_s=None)))
    engine = FakeEngine(world)
    done(engine.submit(leased()))
    clock.advance(10)
    [sent] = world.renewals()
    clock.advance(3)
    world.deliver_reply(sent, RenewalReply())
    clock.advance(56.9)
    assert evidence_of(engine) == {"a": Evidence.ALIVE}
    clock.advance(0.2)
    assert outcomes(engine) == {"a": EndKind.FENCED}
    assert world.running() == []


def test_renewals_of_a_cut_off_node_are_lost_and_so_are_answers_to_it() -> None:
    clock, world = cluster(always(Act(run_s=None)))
    engine = FakeEngine(world)
    done(engine.submit(leased()))
    [sent] = world.renewals()
    world.cut("a")
    clock.advance(30)
    assert world.renewals() == []
    world.deliver_reply(sent, RenewalReply(should_stop=True))
    assert len(world.running()) == 1
    clock.advance(30)
    assert world.running() == []
    assert evidence_of(engine) == {"a": Evidence.CLEARED}
    world.heal("a")
    assert outcomes(engine) == {"a": EndKind.FENCED}


@pytest.mark.parametrize("is_stale", [True, False])
def test_reply_to_a_renewal_stops_a_task(is_stale: bool) -> None:
    _, world = cluster(always(Act(run_s=None, stop_s=1)))
    engine = FakeEngine(world)
    done(engine.submit(leased()))
    [sent] = world.renewals()
    if is_stale:
        world.reject(sent)
    else:
        world.deliver_reply(sent, RenewalReply(should_stop=True, grace_s=0))
    assert outcomes(engine) == {"a": EndKind.FENCED if is_stale else EndKind.STOPPED}


def test_the_date_may_jump_without_time_passing() -> None:
    clock, world = cluster(always(Act(run_s=10)))
    engine = FakeEngine(world)
    done(engine.submit(submission(nodes=("a",))))
    clock.jump(3600)
    assert evidence_of(engine) == {"a": Evidence.ALIVE}
    clock.jump(-7200)
    clock.advance(10)
    assert outcomes(engine) == {"a": EndKind.SUCCEEDED}


def history(seed: int, steps: list[int]) -> list[list[Observation] | str]:
    """What one control plane sees of a seeded cluster while time passes in `steps`."""
    clock, world = cluster(seeded(seed, mean_run_s=5))
    engine = FakeEngine(world, faults=seeded_faults(seed, chance=0.4))
    result: list[list[Observation] | str] = []
    for number, seconds in enumerate(steps):
        for verb in (
            engine.submit(submission(f"att_{number}", nodes=NODES[: 1 + number % 3])),
            engine.cancel(f"att_{number - 3}", 2.0),
            engine.list_owned(),
        ):
            try:
                answer = done(verb)
                result.append(answer if isinstance(answer, list) else str(answer))
            except EngineUnreachable as error:
                result.append(error.message)
        clock.advance(seconds)
    return result


@hypothesis.given(st.integers(0, 10**6), st.lists(st.integers(0, 20), max_size=12))
def test_the_same_seed_replays_exactly(seed: int, steps: list[int]) -> None:
    assert history(seed, steps) == history(seed, steps)


@hypothesis.given(st.integers(0, 10**6), st.lists(st.floats(0, 30), min_size=1, max_size=20))
def test_frequent_observation_changes_nothing(seed: int, steps: list[float]) -> None:
    final = []
    for looks in (True, False):
        clock, world = cluster(seeded(seed, mean_run_s=20))
        engine = FakeEngine(world)
        done(engine.submit(submission(nodes=NODES, time_limit_s=100.0)))
        for seconds in steps:
            clock.advance(seconds)
            if looks:
                done(engine.list_owned())
        final.append([(o.evidence, o.outcome and o.outcome.kind) for o in done(engine.list_owned())])
    assert final[0] == final[1]
