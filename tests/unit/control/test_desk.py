"""Who gets an order from the control plane: a share that may begin now, of the store's own attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import anyio
import anyio.from_thread
import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.control import ControlPlane
from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.first import DEFAULT_PROJECT, prepare
from shoal.control.leases import FENCE_MARGIN_S
from shoal.engines.desk import DeskShare
from shoal.engines.glimpses import Glimpses
from shoal.engines.reach import Reach
from shoal.engines.remote import RemoteEngine
from shoal.errors import Deposed, EngineUnreachable, NotFound, StateError
from shoal.identity import proof_key
from shoal.ids import id_factory
from shoal.model.moves import NodeEnded
from shoal.model.node import NodeFacts
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import Tx, open_memory_store
from shoal.wire import KEEPER_WAIT_S, Dispatch, EndKind, Fetch, NodeOutcome, Order, Summons
from tests.support.plane import open_plane

pytestmark = pytest.mark.anyio


class Unstarted(RemoteEngine):
    """A cluster that starts nothing: the tests come to the desk themselves."""

    name = "unstarted"
    summons: Summons

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        self.summons = summons

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        return {}

    async def end(self, attempt_id: str) -> None:
        return

    async def nodes(self) -> list[NodeFacts]:
        return [NodeFacts(name="n1", cpus=4.0, memory_bytes=8 << 30, disk_bytes=1 << 30)]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[ControlPlane]:
    clock, store = SystemClock(), open_memory_store()
    engine = Unstarted(tmp_path, clock=clock, reach=Reach(urls=("https://login:1",), ca="ca"))
    core = Core(
        store=store,
        engine=engine,
        clock=clock,
        new_id=id_factory(clock.now),
        settings=Settings(home=tmp_path),
        key=b"k" * 32,
    )
    await prepare(core, "ana")
    async with ControlPlane.running(core) as plane:
        yield plane
    await store.close()


async def waiting(plane: ControlPlane) -> Fetch:
    """The question of a supervisor whose order waits at the desk."""
    core = plane.core
    owner = (await core.store.read(lambda tx: tx.people.users()))[0]
    spec = parse_job({"run": "true", "workdir": None, "secrets": ["PASSWORD"]})
    secrets = {"PASSWORD": "swordfish"}
    await plane.submit(SHOAL, spec, project=DEFAULT_PROJECT, owner=owner, secrets=secrets)
    assert isinstance(core.engine, Unstarted)
    while not (shares := core.engine.desk.shares()):  # noqa: ASYNC110 - as long as it takes
        await anyio.sleep(0.01)
    return Fetch(attempt_id=shares[0].order.attempt_id, node="n1", process="first")


async def test_an_order_comes_with_credentials_that_were_on_no_disk(
    plane: ControlPlane, tmp_path: Path
) -> None:
    asked = await waiting(plane)
    given = await plane.fetch_order(asked)
    assert (given.order.attempt_id, given.credentials.secrets) == (
        asked.attempt_id,
        {"PASSWORD": "swordfish"},
    )
    assert given.credentials.proof_key == proof_key(plane.core.key, asked.attempt_id, "n1")
    assert await plane.fetch_order(asked) == given
    files = [path for path in tmp_path.rglob("*") if path.is_file()]  # noqa: ASYNC240
    assert any("desk" in path.parts for path in files)
    assert not any(b"swordfish" in path.read_bytes() for path in files)


async def test_an_order_is_given_with_what_the_engine_knows_only_then(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(order: Order) -> Order:
        raise EngineUnreachable("nobody knows where its first node is")

    async def as_given(order: Order) -> Order:
        return msgspec.structs.replace(order, master_addr="10.0.0.9")

    asked = await waiting(plane)
    monkeypatch.setattr(plane.core.engine, "as_given", away)
    with pytest.raises(EngineUnreachable):
        await plane.fetch_order(asked)
    assert isinstance(plane.core.engine, Unstarted)
    [share] = plane.core.engine.desk.shares()
    assert share.is_waiting, "who was not answered may have given up, and nobody else could get it"
    monkeypatch.setattr(plane.core.engine, "as_given", as_given)
    asked = msgspec.structs.replace(asked, process="another")
    assert (await plane.fetch_order(asked)).order.master_addr == "10.0.0.9"


async def test_an_order_is_not_given_to_who_does_not_wait_for_it_any_more(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, since = plane.core, plane.core.clock.monotonic()
    asked = await waiting(plane)

    async def late(order: Order) -> Order:
        monkeypatch.setattr(core.clock, "monotonic", lambda: since + 10 * KEEPER_WAIT_S)
        return order

    assert isinstance(core.engine, Unstarted)
    with monkeypatch.context() as slow:
        slow.setattr(core.engine, "as_given", late)
        with pytest.raises(EngineUnreachable, match="does not wait any more"):
            await plane.fetch_order(asked)
    [share] = core.engine.desk.shares()
    assert share.is_waiting
    await plane.fetch_order(asked)


async def test_no_order_for_a_second_process_another_node_or_another_incarnation(plane: ControlPlane) -> None:
    asked = await waiting(plane)
    await plane.fetch_order(asked)
    for other in ({"process": "second"}, {"node": "n2"}, {"incarnation": 1}, {"attempt_id": "att_other"}):
        with pytest.raises((StateError, NotFound)):
            await plane.fetch_order(msgspec.structs.replace(asked, **other))


async def test_no_order_for_a_job_that_was_stopped(plane: ControlPlane) -> None:
    asked = await waiting(plane)
    [(job, _)] = await plane.core.store.read(lambda tx: tx.attempts.with_jobs([asked.attempt_id]))
    await plane.stop_job(SHOAL, job.job_id)
    with pytest.raises(StateError, match="has ended, or is to end"):
        await plane.fetch_order(asked)


async def test_no_order_for_an_attempt_that_ends_while_it_is_taken(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await waiting(plane)
    core = plane.core
    assert isinstance(core.engine, Unstarted)
    take = core.engine.desk.take
    gone = NodeOutcome(
        attempt_id=asked.attempt_id, epoch=1, node="n1", kind=EndKind.LOST, ended_at=core.clock.now()
    )

    def take_while_it_ends(asked: Fetch) -> DeskShare:
        anyio.from_thread.run(
            core.store.write, lambda tx: core.recorder.advance(tx, asked.attempt_id, NodeEnded(gone))
        )
        return take(asked)

    monkeypatch.setattr(core.engine.desk, "take", take_while_it_ends)
    with pytest.raises(StateError, match="does not begin on n1: it has ended"):
        await plane.fetch_order(asked)


async def test_who_asks_again_after_a_long_silence_gets_no_order_if_its_end_is_recorded_first(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a read says is older than an end that is just being recorded."""
    asked = await waiting(plane)
    await plane.fetch_order(asked)
    core, since, write = plane.core, plane.core.clock.monotonic(), plane.core.store.write
    gone = NodeOutcome(
        attempt_id=asked.attempt_id, epoch=1, node="n1", kind=EndKind.FENCED, ended_at=core.clock.now()
    )

    async def after_its_end(fn: Callable[[Tx], object], *, patience_s: float = 0.0) -> object:
        await write(lambda tx: core.recorder.advance(tx, asked.attempt_id, NodeEnded(gone)))
        return await write(fn, patience_s=patience_s)

    monkeypatch.setattr(core.clock, "monotonic", lambda: since + FENCE_MARGIN_S + 1)
    monkeypatch.setattr(core.store, "write", after_its_end)
    with pytest.raises(StateError, match="does not begin on n1: it has ended"):
        await plane.fetch_order(asked)


