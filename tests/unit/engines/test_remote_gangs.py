"""Of shares that belong together: who is begun anew, who is lost beside others, and who waits with them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import Sight, Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.glimpses import Glimpse, Glimpses, Stage
from shoal.engines.sightings import BEHIND_S, HEARD_S, SILENT_S
from shoal.engines.starts import MAX_PAUSE_S
from shoal.errors import EngineRefused, EngineUnreachable, StateError
from shoal.wire import EndKind
from tests.support.lent import Lent
from tests.unit.engines.test_desk_terms import ORDER, fetch, told

pytestmark = pytest.mark.anyio


GANG = Submission(
    attempt_id="att_1",
    epoch=1,
    orders=tuple(
        msgspec.structs.replace(ORDER, node=node, node_rank=rank, nodes=("n1", "n2"))
        for rank, node in enumerate(("n1", "n2"))
    ),
    ticket="t",
)


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
