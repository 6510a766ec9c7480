"""The loops as they really run: woken by commits, and never stopped by one failing turn."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.control.core import Core
from shoal.control.loops.place import load_recorded_nodes
from shoal.control.memory.health import FailingLoop
from shoal.control.memory.signals import CommitNotifier, Signal
from shoal.engines.fake import Act, FakeCluster, FakeEngine, Script, always
from shoal.errors import SpecError, StoreUnavailable
from shoal.ids import id_factory
from shoal.model.node import NodeFacts
from shoal.model.people import Project
from shoal.scheduler import WaitReason
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import Store, Tx, open_memory_store
from tests.support.planes.bench import ANA, SPEC, USER, ControlPlaneLab, node_facts, result_of
from tests.support.planes.commands import Commands

LIMIT_S = 20.0
VAST = parse_job({**SPEC, "resources": {"cpus": 10_000}})


def core_for(script: Script, store: Store | None = None) -> Core:
    clock = SystemClock()
    return Core(
        store=store or open_memory_store(),
        engine=FakeEngine(FakeCluster([node_facts("n1")], clock=clock, script=script)),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=Settings(home=Path("/lab")),
        key=bytes(32),
    )


async def people(core: Core) -> None:
    def add(tx: Tx) -> None:
        tx.people.add_user(USER)
        tx.people.add_project(Project(name="lab", uid=tx.people.next_uid()))

    await core.records.store.write(add)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await is_so():
        assert time.monotonic() < deadline, f"not so within {LIMIT_S:g} s"
        await anyio.sleep(0.01)


async def run_one(plane: Commands) -> None:
    """Submit a job and wait for its end."""
    result = await plane.submit(ANA, parse_job(SPEC), project="lab", owner=USER)
    await until(lambda: _is_over(plane.core, result.jobs[0].job_id))


async def test_a_commit_wakes_the_placer_and_the_job_runs_to_its_end() -> None:
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    async with Commands.running(core) as plane:
        await run_one(plane)


async def test_a_disk_that_is_full_at_the_start_delays_the_loops_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    write = core.records.store.write
    failures = iter(range(2))

    async def full(fn: Callable[[Tx], object], *, patience_s: float = 0.0) -> object:
        if next(failures, None) is not None:
            raise StoreUnavailable("no space left on device")
        return await write(fn, patience_s=patience_s)

    monkeypatch.setattr(core.records.store, "write", full)
    monkeypatch.setattr("shoal.control.loops.runner.FAILED_PAUSE_S", 0.01)
    monkeypatch.setattr("shoal.control.loops.runner.HEAL_EVERY_S", 0.05)
    async with Commands.running(core) as plane:
        await until(lambda: _has_nodes(core))
        await run_one(plane)


async def _has_nodes(core: Core) -> bool:
    return bool(await core.records.store.read(lambda tx: tx.nodes.all()))


async def test_a_loop_that_raises_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    monkeypatch.setattr("shoal.control.loops.runner.FAILED_PAUSE_S", 0.01)
    monkeypatch.setattr("shoal.control.loops.runner.WATCH_EVERY_S", 0.01)
    look = core.link.engine.list_owned
    failures = iter(range(3))

    async def list_owned() -> object:
        if next(failures, None) is not None:
            raise RuntimeError("a bug")
        return await look()

    monkeypatch.setattr(core.link.engine, "list_owned", list_owned)
    async with Commands.running(core) as plane:
        await run_one(plane)


async def test_a_loop_that_keeps_failing_is_named_with_its_reason_until_a_turn_goes_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_for(always(Act(run_s=0.0)))
    monkeypatch.setattr("shoal.control.loops.runner.FAILED_PAUSE_S", 0.01)
    monkeypatch.setattr("shoal.control.loops.runner.WATCH_EVERY_S", 0.01)
    look, is_broken = core.link.engine.list_owned, True

    async def list_owned() -> object:
        if is_broken:
            raise RuntimeError("a bug")
        return await look()

    def watching() -> list[FailingLoop]:
        return [loop for loop in core.loop_health.failing if loop.loop == "watch"]

    async def has_failed_often() -> bool:
        return any(loop.times > 2 for loop in watching())

    async def is_well() -> bool:
        return not watching()

    monkeypatch.setattr(core.link.engine, "list_owned", list_owned)
    before = core.records.clock.now()
    async with Commands.running(core):
        await until(has_failed_often)
        (failing,) = watching()
        assert failing.why == "RuntimeError: a bug"
        assert before <= failing.since <= core.records.clock.now()
        is_broken = False
        await until(is_well)


async def test_requests_after_a_start_see_the_first_look() -> None:
    core = core_for(always(Act(run_s=0.0)))
    async with Commands.running(core):
        assert await _has_nodes(core)
        assert core.link.outages.current is None


async def test_slow_first_look_does_not_block_renewals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a hundred jobs to stop on a Slurm that was away, every healthy supervisor met its fence."""
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    monkeypatch.setattr("shoal.control.loops.runner.FIRST_LOOK_S", 0.01)
    answers, look = anyio.Event(), core.link.engine.nodes

    async def nodes() -> list[NodeFacts]:
        await answers.wait()
        return await look()

    monkeypatch.setattr(core.link.engine, "nodes", nodes)
    with anyio.fail_after(LIMIT_S):
        async with Commands.running(core) as plane:
            result = await plane.submit(ANA, parse_job(SPEC), project="lab", owner=USER)
            outage = core.link.outages.current
            assert outage is not None
            assert not outage.has_answered
            answers.set()
            await until(lambda: _is_over(core, result.jobs[0].job_id))
            assert core.link.outages.current is None