async def test_who_took_an_order_of_a_job_that_is_then_stopped_has_it_and_hears_of_that(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await waiting(plane)
    core = plane.core
    assert isinstance(core.engine, Unstarted)
    [(job, _)] = await core.store.read(lambda tx: tx.attempts.with_jobs([asked.attempt_id]))
    take = core.engine.desk.take

    def take_before_it_is_stopped(asked: Fetch) -> DeskShare:
        share = take(asked)
        anyio.from_thread.run(plane.stop_job, SHOAL, job.job_id)
        return share

    monkeypatch.setattr(core.engine.desk, "take", take_before_it_is_stopped)
    given = await plane.fetch_order(asked)
    told = Dispatch(
        attempt_id=asked.attempt_id, epoch=given.order.epoch, node="n1", process=asked.process, offset=0
    )
    with anyio.fail_after(10.0):
        while (await plane.hear_keeper(told, b"")).stop_grace_s is None:  # noqa: ASYNC110 - the watch's doing
            await anyio.sleep(0.01)


async def test_who_was_deposed_refuses_nobody(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = await waiting(plane)
    await plane.fetch_order(asked)
    core, second = plane.core, msgspec.structs.replace(asked, process="second")
    assert isinstance(core.engine, Unstarted)
    take = core.engine.desk.take

    async def deposed(_: object) -> None:
        raise Deposed("another leads since")

    def take_while_it_happens(asked: Fetch) -> DeskShare:
        monkeypatch.setattr(core, "term", 1)
        monkeypatch.setattr(core.store, "read", deposed)
        return take(asked)

    with monkeypatch.context() as patch:
        patch.setattr(core.engine.desk, "take", take_while_it_happens)
        with pytest.raises(Deposed):
            await plane.fetch_order(second)
    with pytest.raises(Deposed):
        await plane.archive_for(second)
    told = Dispatch(attempt_id=asked.attempt_id, epoch=1, node="n1", process="second")
    with pytest.raises(Deposed):
        await plane.hear_keeper(told, b"")


async def test_a_local_engine_has_no_desk(tmp_path: Path) -> None:
    async with open_plane(tmp_path) as plane:
        with pytest.raises(NotFound, match="the engine is `fake`"):
            await plane.fetch_order(Fetch(attempt_id="att_1", node="n1", process="p"))
