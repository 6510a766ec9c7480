"""Requests through the data plane of `shoal up`: they wake and scale a service, and take back a canary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.real_plane import RealPlane, until
from tests.support.service_faults import PATH, address_of, token_of
from tests.support.services import Caller, Served

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    plane = RealPlane(tmp_path / "home", "--serve-on", "127.0.0.1:0", demo="2x4")
    plane.up()
    folder = tmp_path / "hello"
    folder.mkdir()
    yield Served(plane, folder)
    plane.down()


def test_canary_that_returns_errors_is_taken_back_without_anybody(served: Served) -> None:
    served.serve(replicas=2)
    served.until_ready(2)
    with Caller(address_of(served), PATH + "work", token_of(served)) as caller:
        rollout = {"strategy": "canary", "steps": [30], "bake": "10m"}
        served.serve(replicas=2, env={"VERSION": "2", "BROKEN": "1"}, rollout=rollout)
        until(lambda: "rolled back" in served.plane.command("rollout", "hello").stdout, "it rolled back")
        until(lambda: len(served.addresses()) == 2, "only the old ones are left")
        bad = caller.statuses[500]
        good = caller.statuses[200]
        until(lambda: caller.statuses[200] > good + 50, "it is answered")
        assert caller.statuses[500] <= bad + 1
    assert set(caller.statuses) == {200, 500}


def test_service_sleeps_without_requests_and_wakes_for_the_next(served: Served) -> None:
    scale = {"value": 1, "cooldown": 1, "to_zero_after": 1, "window": 1}
    served.serve(replicas="0..2", scale=scale)
    address = address_of(served)
    for _ in range(2):
        with Caller(address, PATH, token_of(served)) as caller:
            until(lambda: sum(caller.statuses.values()) > 5, "held requests are answered")
        assert set(caller.statuses) == {200}
        until(lambda: not served.plane.shoal.services.show("hello")["servers"], "it sleeps")


def test_load_alone_takes_a_service_from_none_to_the_most_and_back_without_a_lost_request(
    served: Served,
) -> None:
    scale = {"value": 1, "cooldown": 1, "to_zero_after": 1, "window": 1}
    served.serve(replicas="0..4", cap=1, scale=scale)
    address, token = address_of(served), token_of(served)
    callers = [Caller(address, PATH + "slow", token) for _ in range(6)]
    with ExitStack() as all_of_them:
        all_of_them.enter_context(callers[0])
        until(lambda: callers[0].statuses[200] > 2, "the first one was held until a replica was ready")
        for caller in callers[1:]:
            all_of_them.enter_context(caller)
        served.until_ready(4)
        until(lambda: all(caller.statuses[200] > 2 for caller in callers), "everybody is answered")
    until(lambda: not served.plane.shoal.services.show("hello")["servers"], "it sleeps")
    assert {status for caller in callers for status in caller.statuses} == {200}
    shown = served.plane.shoal.services.show("hello")
    sizes = [one["replicas"] for one in shown["resizes"]]
    top = sizes.index(4)
    assert (sizes[0], sizes[-2:]) == (1, [1, 0])
    assert sizes == sorted(sizes[:top]) + sorted(sizes[top:], reverse=True), "up, then down, and never back"
    assert "no request for" in served.plane.command("services", "hello").stdout
