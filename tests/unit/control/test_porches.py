"""Replicas on other machines: what their supervisors and data planes are given to meet at a porch."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.control import ControlPlane
from shoal.control.actor import SHOAL
from shoal.control.first import DEFAULT_PROJECT
from shoal.control.services.commands import AskedService
from shoal.control.services.porches import RENEW_S, Porches
from shoal.identity.authority import make_authority
from shoal.porch import name_of
from shoal.spec.parse import parse_service
from shoal.wire import Assignment, Fetch, Phase, Renewal, Serving
from tests.unit.control.test_desk import plane, waiting

pytestmark = pytest.mark.anyio
__all__ = ["plane"]


class HandClock(SystemClock):
    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


async def until(is_so: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)


async def begun(plane: ControlPlane) -> Assignment:
    """A replica whose supervisor has its order."""
    plane.core.porches = Porches(make_authority("a test's", SystemClock().now()), SystemClock())
    owner = next(iter(await plane.core.store.read(lambda tx: tx.people.users())))
    spec = parse_service({"name": "chat", "run": "serve"})
    await plane.serve(SHOAL, AskedService(spec=spec, project=DEFAULT_PROJECT, owner=owner))
    desk = plane.core.engine.desk  # type: ignore[attr-defined]
    await until(desk.shares)
    [share] = desk.shares()
    asked = Fetch(attempt_id=share.order.attempt_id, node="n1", process="a" * 32)
    return await plane.fetch_order(asked)


def renewal(order_of: Assignment, address: str) -> Renewal:
    order = order_of.order
    return Renewal(
        attempt_id=order.attempt_id,
        epoch=order.epoch,
        node=order.node,
        phase=Phase.RUNNING,
        started_at=SystemClock().now(),
        serving=Serving(address=address, is_ready=True, at=SystemClock().now()),
    )


async def test_an_order_of_a_replica_comes_with_papers_for_its_porch(plane: ControlPlane) -> None:
    made = await begun(plane)
    papers = made.credentials.porch
    assert papers is not None
    assert "PRIVATE KEY" in papers.key
    again = await plane.fetch_order(Fetch(attempt_id=made.order.attempt_id, node="n1", process="a" * 32))
    assert again.credentials.porch not in (None, papers), "made anew each time: none is kept"


async def test_an_order_of_a_job_comes_without(plane: ControlPlane) -> None:
    plane.core.porches = Porches(make_authority("a test's", SystemClock().now()), SystemClock())
    assert (await plane.fetch_order(await waiting(plane))).credentials.porch is None


async def test_the_table_names_the_porch_and_what_to_show_there(plane: ControlPlane) -> None:
    made = await begun(plane)
    await plane.renew(renewal(made, "tls:10.0.0.7:19000"))
    book = plane.core.services
    await until(lambda: book.table.services and book.table.services[0].replicas)
    [replica] = book.table.services[0].replicas
    assert (replica.address, replica.name) == ("tls:10.0.0.7:19000", name_of(made.order.attempt_id))
    assert plane.core.porches is not None
    assert book.table.papers == plane.core.porches.visitors()


async def test_a_replica_that_says_it_is_on_the_control_planes_own_machine_is_sent_nothing(
    plane: ControlPlane,
) -> None:
    made = await begun(plane)
    await plane.renew(renewal(made, "127.0.0.1:22"))
    found = await plane.core.store.read(lambda tx: tx.services.replica(made.order.job_id))
    assert found is not None
    assert (found.is_ready, found.address) == (False, "")
    assert "127.0.0.1:22" in found.because


def test_data_planes_get_new_papers_long_before_the_old_ones_end() -> None:
    clock = HandClock()
    porches = Porches(make_authority("a test's", clock.now()), clock)
    first = porches.visitors()
    assert porches.visitors() is first
    clock.ahead_s = RENEW_S + 1
    assert porches.visitors() != first
