"""What an engine with a desk reports of its shares when the cluster says little, or nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import anyio
import msgspec
import pytest

from shoal.engines.base import CANNOT_ASK, Sight, Submission
from shoal.engines.boots import Boot
from shoal.engines.cluster_id import DESK, all_left
from shoal.engines.desk import DeskShare
from shoal.engines.fake import VirtualClock
from shoal.engines.glimpses import Glimpse, Glimpses, Stage
from shoal.engines.remote import (
    BEHIND_S,
    HEARD_S,
    LATE_S,
    MAX_PAUSE_S,
    SILENT_S,
    STARTS_AT_ONCE,
    Asked,
    Reach,
    RemoteEngine,
)
from shoal.errors import EngineRefused, EngineUnreachable, StateError
from shoal.model.node import NodeFacts
from shoal.runtime import spool
from shoal.wire import EndKind, Order, Summons
from tests.unit.engines.test_desk_terms import ORDER, fetch, told

pytestmark = pytest.mark.anyio


class Lent(RemoteEngine):
    """A cluster whose controller can go away."""

    name = "lent"
    is_away = False
    is_full = False
    names: tuple[str, ...] = ("n1", "n2")
    refusal = ""

    def __init__(self, home: Path, clock: VirtualClock, shared: str = "") -> None:
        reach = Reach(urls=("https://login:1",), ca="ca", shared=shared)
        super().__init__(home, clock=clock, reach=reach)
        self.ended: list[str] = []
        self.seen: Glimpses = {}

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        if self.is_full:
            raise EngineUnreachable("sbatch said: job submit limit")
        if self.refusal:
            raise EngineRefused(self.refusal)

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        if self.is_away:
            raise EngineUnreachable("squeue: unable to contact slurm controller")
        return self.seen

    async def end(self, attempt_id: str) -> None:
        if self.is_away:
            raise EngineUnreachable("scancel: unable to contact slurm controller")
        self.ended.append(attempt_id)

    async def nodes(self) -> list[NodeFacts]:
        return self.reached(
            [NodeFacts(name=n, cpus=4.0, memory_bytes=8 << 30, disk_bytes=1 << 30) for n in self.names]
        )


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_800_000_000.0)


GANG = Submission(
    attempt_id="att_1",
    epoch=1,
    orders=tuple(
        msgspec.structs.replace(ORDER, node=node, node_rank=rank, nodes=("n1", "n2"))
        for rank, node in enumerate(("n1", "n2"))
    ),
    ticket="t",
)


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


def of_pair(*places: tuple[str, int]) -> Submission:
    """The attempt with shares on these nodes, of these incarnations."""
    nodes = tuple(node for node, _ in places)
    orders = tuple(
        msgspec.structs.replace(ORDER, node=node, node_rank=rank, nodes=nodes, incarnation=incarnation)
        for rank, (node, incarnation) in enumerate(places)
    )
    return Submission(attempt_id="att_1", epoch=1, orders=orders, ticket="t")


@pytest.fixture
async def pair(tmp_path: Path, clock: VirtualClock) -> Lent:
    """Two shares run, and that of n2 is heard from no more."""
    engine = Lent(tmp_path, clock)
    engine.names = ("n1", "n2", "n3")
    await engine.submit(of_pair(("n1", 0), ("n2", 0)))
    for node in ("n1", "n2"):
        engine.desk.take(msgspec.structs.replace(fetch(node), node=node))
    clock.advance(HEARD_S)
    engine.desk.hear(msgspec.structs.replace(told("n1"), node="n1"), b"")
    return engine


async def test_a_silent_share_that_was_replaced_elsewhere_keeps_its_node_from_work_no_longer(
    pair: Lent, clock: VirtualClock
) -> None:
    await pair.submit(of_pair(("n1", 0), ("n3", 2)))
    seen = {one.node: one.sight for one in await pair.list_owned()}
    assert seen == {"n1": Sight.ALIVE, "n2": Sight.ENDED, "n3": Sight.PENDING}
    clock.advance(SILENT_S)
    assert [node.name for node in await pair.nodes() if node.is_alive] == ["n2", "n3"]
    await pair.submit(of_pair(("n1", 0), ("n2", 3)))
    assert pair.desk.find("att_1")["n2"].order.incarnation == 3


async def test_a_silent_share_is_replaced_on_its_own_node_and_one_that_speaks_is_not(
    pair: Lent, clock: VirtualClock
) -> None:
    with pytest.raises(EngineUnreachable, match="n1 still has the share"):
        await pair.submit(of_pair(("n1", 1), ("n2", 0)))
    await pair.submit(of_pair(("n1", 0), ("n2", 1)))
    assert pair.desk.find("att_1")["n2"].is_waiting
    with pytest.raises(StateError, match="another process"):
        pair.desk.hear(msgspec.structs.replace(told("n2"), node="n2"), b"")


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


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_what_is_refused_beside_others_that_began_is_lost_and_ends_nobody_else(
    tmp_path: Path, clock: VirtualClock, is_restarted: bool
) -> None:
    engine = Lent(tmp_path, clock)
    await engine.submit(GANG)
    engine.desk.take(fetch("one"))
    engine = Lent(tmp_path, clock) if is_restarted else engine
    engine.desk.take(fetch("one"))
    engine.refusal = "sbatch said: Requested node configuration is not available"
    clock.advance(MAX_PAUSE_S)
    engine.desk.take(fetch("one"))
    assert await engine.submit(GANG) == "lent:att_1"
    began, refused = await engine.list_owned()
    assert (began.sight, refused.sight) == (Sight.ALIVE, Sight.ENDED)
    assert refused.outcome is not None
    assert refused.outcome.kind is EndKind.LOST
    assert refused.outcome.message == f"lent refused it: {engine.refusal}"


async def test_what_is_refused_before_anybody_began_was_never_there(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = Lent(tmp_path, clock)
    engine.refusal = "sbatch said: Requested node configuration is not available"
    with pytest.raises(EngineRefused, match="not available"):
        await engine.submit(GANG)
    assert await engine.list_owned() == []


def running(*nodes: str) -> Glimpses:
    return {("att_1", node): Glimpse(stage=Stage.RUNNING, raw="Slurm job 7 is RUNNING") for node in nodes}


async def test_a_share_whose_keeper_gave_up_beside_others_that_began_is_lost(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = Lent(tmp_path, clock)
    await engine.submit(GANG)
    engine.seen = running("n1", "n2")
    clock.advance(BEHIND_S)
    await engine.list_owned()
    engine.desk.take(fetch("one"))
    told = "Slurm job 7 is RUNNING; others of it have begun, and nobody has come for this order"
    for second in range(int(BEHIND_S)):
        _, late = await engine.list_owned()
        assert (late.sight, late.raw == told) == (Sight.PENDING, second >= HEARD_S)
        clock.advance(1.0)
    _, late = await engine.list_owned()
    assert late.outcome is not None
    assert (late.outcome.kind, late.outcome.message) == (EndKind.LOST, f"{told} in 360 s")
    with pytest.raises(StateError):  # one that comes yet
        engine.desk.take(msgspec.structs.replace(fetch("two"), node="n2"))


async def test_a_share_that_is_stranded_beside_others_that_began_is_lost(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = Lent(tmp_path, clock)
    await engine.submit(GANG)
    engine.desk.take(fetch("one"))
    stranded = Glimpse(raw="no answer", stranded="`n2` did not answer for 45 s")
    engine.seen = running("n1") | {("att_1", "n2"): stranded}
    await engine.list_owned()
    clock.advance(BEHIND_S - 1.0)
    _, late = await engine.list_owned()
    assert late.sight is Sight.PENDING
    clock.advance(1.0)
    _, late = await engine.list_owned()
    assert late.outcome is not None
    assert (late.outcome.kind, "no answer" in late.outcome.message) == (EndKind.LOST, True)


@pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.SUSPENDED, Stage.UNKNOWN])
async def test_a_share_that_the_cluster_does_not_run_is_not_left_behind(
    tmp_path: Path, clock: VirtualClock, stage: Stage
) -> None:
    engine = Lent(tmp_path, clock)
    await engine.submit(GANG)
    engine.desk.take(fetch("one"))
    engine.seen = running("n1", "n2")
    await engine.list_owned()
    clock.advance(BEHIND_S - 1.0)
    engine.seen = running("n1") | {("att_1", "n2"): Glimpse(stage=stage)}
    await engine.list_owned()
    engine.seen = running("n1", "n2")
    for _ in range(2):  # it counts from here again
        _, late = await engine.list_owned()
        assert late.sight is Sight.PENDING
        clock.advance(BEHIND_S - 1.0)


async def test_a_share_alone_waits_for_its_keeper_however_long(tmp_path: Path, clock: VirtualClock) -> None:
    engine = Lent(tmp_path, clock)
    await engine.submit(GANG)
    engine.seen = running("n1", "n2")
    for _ in range(3):
        clock.advance(BEHIND_S)
        assert [seen.sight for seen in await engine.list_owned()] == [Sight.PENDING] * 2


class Held(Lent):
    """Whoever starts something of ana's is stopped by her, until she lets go."""

    def __init__(self, home: Path, clock: VirtualClock) -> None:
        super().__init__(home, clock)
        self.let_go = anyio.Event()
        self.started: list[str] = []

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        self.started.append(summons.attempt_id)
        if orders[0].owner.startswith("ana"):
            await self.let_go.wait()


