"""Nodes that do not answer Slurm, which may wait half an hour for them, and a Slurm that does not answer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
import pytest

from shoal.engines.base import Sight
from shoal.engines.fake import VirtualClock
from shoal.engines.sightings import BEHIND_S, HEARD_S, SILENT_S
from shoal.engines.slurm.client import TIMEOUT_S
from shoal.engines.slurm.engine import JOBS_S, NODES_S, SLOW_S, SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import Job
from shoal.errors import EngineUnreachable, StateError
from shoal.wire import EndKind, Fetch
from tests.support.paper_slurm import BOOTED_AT, engine_on, order
from tests.unit.engines.test_slurm_stranded import GANG, UNAVAILABLE, Bench, FullSlurm

pytestmark = pytest.mark.anyio
AWAY = EngineUnreachable("scontrol: Unable to contact slurm controller")


async def looked_at(bench: Bench, for_s: float) -> set[Sight]:
    """What is seen of its shares in the end, looked at as often as somebody does."""
    seen = []
    for _ in range(int(for_s / NODES_S)):
        seen = await bench.look(NODES_S)
    return {one.sight for one in seen}


@pytest.mark.parametrize(
    "state", ["IDLE*", "MIXED*", "IDLE+NOT_RESPONDING", "ALLOCATED+DRAIN+NOT_RESPONDING"]
)
@pytest.mark.parametrize(
    ("job_state", "reason"),
    [
        ("RUNNING", "None"),
        ("CONFIGURING", "None"),
        ("COMPLETING", "None"),
        ("PENDING", "Resources"),
        ("PENDING", UNAVAILABLE),
    ],
)
async def test_what_was_given_to_a_node_that_stays_mute_goes_elsewhere(
    tmp_path: Path, state: str, job_state: str, reason: str
) -> None:
    bench = Bench(tmp_path)
    await bench.look()
    bench.slurm.state, bench.slurm.job_state, bench.slurm.reason = state, job_state, reason
    is_awaited = await looked_at(bench, SILENT_S) == {Sight.PENDING}
    assert is_awaited or ("DRAIN" in state and job_state == "PENDING")
    await looked_at(bench, 2 * NODES_S)
    [seen] = await bench.look()
    assert seen.outcome is not None
    assert (seen.outcome.kind, seen.outcome.started_at) == (EndKind.LOST, None)
    assert "taken back before it began: `n0` " in seen.outcome.message
    assert f"Slurm job 7 is {job_state}" in seen.outcome.message
    with pytest.raises(StateError):
        bench.engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="late"))
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(order(), 0)], ""), "it would hold what others could have"


@pytest.mark.parametrize(
    ("state", "job_state", "reason"),
    [
        # Slurm wakes it.
        ("IDLE+CLOUD+POWERED_DOWN+NOT_RESPONDING", "PENDING", "Resources"),
        ("ALLOCATED+CLOUD+POWERING_UP+NOT_RESPONDING", "CONFIGURING", "None"),
        # Held, or at a limit: wherever it is to run.
        ("IDLE*", "PENDING", "JobHeldAdmin"),
        ("IDLE*", "PENDING", "QOSMaxJobsPerUserLimit"),
        ("IDLE*", "SUSPENDED", "None"),
        ("MIXED+DRAIN", "RUNNING", "None"),
    ],
)
async def test_what_waits_for_something_else_stays(
    tmp_path: Path, state: str, job_state: str, reason: str
) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.job_state, bench.slurm.reason = state, job_state, reason
    assert await looked_at(bench, 4 * SILENT_S) == {Sight.PENDING}


async def test_a_node_that_answers_now_and_then_is_not_away(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(4):
        bench.slurm.state = "IDLE*"
        assert await looked_at(bench, SILENT_S - NODES_S) == {Sight.PENDING}
        bench.slurm.state = "IDLE"
        await bench.look(NODES_S)


async def test_what_has_begun_on_a_mute_node_is_never_taken_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.job_state = "MIXED*", "RUNNING"
    bench.engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    assert await looked_at(bench, 1800.0) == {Sight.UNKNOWN}
    await bench.engine.take_back("att_1")
    assert bench.slurm.cancelled == ([], "")


async def test_of_a_gang_that_has_begun_elsewhere_what_was_to_begin_on_a_mute_node_is_lost_later(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, GANG)
    bench.slurm.state, bench.slurm.job_state = "MIXED*", "RUNNING"
    bench.engine.desk.take(Fetch(attempt_id="att_1", node="n1", process="one"))
    assert await looked_at(bench, 2 * SILENT_S) == {Sight.PENDING, Sight.UNKNOWN}
    await looked_at(bench, BEHIND_S)
    seen = {one.node: one.outcome for one in await bench.look()}
    assert seen["n1"] is None
    assert seen["n0"] is not None
    await bench.engine.take_back("att_1")
    assert bench.slurm.cancelled == ([], ""), "its twin runs in the same job"


class AwaySlurm(FullSlurm):
    """Whoever asks is told after a while that nobody answers."""

    is_away = False
    takes_s = 0.0
    times_asked_in_vain = 0
    clock: VirtualClock

    def cancel(self, names: Collection[str], user: str = "") -> None:
        if self.is_away:
            self.times_asked_in_vain += 1
            self.clock.advance(self.takes_s)
            raise AWAY
        self.cancelled = [*self.cancelled[0], *names], user

    def facts(self) -> SlurmFacts:
        if self.is_away:
            self.times_asked_in_vain += 1
            self.clock.advance(self.takes_s)
            raise AWAY
        return super().facts()

    def jobs(self) -> list[Job]:
        if self.is_away:
            raise AWAY
        return super().jobs()

    def nodes(self) -> list[RawNode]:
        if self.is_away:
            self.times_asked_in_vain += 1
            self.clock.advance(self.takes_s)
            raise AWAY
        return super().nodes()


def with_away(home: Path) -> tuple[SlurmEngine, VirtualClock, AwaySlurm]:
    clock, slurm = VirtualClock(BOOTED_AT), AwaySlurm()
    slurm.clock = clock
    return engine_on(home, clock, slurm), clock, slurm


async def test_after_an_outage_of_slurm_or_of_ours_the_time_counts_anew(tmp_path: Path) -> None:
    """A slurmctld that has just been started has not heard from its nodes yet."""
    engine, clock, slurm = with_away(tmp_path)
    engine.desk.add((order(nodes=("n0",)),), None)

    async def sights(for_s: float) -> set[Sight]:
        found = set()
        for _ in range(int(for_s / NODES_S)):
            clock.advance(NODES_S)
            found = {one.sight for one in await engine.list_owned()}
        return found

    slurm.state = "IDLE*"
    assert await sights(SILENT_S - NODES_S) == {Sight.PENDING}
    slurm.is_away = True
    assert await sights(10 * SILENT_S) == {Sight.PENDING}
    slurm.is_away = False
    assert await sights(SILENT_S - NODES_S) == {Sight.PENDING}
    engine = engine_on(tmp_path, clock, slurm)
    assert await sights(SILENT_S - NODES_S) == {Sight.PENDING}
    assert await sights(3 * NODES_S) == {Sight.ENDED}


async def test_while_slurm_is_away_ranks_meet_at_the_address_that_is_known(tmp_path: Path) -> None:
    engine, clock, slurm = with_away(tmp_path)
    slurm.is_away = True
    laid = order(nodes=GANG, master_addr="10.0.0.7")
    assert await engine.as_given(laid) == laid, "nobody has said another since we were started"
    slurm.is_away = False
    clock.advance(JOBS_S)
    [first, *_] = await engine.nodes()
    slurm.is_away = True
    clock.advance(2 * NODES_S)
    assert (await engine.as_given(laid)).master_addr == first.address


async def test_while_slurm_is_away_nobody_meets_where_a_node_was_that_it_wakes(tmp_path: Path) -> None:
    engine, clock, slurm = with_away(tmp_path)
    slurm.state = "ALLOCATED+CLOUD+POWERING_UP+NOT_RESPONDING"
    await engine.nodes()
    slurm.is_away = True
    clock.advance(2 * NODES_S)
    with pytest.raises(EngineUnreachable):
        await engine.as_given(order(nodes=GANG))


async def test_what_slurm_did_not_answer_is_not_asked_by_everybody(tmp_path: Path) -> None:
    """Each question holds up all that come after it, and with them what watches all jobs."""
    engine, clock, slurm = with_away(tmp_path)
    slurm.is_away, slurm.takes_s = True, TIMEOUT_S
    for _ in range(64):
        await engine.as_given(order(nodes=GANG))
        with pytest.raises(EngineUnreachable):
            await engine.nodes()
    assert slurm.times_asked_in_vain == 1
    clock.advance(TIMEOUT_S)
    slurm.is_away = False
    assert len(await engine.nodes()) == 3


ATTEMPTS = tuple(f"att_{number}" for number in range(64))
ALL = sorted(job_name(order(attempt_id=own), 0) for own in ATTEMPTS)


def with_many(home: Path) -> tuple[SlurmEngine, VirtualClock, AwaySlurm]:
    """Attempts whose orders nobody has: to stop one is to cancel its job."""
    engine, clock, slurm = with_away(home)
    slurm.takes_s = TIMEOUT_S
    for own in ATTEMPTS:
        engine.desk.add((order(attempt_id=own, nodes=("n0",)),), None)
    return engine, clock, slurm


async def stopped(engine: SlurmEngine) -> int:
    """How many of them were stopped: all are told to, as at one look at everything that runs."""
    done = 0
    for own in ATTEMPTS:
        try:
            await engine.cancel(own, 0.0)
            done += 1
        except EngineUnreachable:
            continue
    return done


async def test_of_all_that_is_to_be_stopped_one_finds_out_that_slurm_is_away(tmp_path: Path) -> None:
    """`scancel` hangs for half a minute: for a hundred of them nobody would be watched for an hour."""
    engine, clock, slurm = with_many(tmp_path)
    slurm.is_away = True
    began = clock.monotonic()
    assert await stopped(engine) == 0
    assert (slurm.times_asked_in_vain, clock.monotonic() - began) == (1, TIMEOUT_S)
    clock.advance(TIMEOUT_S)
    slurm.is_away = False
    assert await stopped(engine) == len(ATTEMPTS)
    assert sorted(slurm.cancelled[0]) == ALL


async def test_nobody_waits_for_scancel_who_knows_that_slurm_does_not_answer(tmp_path: Path) -> None:
    engine, clock, slurm = with_many(tmp_path)
    slurm.is_away = True
    with pytest.raises(EngineUnreachable):
        await engine.nodes()
    asked, now = slurm.times_asked_in_vain, clock.monotonic()
    assert await stopped(engine) == 0
    assert (slurm.times_asked_in_vain, clock.monotonic()) == (asked, now)


@pytest.mark.parametrize("took_s", [0.1, SLOW_S])
async def test_what_is_stopped_is_cancelled_though_another_question_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    """As where `squeue` is refused, each second anew, and slurmctld is well; one that hangs is left alone."""
    engine, clock, slurm = with_many(tmp_path)

    def refused() -> list[Any]:
        clock.advance(took_s)
        raise AWAY

    monkeypatch.setattr(slurm, "jobs", refused)
    monkeypatch.setattr(slurm, "nodes", refused)
    await engine.list_owned()
    with pytest.raises(EngineUnreachable):
        await engine.nodes()
    assert await stopped(engine) == (len(ATTEMPTS) if took_s < SLOW_S else 0)


async def test_what_is_buried_while_slurm_is_away_costs_it_one_question_and_is_cancelled_later(
    tmp_path: Path,
) -> None:
    engine, clock, slurm = with_many(tmp_path)
    slurm.is_away = True
    for own in ATTEMPTS:
        await engine.bury(own)
    clock.advance(HEARD_S)
    began = clock.monotonic()
    for own in ATTEMPTS:
        await engine.bury(own)
        with pytest.raises(EngineUnreachable):
            await engine.forget(own)
    assert clock.monotonic() - began <= 2 * TIMEOUT_S
    clock.advance(4 * TIMEOUT_S)
    slurm.is_away = False
    for own in ATTEMPTS:
        await engine.forget(own)
    assert sorted(slurm.cancelled[0]) == ALL
    assert not engine.desk.shares()


async def test_who_stops_something_at_the_same_time_waits_for_the_same_answer(tmp_path: Path) -> None:
    engine, _, slurm = with_many(tmp_path)
    slurm.is_away = True

    async def stop(own: str) -> None:
        with pytest.raises(EngineUnreachable):
            await engine.cancel(own, 0.0)

    async with anyio.create_task_group() as tasks:
        for own in ATTEMPTS[:8]:
            tasks.start_soon(stop, own)
    assert slurm.times_asked_in_vain == 1
