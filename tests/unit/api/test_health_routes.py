"""Whether the server is well: who is told what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.world import World, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("health")) as opened:
        yield opened


def test_server_whose_loops_fail_is_degraded_and_says_why_to_operators_alone(world: World) -> None:
    assert world.call("GET", "/healthz").json() == {"status": "ok", "role": "leader"}
    turns = world.plane.core.turns
    turns.failed("clean", OSError("no space left on device"))
    try:
        assert world.call("GET", "/healthz").json() == {"status": "degraded", "role": "leader"}
        (told,) = world.call("GET", "/v1/status", role="admin").json()["failing"]
        assert (told["loop"], told["times"]) == ("clean", 1)
        assert told["why"] == "OSError: no space left on device"
        (told,) = world.call("GET", "/v1/status", role="member").json()["failing"]
        assert (told["loop"], told["why"]) == ("clean", None)
    finally:
        turns.went_well("clean")
    assert world.call("GET", "/healthz").json() == {"status": "ok", "role": "leader"}