def owned(attempt_id: str, owner: str) -> Submission:
    mine = msgspec.structs.replace(ORDER, attempt_id=attempt_id, owner=owner)
    return Submission(attempt_id=attempt_id, epoch=1, orders=(mine,), ticket="t")


async def test_an_owner_whose_start_hangs_holds_up_their_own_alone(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = Held(tmp_path, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.submit, owned("att_1", "ana"))
        tasks.start_soon(engine.submit, owned("att_2", "ana"))
        while len(engine.desk.shares()) < 2:  # noqa: ASYNC110 - as long as it takes
            await anyio.sleep(0.01)
        with anyio.fail_after(10.0):
            await engine.submit(owned("att_3", "bo"))
        assert len(engine.started) == 2
        engine.let_go.set()
    assert sorted(engine.started) == ["att_1", "att_2", "att_3"]


async def test_only_so_many_starts_are_under_way_at_once(tmp_path: Path, clock: VirtualClock) -> None:
    engine = Held(tmp_path, clock)
    async with anyio.create_task_group() as tasks:
        for number in range(STARTS_AT_ONCE + 2):
            tasks.start_soon(engine.submit, owned(f"att_{number}", f"ana-{number}"))
        with anyio.fail_after(10.0):
            while len(engine.started) < STARTS_AT_ONCE or len(engine.desk.shares()) < STARTS_AT_ONCE + 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        assert len(engine.started) == STARTS_AT_ONCE
        engine.let_go.set()
    assert len(engine.started) == STARTS_AT_ONCE + 2
