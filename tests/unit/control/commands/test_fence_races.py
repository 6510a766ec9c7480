"""A supervisor that was frozen for longer than its fence, and renews while its end is being recorded.

Either it is told to go on, and then it has not ended; or it has ended, and is told so. Never both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from shoal.control.commands.renewals import StaleRenewal, renew
from shoal.control.commands.submit import SubmitRequest, submit
from shoal.control.core import Core
from shoal.control.loops.heal import heal
from shoal.control.loops.watch import watch
from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.engines.fake import FakeCluster, FakeEngine, VirtualClock
from shoal.ids import id_factory
from shoal.model.attempt import Attempt, EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.model.people import Project
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import Tx, open_store
from shoal.wire import Renewal, TaskPhase
from tests.support.planes.bench import (
    ANA,
    FOREVER,
    SPEC,
    USER,
    ControlPlaneLab,
    node_facts,
    place_and_launch,
    result_of,
)
from tests.unit.control.memory.test_fences_and_limits import carry_renewals

T = TypeVar("T")
FENCE_S = 60.0
LIMIT_S = 30.0
ALONE, GANG = {"cpus": 1}, {"nodes": 2, "cpus": 1}


def of(attempt: Attempt, node: str = "n1") -> Renewal:
    return Renewal(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        phase=TaskPhase.RUNNING,
        started_at=1.0,
    )


def frozen(resources: dict[str, int], *, has_spoken: bool = True) -> tuple[ControlPlaneLab, Job]:
    """A job whose task on n1 cannot be seen, and has been silent for longer than its fence and the margin."""
    lab = ControlPlaneLab(num_nodes=resources.get("nodes", 1))
    job = lab.running_job(resources=resources, fence=f"{FENCE_S:.0f}s")
    lab.cluster.cut("n1")
    if not has_spoken:
        lab.restart()
        lab.watch()
    pass_by(lab, FENCE_S + FENCE_MARGIN_S + 1)
    return lab, job


def pass_by(lab: ControlPlaneLab, seconds: float) -> None:
    """Let time pass in which every reachable supervisor renews, and no loop looks."""
    end = lab.clock.monotonic() + seconds
    while lab.clock.monotonic() < end:
        lab.clock.advance(min(5.0, end - lab.clock.monotonic()))
        carry_renewals(lab)


@pytest.mark.parametrize("has_spoken", [True, False])
@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_supervisor_told_to_go_on_since_the_look_is_not_fenced(
    resources: dict[str, int], has_spoken: bool
) -> None:
    lab, job = frozen(resources, has_spoken=has_spoken)
    before = lab.attempt(job)
    lab.store.meanwhile("before write", lambda: result_of(lab.plane.renew(of(before))))
    lab.watch()
    assert (lab.attempts(job), before.outcomes) == ([before], ())
    pass_by(lab, FENCE_S + FENCE_MARGIN_S)
    lab.watch()
    assert lab.status(job) == "running", "its silence counts from that word"


@pytest.mark.parametrize("when", ["after read", "before write", "after write"])
@pytest.mark.parametrize("has_spoken", [True, False])
@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_supervisor_is_not_fenced_while_its_renewal_is_answered(
    resources: dict[str, int], has_spoken: bool, when: str
) -> None:
    lab, job = frozen(resources, has_spoken=has_spoken)
    before = lab.attempt(job)
    lab.store.meanwhile(when, lab.watch)
    result_of(lab.plane.renew(of(before)))
    lab.store.meanwhile(when, lambda: None)
    lab.watch()
    assert lab.attempts(job) == [before]


@pytest.mark.parametrize("does_speak", [True, False])
def test_supervisor_that_renews_before_its_task_is_replaced_keeps_it(does_speak: bool) -> None:
    """The replacement is planned some time after the look."""
    lab = ControlPlaneLab(num_nodes=3)
    job = lab.running_job(resources=GANG, retry={"max": 3, "on": ["exit", "signal"]}, fence=f"{FENCE_S:.0f}s")
    lab.cluster.cut("n2")
    pass_by(lab, FENCE_S + FENCE_MARGIN_S + 1)
    lab.heal()
    lab.watch()
    before = lab.attempt(job)
    assert before.node_names == ("n1", "n2")
    if does_speak:
        lab.store.meanwhile("before write", lambda: result_of(lab.plane.renew(of(before, "n2"))))
    lab.place()
    assert lab.attempt(job).node_names == (("n1", "n2") if does_speak else ("n1", "n3"))


@pytest.mark.parametrize("does_speak", [True, False])
def test_replacement_beside_it_does_not_keep_a_lost_task_from_another_node(does_speak: bool) -> None:
    """Two tasks are given up at one look. The submission to the first node says nothing about the second."""
    lab = ControlPlaneLab(num_nodes=4)
    three = {"nodes": 3, "cpus": 1}
    job = lab.running_job(
        resources=three, retry={"max": 3, "on": ["exit", "signal"]}, fence=f"{FENCE_S:.0f}s"
    )
    assert lab.attempt(job).node_names == ("n1", "n2", "n3")
    lab.cluster.cut("n2")
    lab.cluster.cut("n3")
    result_of(lab.plane.set_node_state(ANA, "n3", NodeState.CORDONED))
    pass_by(lab, FENCE_S + FENCE_MARGIN_S + 1)
    lab.watch()
    before = lab.attempt(job)
    assert [replaced.node for replaced in before.replacements] == ["n2"]
    if does_speak:
        lab.store.meanwhile("before write", lambda: result_of(lab.plane.renew(of(before, "n3"))))
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n2", "n3" if does_speak else "n4")


def test_supervisor_that_renews_after_its_end_is_told_of_the_end() -> None:
    lab, job = frozen(ALONE)
    lab.watch()
    ended = lab.attempts(job)[0]
    assert ended.reason is EndReason.FENCED
    with pytest.raises(StaleRenewal):
        result_of(lab.plane.renew(of(ended)))


async def on_disk(
    home: Path, silent_s: float = FENCE_S + FENCE_MARGIN_S + 1
) -> tuple[Core, FakeCluster, VirtualClock, Attempt]:
    """The same, with a store whose writer has its own thread."""
    clock = VirtualClock()
    cluster = FakeCluster([node_facts("n1")], clock=clock, script=FOREVER)
    core = Core(
        store=open_store(f"sqlite:///{home / 'shoal.db'}", clock=clock),
        engine=FakeEngine(cluster),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=Settings(home=home),
        key=bytes(32),
    )

    def people(tx: Tx) -> None:
        tx.people.add_user(USER)
        tx.people.add_project(Project(name="lab", uid=tx.people.next_uid()))

    await core.records.store.write(people)
    await heal(core.upkeep)
    spec = parse_job({**SPEC, "fence": f"{FENCE_S:.0f}s"})
    await submit(core.admission, ANA, SubmitRequest(spec=spec, project="lab", owner=USER), None)
    await place_and_launch(core)
    await watch(core.upkeep, core.inputs)
    [(_, attempt)] = await core.records.store.read(lambda tx: tx.attempts.holding())
    cluster.cut("n1")
    clock.advance(silent_s)
    return core, cluster, clock, attempt


async def look(core: Core) -> None:
    await watch(core.upkeep, core.inputs)


async def speak_while_it_ends(
    core: Core,
    attempt: Attempt,
    loop: Callable[[Core], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its supervisor renews once the loop has decided its end and before the commit, and is refused."""
    is_decided, may_commit = threading.Event(), threading.Event()
    advance, write = core.records.recorder.advance, core.records.store.write

    def slow(*arguments: Any) -> Attempt | None:
        after = advance(*arguments)
        is_decided.set()
        may_commit.wait(LIMIT_S)
        return after

    async def in_line(fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        waiting = asyncio.ensure_future(write(fn, patience_s=patience_s))
        await asyncio.sleep(0)  # it waits for the writer now
        may_commit.set()
        return await waiting

    async def speak() -> None:
        try:
            with pytest.raises(StaleRenewal):
                await renew(core.upkeep, core.inputs, core.services, of(attempt))
        finally:
            may_commit.set()

    monkeypatch.setattr(core.records.recorder, "advance", slow)
    with anyio.fail_after(2 * LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop, core)
            await anyio.to_thread.run_sync(is_decided.wait, LIMIT_S)
            monkeypatch.setattr(core.records.store, "write", in_line)
            tasks.start_soon(speak)


@pytest.mark.anyio
async def test_no_renewal_is_answered_from_a_read_while_its_end_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is decided and not committed: a read still finds an attempt that runs."""
    core, _, _, attempt = await on_disk(tmp_path)
    await speak_while_it_ends(core, attempt, look, monkeypatch)
    ended = await core.records.store.read(lambda tx: tx.attempts.get(attempt.attempt_id))
    assert ended is not None
    assert ended.reason is EndReason.FENCED
    await core.records.store.close()
