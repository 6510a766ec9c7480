"""Nodes that do not answer Slurm, which may wait half an hour for them, and a Slurm that does not answer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.remote.task_observer import BEHIND_S, HEARD_S, SILENT_S
from shoal.engines.slurm.client import TIMEOUT_S
from shoal.engines.slurm.engine import JOBS_S, NODES_S, SLOW_S, SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import SlurmJob
from shoal.errors import EngineUnreachable, StateError
from shoal.model.evidence import UNSTARTED, Evidence
from shoal.wire import EndKind, TaskSpecRequest
from tests.support.slurm.fake_slurm import BOOTED_AT, NO_PROOF, engine_on, slurm_task_spec
from tests.unit.engines.slurm.test_slurm_stranded import GANG, UNAVAILABLE, Bench, FullSlurm

pytestmark = pytest.mark.anyio
AWAY = EngineUnreachable("scontrol: Unable to contact slurm controller")


async def looked_at(bench: Bench, for_s: float) -> set[Evidence]:
    """What is seen of its tasks in the end, looked at as often as somebody does."""
    seen = []
    for _ in range(int(for_s / NODES_S)):
        seen = await bench.look(NODES_S)
    return {item.evidence for item in seen}


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
async def test_job_on_an_unresponsive_node_is_placed_elsewhere(
    tmp_path: Path, state: str, job_state: str, reason: str
) -> None:
    bench = Bench(tmp_path)
    await bench.look()
    bench.slurm.state, bench.slurm.job_state, bench.slurm.reason = state, job_state, reason
    is_awaited = await looked_at(bench, SILENT_S) <= set(UNSTARTED)
    assert is_awaited or ("DRAIN" in state and job_state == "PENDING")
    await looked_at(bench, 2 * NODES_S)
    [seen] = await bench.look()
    assert seen.outcome is not None
    assert (seen.outcome.kind, seen.outcome.started_at) == (EndKind.LOST, None)
    assert "taken back before it began: `n0` " in seen.outcome.message
    assert f"Slurm job 7 is {job_state}" in seen.outcome.message
    with pytest.raises(StateError):
        bench.engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="late"))
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(slurm_task_spec().identity, 0)], ""), (
        "it would hold what others could have"
    )


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
async def test_job_that_waits_for_another_reason_stays(
    tmp_path: Path, state: str, job_state: str, reason: str
) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.job_state, bench.slurm.reason = state, job_state, reason
    assert await looked_at(bench, 4 * SILENT_S) <= set(UNSTARTED)


async def test_node_that_responds_sometimes_is_not_unresponsive(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for _ in range(4):
        bench.slurm.state = "IDLE*"
        assert await looked_at(bench, SILENT_S - NODES_S) <= set(UNSTARTED)
        bench.slurm.state = "IDLE"
        await bench.look(NODES_S)


async def test_started_task_on_an_unresponsive_node_is_never_closed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.job_state = "MIXED*", "RUNNING"
    bench.engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    assert await looked_at(bench, 1800.0) == {Evidence.UNKNOWN}
    await bench.engine.clear_queue("att_1")
    assert bench.slurm.cancelled == ([], "")


async def test_of_a_gang_that_has_begun_elsewhere_what_was_to_begin_on_a_mute_node_is_lost_later(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, GANG)
    bench.slurm.state, bench.slurm.job_state = "MIXED*", "RUNNING"
    bench.engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n1", process="one"))
    assert await looked_at(bench, 2 * SILENT_S) <= {*UNSTARTED, *NO_PROOF}
    await looked_at(bench, BEHIND_S)
    seen = {item.node: item.outcome for item in await bench.look()}
    assert seen["n1"] is None
    assert seen["n0"] is not None
    await bench.engine.clear_queue("att_1")
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

    def jobs(self) -> list[SlurmJob]:
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
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)

    async def evidence_over(for_s: float) -> set[Evidence]:
        result = set()
        for _ in range(int(for_s / NODES_S)):
            clock.advance(NODES_S)
            result = {observation.evidence for observation in await engine.list_owned()}
        return result

    slurm.state = "IDLE*"
    assert await evidence_over(SILENT_S - NODES_S) <= set(UNSTARTED)
    slurm.is_away = True
    assert await evidence_over(10 * SILENT_S) <= set(UNSTARTED)
    slurm.is_away = False
    assert await evidence_over(SILENT_S - NODES_S) <= set(UNSTARTED)
    engine = engine_on(tmp_path, clock, slurm)
    assert await evidence_over(SILENT_S - NODES_S) <= set(UNSTARTED)
    assert await evidence_over(3 * NODES_S) == {Evidence.ENDED}


async def test_while_slurm_is_away_ranks_meet_at_the_address_that_is_known(tmp_path: Path) -> None:
    engine, clock, slurm = with_away(tmp_path)
    slurm.is_away = True
    laid = slurm_task_spec(nodes=GANG, master_addr="10.0.0.7")
    assert await engine.resolve_task_spec(laid) == laid, "nobody has said another since we were started"
    slurm.is_away = False
    clock.advance(JOBS_S)
    [first, *_] = await engine.nodes()
    slurm.is_away = True
    clock.advance(2 * NODES_S)
    assert (await engine.resolve_task_spec(laid)).ranks.master_addr == first.address


async def test_rendezvous_does_not_use_the_old_address_of_a_waking_node(tmp_path: Path) -> None:
    engine, clock, slurm = with_away(tmp_path)
    slurm.state = "ALLOCATED+CLOUD+POWERING_UP+NOT_RESPONDING"
    await engine.nodes()
    slurm.is_away = True
    clock.advance(2 * NODES_S)
    with pytest.raises(EngineUnreachable):
        await engine.resolve_task_spec(slurm_task_spec(nodes=GANG))


async def test_failed_query_of_slurm_is_not_repeated_by_every_caller(tmp_path: Path) -> None:
    """Each question holds up all that come after it, and with them what watches all jobs."""
    engine, clock, slurm = with_away(tmp_path)
    slurm.is_away, slurm.takes_s = True, TIMEOUT_S
    for _ in range(64):
        await engine.resolve_task_spec(slurm_task_spec(nodes=GANG))
        with pytest.raises(EngineUnreachable):
            await engine.nodes()
    assert slurm.times_asked_in_vain == 1
    clock.advance(TIMEOUT_S)
    slurm.is_away = False
    assert len(await engine.nodes()) == 3


ATTEMPTS = tuple(f"att_{number}" for number in range(64))
ALL = sorted(job_name(slurm_task_spec(attempt_id=attempt_id).identity, 0) for attempt_id in ATTEMPTS)


def with_many(home: Path) -> tuple[SlurmEngine, VirtualClock, AwaySlurm]:
    """Attempts whose task specs nobody has: to stop one is to cancel its job."""
    engine, clock, slurm = with_away(home)
    slurm.takes_s = TIMEOUT_S
    for owned in ATTEMPTS:
        engine.mailbox.add((slurm_task_spec(attempt_id=owned, nodes=("n0",)),), None)
    return engine, clock, slurm


async def stopped(engine: SlurmEngine) -> int:
    """How many of them were stopped: all are told to, as at one look at everything that runs."""
    done = 0
    for owned in ATTEMPTS:
        try:
            await engine.cancel(owned, 0.0)
            done += 1
        except EngineUnreachable:
            continue
    return done


async def test_many_stops_during_an_outage_cost_one_scancel(tmp_path: Path) -> None:
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


async def test_scancel_is_not_tried_right_after_a_failed_query(tmp_path: Path) -> None:
    engine, clock, slurm = with_many(tmp_path)
    slurm.is_away = True
    with pytest.raises(EngineUnreachable):
        await engine.nodes()
    requested, now = slurm.times_asked_in_vain, clock.monotonic()
    assert await stopped(engine) == 0
    assert (slurm.times_asked_in_vain, clock.monotonic()) == (requested, now)


@pytest.mark.parametrize("took_s", [0.1, SLOW_S])
async def test_fast_failure_of_another_query_does_not_prevent_scancel(
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


async def test_reaped_attempts_are_cancelled_after_an_outage_of_slurm(
    tmp_path: Path,
) -> None:
    engine, clock, slurm = with_many(tmp_path)
    slurm.is_away = True
    for owned in ATTEMPTS:
        await engine.reap(owned)
    clock.advance(HEARD_S)
    began = clock.monotonic()
    for owned in ATTEMPTS:
        await engine.reap(owned)
        with pytest.raises(EngineUnreachable):
            await engine.forget(owned)
    assert clock.monotonic() - began <= 2 * TIMEOUT_S
    clock.advance(4 * TIMEOUT_S)
    slurm.is_away = False
    for owned in ATTEMPTS:
        await engine.forget(owned)
    assert sorted(slurm.cancelled[0]) == ALL
    assert not engine.mailbox.tasks()


async def test_concurrent_stops_share_one_scancel_failure(tmp_path: Path) -> None:
    engine, _, slurm = with_many(tmp_path)
    slurm.is_away = True

    async def stop(owned: str) -> None:
        with pytest.raises(EngineUnreachable):
            await engine.cancel(owned, 0.0)

    async with anyio.create_task_group() as tasks:
        for owned in ATTEMPTS[:8]:
            tasks.start_soon(stop, owned)
    assert slurm.times_asked_in_vain == 1