async def test_submission_before_the_first_look_is_judged_by_the_recorded_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    async with Commands.running(core):
        pass
    later = core_for(always(Act(run_s=0.0)), core.records.store)
    monkeypatch.setattr("shoal.control.loops.runner.FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(later.link.engine, "nodes", anyio.sleep_forever)
    with anyio.fail_after(LIMIT_S):
        async with Commands.running(later) as plane:
            with pytest.raises(SpecError, match="10000"):
                await plane.submit(ANA, VAST, project="lab", owner=USER)
            assert later.planning.nodes.pools == {"default"}


async def test_job_that_can_never_fit_is_refused_from_the_first_moment_of_a_cluster() -> None:
    """Its nodes are read before any request is answered. The first plan comes after that."""
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    with anyio.fail_after(LIMIT_S):
        async with Commands.running(core) as plane:
            with pytest.raises(SpecError, match="10000"):
                await plane.submit(ANA, VAST, project="lab", owner=USER)


async def test_why_says_never_fits_once_a_slow_cluster_first_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_for(always(Act(run_s=0.0)))
    await people(core)
    monkeypatch.setattr("shoal.control.loops.runner.FIRST_LOOK_S", 0.01)
    answers, look = anyio.Event(), core.link.engine.nodes

    async def nodes() -> list[NodeFacts]:
        await answers.wait()
        return await look()

    monkeypatch.setattr(core.link.engine, "nodes", nodes)
    with anyio.fail_after(LIMIT_S):
        async with Commands.running(core) as plane:
            job = (await plane.submit(ANA, VAST, project="lab", owner=USER)).jobs[0]
            attempts = await core.records.store.read(lambda tx: tx.attempts.of_job(job.job_id))
            explanation = plane.explain(job, attempts)
            assert explanation is not None
            assert (
                explanation.sentence
                == "it waits for the Fake, which has not answered since this control plane started"
            )
            answers.set()

            async def is_impossible() -> bool:
                explanation = plane.explain(job, attempts)
                return (
                    explanation is not None
                    and explanation.why is WaitReason.NEVER_FITS
                    and "10000" in explanation.sentence
                )

            await until(is_impossible)


def test_jobs_are_scored_by_the_cluster_even_if_its_nodes_were_known_before_the_first_plan() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(resources={"cpus": 8})
    lab.submit(resources={"cpus": 1})
    lab.restart()
    lab.place()
    stamped = lab.core.planning.planner.waiting
    lab.restart()
    result_of(load_recorded_nodes(lab.core.records.store, lab.core.planning))
    lab.place()
    assert lab.core.planning.planner.waiting == stamped != []


async def _is_over(core: Core, job_id: str) -> bool:
    job = await core.records.store.read(lambda tx: tx.jobs.get(job_id))
    return job is not None and not job.is_open


async def test_wait_for_a_change_ends_with_the_next_commit_or_the_timeout() -> None:
    changed = CommitNotifier(Signal())
    await changed.wait(0.0)
    woken = anyio.Event()

    async def wait() -> None:
        await changed.wait(LIMIT_S)
        woken.set()

    with anyio.fail_after(LIMIT_S / 2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            changed.notify()
            await woken.wait()


async def test_commit_just_before_the_placer_waits_is_not_missed() -> None:
    plan = Signal()
    CommitNotifier(plan).notify()
    with anyio.fail_after(LIMIT_S / 2):
        await plan.wait(LIMIT_S)


def test_commit_without_events_is_not_new() -> None:
    changed = CommitNotifier(Signal())
    assert [changed.is_new(seq) for seq in (0, 0, 7, 7, 7, 8)] == [True, False, True, False, False, True]
