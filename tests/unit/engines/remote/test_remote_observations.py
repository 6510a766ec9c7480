"""What an engine with a mailbox reports of its tasks when the cluster says little, or nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import CLUSTER_UNREACHABLE, Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.home_records import MAILBOX, unfinished_attempts
from shoal.engines.remote.agent_launcher import MAX_PAUSE_S
from shoal.engines.remote.cluster_observation import Boot, ClusterObservation, ClusterTaskState
from shoal.engines.remote.engine import QueryTimes
from shoal.engines.remote.task_observer import HEARD_S, LATE_S, SILENT_S
from shoal.errors import EngineUnreachable, StateError
from shoal.model.evidence import PER_CLUSTER, UNSTARTED, Evidence
from shoal.runtime.files import spool
from shoal.wire import EndKind
from tests.support.fakes.remote_engine import ScriptedEngine
from tests.support.runtime.task_specs import change_task_spec
from tests.unit.engines.remote.test_mailbox_terms import ORDER, fetch, told

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine(tmp_path: Path, clock: VirtualClock) -> ScriptedEngine:
    engine = ScriptedEngine(tmp_path, clock)
    await engine.submit(Submission(attempt_id="att_1", epoch=1, task_specs=(ORDER,), bootstrap_token="t"))
    return engine


async def test_unstarted_task_keeps_waiting_while_the_cluster_is_unreachable(
    engine: ScriptedEngine,
) -> None:
    [observations] = await engine.list_owned()
    assert observations.evidence is Evidence.PENDING
    engine.is_away = True
    [unknown] = await engine.list_owned()
    assert unknown.evidence is Evidence.QUEUED
    assert unknown.raw == CLUSTER_UNREACHABLE, "why is for operators: a cluster's words may name machines"


async def test_reporting_task_is_alive_while_the_cluster_is_unreachable(
    engine: ScriptedEngine, clock: VirtualClock
) -> None:
    engine.mailbox.assign(fetch("one"))
    engine.is_away = True
    clock.advance(HEARD_S - 1.0)
    [seen] = await engine.list_owned()
    assert (seen.evidence, seen.silent_s) == (Evidence.ALIVE, HEARD_S - 1.0)
    clock.advance(1.0)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.UNKNOWN


async def test_reported_leftovers_make_a_task_an_orphan(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    news: list[int] = []
    engine.notify_changes(lambda: news.append(1))
    process = "a" * 32
    engine.mailbox.assign(fetch(process))
    engine.mailbox.receive(told(process), b"")
    news.clear()
    engine.mailbox.receive(msgspec.structs.replace(told(process), leftovers="it does not die"), b"")
    assert news == [1]
    for _ in range(3):
        [seen] = await engine.list_owned()
        assert (seen.evidence, seen.raw, seen.outcome) == (Evidence.ORPHANED, "it does not die", None)
        clock.advance(HEARD_S)
    engine = ScriptedEngine(tmp_path, clock)  # and whether or not it is heard from again
    [seen] = await engine.list_owned()
    assert (seen.evidence, seen.raw) == (Evidence.ORPHANED, "it does not die")
    outcome = engine.mailbox.make_outcome(engine.mailbox.find("att_1")["n1"], EndKind.LOST, "gone")
    engine.mailbox.receive(msgspec.structs.replace(told(process), outcome=outcome), b"")
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED
    assert not (tmp_path / "mailbox/live/att_1/n1/left").exists()


async def test_leftovers_seen_by_the_cluster_make_a_silent_task_an_orphan(
    engine: ScriptedEngine, clock: VirtualClock
) -> None:
    engine.mailbox.assign(fetch("one"))
    left = ClusterObservation(raw="it does not die", evidence=Evidence.ORPHANED_PER_CLUSTER)
    engine.cluster_observations = {("att_1", "n1"): left}
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ALIVE
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert (seen.evidence, seen.raw) == (Evidence.ORPHANED_PER_CLUSTER, "it does not die")
    doubt = ClusterObservation(raw="may be its", evidence=Evidence.DOUBTFUL)
    engine.cluster_observations = {("att_1", "n1"): doubt}
    [seen] = await engine.list_owned()
    assert (seen.evidence, seen.raw) == (Evidence.DOUBTFUL, "its node agent is silent; may be its")
    engine.cluster_observations = {("att_1", "n1"): ClusterObservation(state=ClusterTaskState.SUSPENDED)}
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.SUSPENDED


@pytest.mark.parametrize("evidence", PER_CLUSTER)
async def test_new_control_plane_waits_for_reports_before_it_calls_a_task_an_orphan(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path, evidence: Evidence
) -> None:
    engine.mailbox.assign(fetch("one"))
    later = ScriptedEngine(tmp_path, clock)
    later.cluster_observations = {("att_1", "n1"): ClusterObservation(raw="", evidence=evidence)}
    for _ in range(3):
        [seen] = await later.list_owned()
        assert seen.evidence is Evidence.DOUBTFUL
        clock.advance(LATE_S / 3)
    [seen] = await later.list_owned()
    assert seen.evidence is evidence


async def test_doubt_about_a_silent_task_is_withdrawn_by_a_cluster_that_looked(
    engine: ScriptedEngine, clock: VirtualClock
) -> None:
    engine.mailbox.assign(fetch("one"))
    engine.cluster_observations = {("att_1", "n1"): ClusterObservation(raw="fine", evidence=Evidence.CLEARED)}
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.CLEARED
    engine.is_away = True
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.UNKNOWN


async def test_new_control_plane_waits_for_reports_before_it_withdraws_a_doubt(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.mailbox.assign(fetch("one"))
    later = ScriptedEngine(tmp_path, clock)
    later.cluster_observations = {("att_1", "n1"): ClusterObservation(raw="fine", evidence=Evidence.CLEARED)}
    clock.advance(2 * HEARD_S)
    for _ in range(3):
        [seen] = await later.list_owned()
        assert seen.evidence is Evidence.UNKNOWN
        clock.advance(LATE_S / 3)
    [seen] = await later.list_owned()
    assert seen.evidence is Evidence.CLEARED


async def test_cluster_cancels_a_silent_task_without_grace(
    engine: ScriptedEngine, clock: VirtualClock
) -> None:
    engine.mailbox.assign(fetch("one"))
    await engine.cancel("att_1", 0.0)
    assert engine.cancelled == []  # it speaks: it hears of it, and hands in the rest of its log
    clock.advance(HEARD_S)
    await engine.cancel("att_1", 5.0)
    assert engine.cancelled == ["att_1"]


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -3600.0])
async def test_cluster_cancels_a_silent_task_after_its_grace(
    engine: ScriptedEngine, clock: VirtualClock, jump_s: float
) -> None:
    engine.mailbox.assign(fetch("one"))
    await engine.cancel("att_1", 60.0)
    clock.jump(jump_s)
    clock.advance(HEARD_S)
    await engine.cancel("att_1", 60.0)
    assert engine.cancelled == []
    clock.advance(60.0)
    await engine.cancel("att_1", 60.0)
    assert engine.cancelled == ["att_1"]


async def test_grace_of_a_recorded_stop_restarts_with_a_new_control_plane(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.mailbox.assign(fetch("one"))
    await engine.cancel("att_1", 60.0)
    clock.jump(-3600.0)
    later = ScriptedEngine(tmp_path, clock)
    clock.advance(60.0)
    await later.cancel("att_1", 60.0)
    assert later.cancelled == ["att_1"]


async def test_reaped_silent_task_releases_its_node(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.mailbox.assign(fetch("one"))
    await engine.reap("att_1")
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ALIVE  # it speaks: it is told to stop
    clock.advance(SILENT_S)
    assert [node.is_alive for node in await engine.nodes()] == [False, True]
    await engine.reap("att_1")
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED
    assert engine.cancelled == ["att_1"], "and the cluster was told to end what is left of it"
    assert [node.is_alive for node in await engine.nodes()] == [True, True]
    await engine.forget("att_1")
    assert await ScriptedEngine(tmp_path, clock).list_owned() == []


async def test_reap_during_an_outage_is_cancelled_in_the_cluster_later(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.mailbox.assign(fetch("one"))
    clock.advance(SILENT_S)
    engine.is_away = True
    await engine.reap("att_1")
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED
    assert [left.open_nodes for left in unfinished_attempts(tmp_path, MAILBOX)] == [[]], (
        "the home may go elsewhere"
    )
    with pytest.raises(EngineUnreachable):
        await engine.forget("att_1")
    engine.is_away = False
    await engine.forget("att_1")
    assert engine.cancelled == ["att_1"]
    assert await engine.list_owned() == []


async def test_temporary_rejection_is_no_launch_try(engine: ScriptedEngine, clock: VirtualClock) -> None:
    submission = Submission(attempt_id="att_1", epoch=1, task_specs=(ORDER,), bootstrap_token="t")
    engine.is_full = True
    for _ in range(20):
        clock.advance(MAX_PAUSE_S)
        with pytest.raises(EngineUnreachable, match="job submit limit"):
            await engine.submit(submission)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.PENDING


async def test_task_of_an_earlier_control_plane_has_time_to_report(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.mailbox.assign(fetch("one"))
    clock.advance(HEARD_S)
    later = ScriptedEngine(tmp_path, clock)
    await later.cancel("att_1", 0.0)
    assert later.cancelled == []
    clock.advance(HEARD_S)
    await later.cancel("att_1", 0.0)
    assert later.cancelled == ["att_1"]


async def test_silent_node_takes_no_work_though_the_cluster_calls_it_alive(
    engine: ScriptedEngine, clock: VirtualClock
) -> None:
    clock.advance(SILENT_S)
    assert [node.is_alive for node in await engine.nodes()] == [True, True]  # nobody is there to be heard
    engine.mailbox.assign(fetch("one"))
    clock.advance(SILENT_S - 1)
    assert [node.is_alive for node in await engine.nodes()] == [True, True]
    clock.advance(1)
    silent, other = await engine.nodes()
    assert (silent.is_alive, other.is_alive) == (False, True)
    assert silent.remarks == ("what runs there was not heard from for 45 s",)
    engine.mailbox.assign(fetch("one"))
    assert [node.is_alive for node in await engine.nodes()] == [True, True]


@pytest.mark.parametrize(
    ("stage", "is_lost"),
    [
        (ClusterTaskState.RUNNING, True),
        (ClusterTaskState.UNKNOWN, True),
        (ClusterTaskState.ENDED, True),
        (ClusterTaskState.QUEUED, False),
    ],
)
async def test_waiting_task_of_a_silent_node_is_closed_before_it_began(
    engine: ScriptedEngine, clock: VirtualClock, stage: ClusterTaskState, is_lost: bool
) -> None:
    second = change_task_spec(ORDER, attempt_id="att_2")
    await engine.submit(Submission(attempt_id="att_2", epoch=1, task_specs=(second,), bootstrap_token="t"))
    engine.cluster_observations = {("att_2", "n1"): ClusterObservation(state=stage, raw="Slurm's word")}
    engine.mailbox.assign(fetch("one"))
    clock.advance(SILENT_S - 1)
    assert [seen.outcome for seen in await engine.list_owned()] == [None, None]
    clock.advance(1)
    silent, waits = await engine.list_owned()
    assert silent.evidence is Evidence.UNKNOWN
    assert waits.evidence in ((Evidence.ENDED,) if is_lost else UNSTARTED)
    if waits.outcome is not None:
        assert waits.outcome.kind is EndKind.LOST
        assert "`n1`: what runs there was not heard from for 45 s; Slurm's word" in waits.outcome.message
        with pytest.raises(StateError):  # one that the cluster started, and that hears us again
            engine.mailbox.assign(msgspec.structs.replace(fetch("two"), attempt_id="att_2"))


async def test_a_node_whose_work_is_suspended_is_not_called_silent_for_that(
    engine: ScriptedEngine, clock: VirtualClock
) -> None:
    engine.mailbox.assign(fetch("one"))
    engine.cluster_observations = {
        ("att_1", ORDER.identity.node): ClusterObservation(state=ClusterTaskState.SUSPENDED, raw="SUSPENDED")
    }
    clock.advance(SILENT_S)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.SUSPENDED
    assert [node.is_alive for node in await engine.nodes()] == [True, True]
    engine.cluster_observations = {
        ("att_1", ORDER.identity.node): ClusterObservation(state=ClusterTaskState.RUNNING, raw="RUNNING")
    }
    await engine.list_owned()
    assert [node.is_alive for node in await engine.nodes()] == [False, True]


def asked(clock: VirtualClock) -> QueryTimes:
    return QueryTimes(clock.monotonic(), clock.monotonic())


def booted(at: float) -> Boot:
    return Boot(machine="m", at=at)


async def test_query_older_than_the_task_records_no_boot(engine: ScriptedEngine, clock: VirtualClock) -> None:
    before = asked(clock)
    clock.advance(1.0)
    task = engine.mailbox.assign(fetch("one"))
    assert not await engine.has_rebooted(task, booted(1000.0), before)
    clock.advance(1.0)
    for _ in range(2):
        assert not await engine.has_rebooted(task, booted(5000.0), asked(clock))
    engine.mailbox.assign(fetch("one"))
    assert not await engine.has_rebooted(task, booted(5000.0), asked(clock))
    clock.advance(1.0)
    assert not await engine.has_rebooted(task, booted(5000.0), asked(clock))
    assert await engine.has_rebooted(task, booted(9000.0), asked(clock))


async def test_report_after_a_boot_query_proves_the_boot_is_current(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    task = engine.mailbox.assign(fetch("one"))
    for at in (1000.0, 9000.0, 5000.0):  # that machine's clock is set, there and back
        told_at = asked(clock)
        clock.advance(1.0)
        engine.mailbox.assign(fetch("one"))
        assert not await engine.has_rebooted(task, booted(at), told_at)
    clock.advance(1.0)
    assert not await engine.has_rebooted(task, booted(5000.0), asked(clock))
    assert await engine.has_rebooted(task, booted(9000.0), asked(clock))
    task = ScriptedEngine(tmp_path, clock).mailbox.find("att_1")["n1"]
    assert await engine.has_rebooted(task, booted(9000.0), asked(clock))


async def test_a_date_that_an_older_version_left_is_no_evidence(
    engine: ScriptedEngine, clock: VirtualClock, tmp_path: Path
) -> None:
    task = engine.mailbox.assign(fetch("one"))
    for name in ("booted", "boot"):
        spool.durable_write(f"{task.files.directory}/{name}", b"1000.0")
    clock.advance(HEARD_S)
    again = ScriptedEngine(tmp_path, clock)
    task = again.mailbox.find("att_1")["n1"]
    assert not await again.has_rebooted(task, booted(9000.0), asked(clock))
