"""What an engine with a desk reports of its shares when the cluster says little, or nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import CANNOT_ASK, Sight, Submission
from shoal.engines.boots import Boot
from shoal.engines.cluster_id import DESK, all_left
from shoal.engines.fake import VirtualClock
from shoal.engines.glimpses import Glimpse, Stage
from shoal.engines.remote import Asked
from shoal.engines.sightings import HEARD_S, LATE_S, SILENT_S
from shoal.engines.starts import MAX_PAUSE_S
from shoal.errors import EngineUnreachable, StateError
from shoal.runtime import spool
from shoal.wire import EndKind
from tests.support.lent import Lent
from tests.unit.engines.test_desk_terms import ORDER, fetch, told

pytestmark = pytest.mark.anyio


@pytest.fixture
async def engine(tmp_path: Path, clock: VirtualClock) -> Lent:
    engine = Lent(tmp_path, clock)
    await engine.submit(Submission(attempt_id="att_1", epoch=1, orders=(ORDER,), ticket="t"))
    return engine


async def test_what_nobody_has_begun_waits_on_while_the_cluster_cannot_be_asked(engine: Lent) -> None:
    [known] = await engine.list_owned()
    assert (known.sight, known.is_queued) == (Sight.PENDING, False)
    engine.is_away = True
    [unknown] = await engine.list_owned()
    assert (unknown.sight, unknown.is_queued) == (Sight.PENDING, True)
    assert unknown.raw == CANNOT_ASK, "why is for operators: a cluster's words may name machines"


async def test_who_speaks_is_alive_while_the_cluster_cannot_be_asked(
    engine: Lent, clock: VirtualClock
) -> None:
    engine.desk.take(fetch("one"))
    engine.is_away = True
    clock.advance(HEARD_S - 1.0)
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.silent_s) == (Sight.ALIVE, HEARD_S - 1.0)
    clock.advance(1.0)
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.is_queued) == (Sight.UNKNOWN, False)


async def test_what_does_not_die_without_its_supervisor_is_an_orphan_whoever_is_heard_from(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    news: list[int] = []
    engine.notice(lambda: news.append(1))
    process = "a" * 32
    engine.desk.take(fetch(process))
    engine.desk.hear(told(process), b"")
    news.clear()
    engine.desk.hear(msgspec.structs.replace(told(process), left="it does not die"), b"")
    assert news == [1]
    for _ in range(3):
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.raw, seen.outcome) == (Sight.ORPHANED, "it does not die", None)
        clock.advance(HEARD_S)
    engine = Lent(tmp_path, clock)  # and whether or not it is heard from again
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.raw, seen.is_hearsay) == (Sight.ORPHANED, "it does not die", False)
    outcome = engine.desk.end_of(engine.desk.find("att_1")["n1"], EndKind.LOST, "gone")
    engine.desk.hear(msgspec.structs.replace(told(process), outcome=outcome), b"")
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED
    assert not (tmp_path / "desk/live/att_1/n1/left").exists()


async def test_what_the_cluster_saw_not_die_is_an_orphan_once_its_keeper_is_silent(
    engine: Lent, clock: VirtualClock
) -> None:
    engine.desk.take(fetch("one"))
    engine.seen = {("att_1", "n1"): Glimpse(raw="it does not die", is_left=True)}
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.raw, seen.is_hearsay) == (Sight.ORPHANED, "it does not die", True)
    engine.seen = {("att_1", "n1"): Glimpse(raw="may be its", is_doubtful=True)}
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.raw) == (Sight.DOUBTFUL, "its keeper is silent; may be its")
    assert seen.is_hearsay
    engine.seen = {("att_1", "n1"): Glimpse(stage=Stage.SUSPENDED)}
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.is_hearsay) == (Sight.ALIVE, True)


@pytest.mark.parametrize("is_left", [True, False])
async def test_nothing_is_an_orphan_before_a_new_control_plane_has_listened_for_long_enough(
    engine: Lent, clock: VirtualClock, tmp_path: Path, is_left: bool
) -> None:
    engine.desk.take(fetch("one"))
    later = Lent(tmp_path, clock)
    later.seen = {("att_1", "n1"): Glimpse(raw="", is_left=is_left, is_doubtful=True)}
    for _ in range(3):
        [seen] = await later.list_owned()
        assert seen.sight is Sight.DOUBTFUL
        clock.advance(LATE_S / 3)
    [seen] = await later.list_owned()
    assert seen.sight is (Sight.ORPHANED if is_left else Sight.DOUBTFUL)


async def test_a_doubt_is_withdrawn_by_who_looked_and_while_nobody_is_heard_from(
    engine: Lent, clock: VirtualClock
) -> None:
    engine.desk.take(fetch("one"))
    engine.seen = {("att_1", "n1"): Glimpse(raw="fine", is_clear=True)}
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.is_cleared) == (Sight.UNKNOWN, True)
    engine.is_away = True
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.is_cleared) == (Sight.UNKNOWN, False)


async def test_no_doubt_is_withdrawn_before_who_lived_under_an_earlier_control_plane_could_speak(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.desk.take(fetch("one"))
    later = Lent(tmp_path, clock)
    later.seen = {("att_1", "n1"): Glimpse(raw="fine", is_clear=True)}
    clock.advance(2 * HEARD_S)
    for _ in range(3):
        [seen] = await later.list_owned()
        assert (seen.sight, seen.is_cleared) == (Sight.UNKNOWN, False)
        clock.advance(LATE_S / 3)
    [seen] = await later.list_owned()
    assert (seen.sight, seen.is_cleared) == (Sight.UNKNOWN, True)


async def test_what_is_to_end_at_once_and_hears_nobody_is_ended_by_the_cluster(
    engine: Lent, clock: VirtualClock
) -> None:
    engine.desk.take(fetch("one"))
    await engine.cancel("att_1", 0.0)
    assert engine.ended == []  # it speaks: it hears of it, and hands in the rest of its log
    clock.advance(HEARD_S)
    await engine.cancel("att_1", 5.0)
    assert engine.ended == ["att_1"]


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -3600.0])
async def test_what_has_its_grace_and_hears_nobody_is_ended_by_the_cluster_afterwards(
    engine: Lent, clock: VirtualClock, jump_s: float
) -> None:
    engine.desk.take(fetch("one"))
    await engine.cancel("att_1", 60.0)
    clock.jump(jump_s)
    clock.advance(HEARD_S)
    await engine.cancel("att_1", 60.0)
    assert engine.ended == []
    clock.advance(60.0)
    await engine.cancel("att_1", 60.0)
    assert engine.ended == ["att_1"]


async def test_a_stop_that_an_earlier_control_plane_wrote_has_its_grace_from_the_next_ones_start(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.desk.take(fetch("one"))
    await engine.cancel("att_1", 60.0)
    clock.jump(-3600.0)
    later = Lent(tmp_path, clock)
    clock.advance(60.0)
    await later.cancel("att_1", 60.0)
    assert later.ended == ["att_1"]


async def test_what_is_recorded_as_over_and_silent_holds_its_node_no_longer(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.desk.take(fetch("one"))
    await engine.bury("att_1")
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE  # it speaks: it is told to stop
    clock.advance(SILENT_S)
    assert [node.is_alive for node in await engine.nodes()] == [False, True]
    await engine.bury("att_1")
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED
    assert engine.ended == ["att_1"], "and the cluster was told to end what is left of it"
    assert [node.is_alive for node in await engine.nodes()] == [True, True]
    await engine.forget("att_1")
    assert await Lent(tmp_path, clock).list_owned() == []


async def test_what_is_recorded_as_over_is_over_while_the_cluster_is_away_and_ended_there_later(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.desk.take(fetch("one"))
    clock.advance(SILENT_S)
    engine.is_away = True
    await engine.bury("att_1")
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED
    assert [left.open_nodes for left in all_left(tmp_path, DESK)] == [[]], "the home may go elsewhere"
    with pytest.raises(EngineUnreachable):
        await engine.forget("att_1")
    engine.is_away = False
    await engine.forget("att_1")
    assert engine.ended == ["att_1"]
    assert await engine.list_owned() == []


async def test_what_is_turned_away_for_now_is_no_try(engine: Lent, clock: VirtualClock) -> None:
    submission = Submission(attempt_id="att_1", epoch=1, orders=(ORDER,), ticket="t")
    engine.is_full = True
    for _ in range(20):
        clock.advance(MAX_PAUSE_S)
        with pytest.raises(EngineUnreachable, match="job submit limit"):
            await engine.submit(submission)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.PENDING


async def test_who_was_heard_by_an_earlier_control_plane_has_time_to_speak(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    engine.desk.take(fetch("one"))
    clock.advance(HEARD_S)
    later = Lent(tmp_path, clock)
    await later.cancel("att_1", 0.0)
    assert later.ended == []
    clock.advance(HEARD_S)
    await later.cancel("att_1", 0.0)
    assert later.ended == ["att_1"]


async def test_a_node_that_nobody_was_heard_from_for_long_takes_no_work_whatever_the_cluster_says(
    engine: Lent, clock: VirtualClock
) -> None:
    clock.advance(SILENT_S)
    assert [node.is_alive for node in await engine.nodes()] == [True, True]  # nobody is there to be heard
    engine.desk.take(fetch("one"))
    clock.advance(SILENT_S - 1)
    assert [node.is_alive for node in await engine.nodes()] == [True, True]
    clock.advance(1)
    silent, other = await engine.nodes()
    assert (silent.is_alive, other.is_alive) == (False, True)
    assert silent.remarks == ("what runs there was not heard from for 45 s",)
    engine.desk.take(fetch("one"))
    assert [node.is_alive for node in await engine.nodes()] == [True, True]


@pytest.mark.parametrize(
    ("stage", "is_lost"),
    [(Stage.RUNNING, True), (Stage.UNKNOWN, True), (Stage.ENDED, True), (Stage.QUEUED, False)],
)
async def test_what_was_to_begin_on_a_node_that_nobody_is_heard_from_is_lost_there_before_it_began(
    engine: Lent, clock: VirtualClock, stage: Stage, is_lost: bool
) -> None:
    second = msgspec.structs.replace(ORDER, attempt_id="att_2")
    await engine.submit(Submission(attempt_id="att_2", epoch=1, orders=(second,), ticket="t"))
    engine.seen = {("att_2", "n1"): Glimpse(stage=stage, raw="Slurm's word")}
    engine.desk.take(fetch("one"))
    clock.advance(SILENT_S - 1)
    assert [seen.outcome for seen in await engine.list_owned()] == [None, None]
    clock.advance(1)
    silent, waits = await engine.list_owned()
    assert silent.sight is Sight.UNKNOWN
    assert waits.sight is (Sight.ENDED if is_lost else Sight.PENDING)
    if waits.outcome is not None:
        assert waits.outcome.kind is EndKind.LOST
        assert "`n1`: what runs there was not heard from for 45 s; Slurm's word" in waits.outcome.message
        with pytest.raises(StateError):  # one that the cluster started, and that hears us again
            engine.desk.take(msgspec.structs.replace(fetch("two"), attempt_id="att_2"))


async def test_a_node_whose_work_is_suspended_is_not_called_silent_for_that(
    engine: Lent, clock: VirtualClock
) -> None:
    engine.desk.take(fetch("one"))
    engine.seen = {("att_1", ORDER.node): Glimpse(stage=Stage.SUSPENDED, raw="SUSPENDED")}
    clock.advance(SILENT_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE
    assert [node.is_alive for node in await engine.nodes()] == [True, True]
    engine.seen = {("att_1", ORDER.node): Glimpse(stage=Stage.RUNNING, raw="RUNNING")}
    await engine.list_owned()
    assert [node.is_alive for node in await engine.nodes()] == [False, True]


def asked(clock: VirtualClock) -> Asked:
    return Asked(clock.monotonic(), clock.monotonic())


def booted(at: float) -> Boot:
    return Boot(machine="m", at=at)


async def test_an_answer_from_before_the_share_says_nothing_about_when_its_node_was_started(
    engine: Lent, clock: VirtualClock
) -> None:
    before = asked(clock)
    clock.advance(1.0)
    share = engine.desk.take(fetch("one"))
    assert not await engine.has_rebooted(share, booted(1000.0), before)
    clock.advance(1.0)
    for _ in range(2):
        assert not await engine.has_rebooted(share, booted(5000.0), asked(clock))
    engine.desk.take(fetch("one"))
    assert not await engine.has_rebooted(share, booted(5000.0), asked(clock))
    clock.advance(1.0)
    assert not await engine.has_rebooted(share, booted(5000.0), asked(clock))
    assert await engine.has_rebooted(share, booted(9000.0), asked(clock))


async def test_who_speaks_after_a_boot_was_told_lives_in_it_whatever_its_date(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    share = engine.desk.take(fetch("one"))
    for at in (1000.0, 9000.0, 5000.0):  # that machine's clock is set, there and back
        told_at = asked(clock)
        clock.advance(1.0)
        engine.desk.take(fetch("one"))
        assert not await engine.has_rebooted(share, booted(at), told_at)
    clock.advance(1.0)
    assert not await engine.has_rebooted(share, booted(5000.0), asked(clock))
    assert await engine.has_rebooted(share, booted(9000.0), asked(clock))
    share = Lent(tmp_path, clock).desk.find("att_1")["n1"]
    assert await engine.has_rebooted(share, booted(9000.0), asked(clock))


async def test_a_date_that_an_older_version_left_is_no_evidence(
    engine: Lent, clock: VirtualClock, tmp_path: Path
) -> None:
    share = engine.desk.take(fetch("one"))
    for name in ("booted", "boot"):
        spool.durable_write(f"{share.files.directory}/{name}", b"1000.0")
    clock.advance(HEARD_S)
    again = Lent(tmp_path, clock)
    share = again.desk.find("att_1")["n1"]
    assert not await again.has_rebooted(share, booted(9000.0), asked(clock))
