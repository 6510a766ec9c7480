"""Renewals, orders to stop, staleness and the fence, against a small HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.wire import Credentials, EndKind
from tests.support.renewals import ControlPlane
from tests.support.shares import RunningShare, Start, an_order, shares_in, until

TOKEN = Credentials(supervisor_token="shs_token")
FOREVER = "echo ready; sleep 300"


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    made = ControlPlane()
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with shares_in(tmp_path / "home") as make:
        yield make


def is_ready(share: RunningShare) -> Callable[[], bool]:
    return lambda: "ready" in share.texts()


def test_start_is_told_at_once_and_the_end_with_its_outcome(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, renew_s=60.0, epoch=4, run="sleep 0.5; exit 2"), TOKEN)
    outcome = share.run()
    assert outcome.kind is EndKind.EXITED
    assert plane.seen[0]["phase"] == "running"
    assert plane.seen[0]["started_at"] == outcome.started_at
    assert (plane.seen[-1]["phase"], plane.seen[-1]["outcome"]["exit_code"]) == ("ended", 2)
    assert {(renewal["attempt_id"], renewal["epoch"], renewal["node"]) for renewal in plane.seen} == {
        (share.order.attempt_id, 4, "node-1")
    }
    assert {renewal["path"] for renewal in plane.seen} == {"/v1/supervisor/renew"}
    assert set(plane.tokens) == {"Bearer shs_token"}


def test_long_setup_renews_too(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, setup="sleep 0.5", renew_s=0.1), TOKEN)
    share.run()
    assert plane.phases().count("preparing") >= 2
    assert plane.phases()[-1] == "ended"


def test_order_to_stop_in_an_answer_stops_the_ranks(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, renew_s=0.1, run=FOREVER), TOKEN)
    share.spawn()
    until(is_ready(share), describe=share.describe)
    plane.answer = lambda _: (200, {"should_stop": True, "grace_s": 2.0, "because": "drained"})
    outcome = share.outcome()
    assert (outcome.kind, outcome.message) == (EndKind.STOPPED, "stopped by the control plane: drained")


@pytest.mark.parametrize("status", [401, 403, 404, 409])
def test_answer_that_calls_the_attempt_stale_kills_the_ranks_at_once(
    start: Start, plane: ControlPlane, status: int
) -> None:
    run = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    share = start(an_order(control_url=plane.url, renew_s=0.1, run=run, grace_s=300.0), TOKEN)
    share.spawn()
    until(is_ready(share), describe=share.describe)
    plane.answer = lambda _: (status, {})
    outcome = share.outcome()
    assert outcome.kind is EndKind.FENCED
    assert str(status) in outcome.message


def test_silent_control_plane_kills_nothing_before_the_fence(start: Start, plane: ControlPlane) -> None:
    share = start(
        an_order(control_url=plane.url, renew_s=0.1, fence_s=300.0, run="sleep 1.5; echo done"), TOKEN
    )
    share.spawn()
    until(lambda: bool(plane.seen), describe=share.describe)
    plane.close()
    outcome = share.outcome()
    assert (outcome.kind, share.texts()) == (EndKind.SUCCEEDED, ["done"])


def test_silence_longer_than_the_fence_stops_the_ranks(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, renew_s=0.1, fence_s=1.0, run=FOREVER), TOKEN)
    share.spawn()
    until(lambda: len(plane.seen) > 2, describe=share.describe)
    plane.close()
    outcome = share.outcome()
    assert outcome.kind is EndKind.FENCED
    assert "fence 1" in outcome.message


def test_server_errors_are_silence_and_not_an_answer(start: Start, plane: ControlPlane) -> None:
    plane.answer = lambda _: (503, {})
    share = start(an_order(control_url=plane.url, renew_s=0.1, fence_s=0.8, run=FOREVER), TOKEN)
    assert share.run().kind is EndKind.FENCED


def test_restarted_control_plane_is_found_through_its_file(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url="http://127.0.0.1:9", renew_s=0.2, fence_s=60.0, run=FOREVER), TOKEN)
    server_file = share.home / "server.json"
    server_file.write_text(json.dumps({"url": plane.url, "pid": 1}))
    share.spawn(SHOAL_SERVER_FILE=str(server_file))
    until(lambda: "running" in plane.phases(), describe=share.describe)
    plane.answer = lambda _: (200, {"should_stop": True, "grace_s": 1.0})
    assert share.outcome().kind is EndKind.STOPPED


def test_without_a_control_plane_there_is_no_fence(start: Start) -> None:
    assert start(an_order(fence_s=0.1, run="sleep 0.5")).run().kind is EndKind.SUCCEEDED
