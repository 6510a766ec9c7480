"""Renewals, orders to stop, staleness and the fence, against a small HTTP server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from shoal.proof import prove
from shoal.runtime import spool
from shoal.wire import Credentials, EndKind, Renewal, RenewalAnswer
from tests.support.renewals import TOKEN, ControlPlane, proven
from tests.support.shares import ATTEMPT_ID, RunningShare, Start, an_order, until

FOREVER = "echo ready; sleep 300"


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    made = ControlPlane()
    yield made
    made.close()


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
        (ATTEMPT_ID, 4, "node-1")
    }
    assert {renewal["path"] for renewal in plane.seen} == {"/v1/supervisor/renew"}
    assert len(set(plane.tokens)) == len(plane.seen)
    assert all(str(token).startswith(f"Bearer shs_{ATTEMPT_ID}.node-1_") for token in plane.tokens)


def test_long_setup_renews_too(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, setup="sleep 0.5", renew_s=0.1), TOKEN)
    share.run()
    assert plane.phases().count("preparing") >= 2
    assert plane.phases()[-1] == "ended"


def test_order_to_stop_in_an_answer_stops_the_ranks(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, renew_s=0.1, run=FOREVER), TOKEN)
    share.spawn()
    until(is_ready(share), describe=share.describe)
    plane.answer = lambda body: proven(body, should_stop=True, grace_s=2.0, because="drained")
    outcome = share.outcome()
    assert (outcome.kind, outcome.message) == (EndKind.STOPPED, "stopped by the control plane: drained")


def test_answer_that_calls_the_attempt_stale_kills_the_ranks_at_once(
    start: Start, plane: ControlPlane
) -> None:
    run = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    share = start(an_order(control_url=plane.url, renew_s=0.1, run=run, grace_s=300.0), TOKEN)
    share.spawn()
    until(is_ready(share), describe=share.describe)
    plane.answer = lambda body: proven(body, is_stale=True, because="it has ended")
    outcome = share.outcome()
    assert outcome.kind is EndKind.FENCED
    assert "may not run: it has ended" in outcome.message


STALE = {"is_stale": True, "should_stop": True, "grace_s": 0.0, "because": "not yours"}


@pytest.mark.parametrize(
    ("status", "told"),
    [
        *((status, {}) for status in (200, 401, 403, 404, 409)),
        (200, STALE),
        (200, {**STALE, "proof": "0" * 64}),
        (409, STALE),
    ],
)
def test_stranger_on_the_port_can_neither_stop_the_ranks_nor_keep_them_running(
    start: Start, plane: ControlPlane, status: int, told: dict[str, Any]
) -> None:
    plane.answer = lambda body: proven(body) if body["outcome"] else (status, told)
    share = start(an_order(control_url=plane.url, renew_s=0.1, fence_s=3.0, run=FOREVER), TOKEN)
    outcome = share.run()
    assert (outcome.kind, "fence 3" in outcome.message) == (EndKind.FENCED, True)
    assert plane.phases().count("running") > 2


def test_stale_answer_to_another_renewal_stops_nothing(start: Start, plane: ControlPlane) -> None:
    share = start(an_order(control_url=plane.url, renew_s=0.1, run="sleep 1.5; echo done"), TOKEN)
    share.spawn()
    until(lambda: bool(plane.seen), describe=share.describe)
    _, replayed = proven({**plane.seen[0]}, is_stale=True)
    plane.answer = lambda body: proven(body) if body["outcome"] else (200, replayed)
    assert (share.outcome().kind, share.texts()) == (EndKind.SUCCEEDED, ["done"])


def test_answer_whose_order_was_changed_on_the_way_is_not_followed(start: Start, plane: ControlPlane) -> None:
    changed = {"should_stop": True, "grace_s": 0.0}
    plane.answer = lambda body: (200, proven(body)[1] | ({} if body["outcome"] else changed))
    share = start(an_order(control_url=plane.url, renew_s=0.1, run="sleep 1; echo done"), TOKEN)
    assert share.run().kind is EndKind.SUCCEEDED


def test_supervisor_without_a_key_believes_nobody(start: Start, plane: ControlPlane) -> None:
    keyless = Credentials()
    plane.answer = lambda body: (
        200,
        msgspec.to_builtins(prove("", msgspec.convert(body, Renewal), RenewalAnswer(is_stale=True))),
    )
    share = start(an_order(control_url=plane.url, renew_s=0.1, run="sleep 1; echo done"), keyless)
    assert share.run().kind is EndKind.SUCCEEDED


def test_key_of_the_proof_is_never_sent(start: Start, plane: ControlPlane) -> None:
    start(an_order(control_url=plane.url, renew_s=0.1, run="sleep 0.3"), TOKEN).run()
    assert len({renewal["nonce"] for renewal in plane.seen}) == len(plane.seen)
    assert TOKEN.proof_key not in json.dumps([plane.seen, plane.tokens])


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
    plane.answer = lambda body: proven(body, should_stop=True, grace_s=1.0)
    assert share.outcome().kind is EndKind.STOPPED


@pytest.fixture
def other() -> Iterator[ControlPlane]:
    made = ControlPlane()
    yield made
    made.close()


def test_another_control_plane_of_the_order_is_found_when_the_first_does_not_answer(
    start: Start, plane: ControlPlane
) -> None:
    urls = ("http://127.0.0.1:9", plane.url)
    order = an_order(control_url=urls[0], control_urls=urls, renew_s=0.2, fence_s=60.0, run=FOREVER)
    share = start(order, TOKEN)
    share.spawn()
    until(lambda: "running" in plane.phases(), describe=share.describe)
    plane.answer = lambda body: proven(body, should_stop=True, grace_s=1.0)
    assert share.outcome().kind is EndKind.STOPPED


def test_successor_that_an_answer_named_is_found_and_a_standby_is_not_obeyed(
    start: Start, plane: ControlPlane, other: ControlPlane
) -> None:
    plane.answer = lambda body: proven(body, control_urls=(plane.url, other.url))
    share = start(an_order(control_url=plane.url, renew_s=0.1, fence_s=60.0, run=FOREVER), TOKEN)
    share.spawn()
    until(lambda: "running" in plane.phases(), describe=share.describe)
    plane.answer = lambda _: (200, {"should_stop": True, "is_stale": True})
    until(lambda: "running" in other.phases(), describe=share.describe)
    other.answer = lambda body: proven(body, should_stop=True, grace_s=1.0)
    assert share.outcome().kind is EndKind.STOPPED


def test_a_supervisor_that_hung_for_a_fence_before_its_claim_starts_nothing(
    start: Start, plane: ControlPlane
) -> None:
    share = start(an_order(control_url=plane.url, renew_s=0.1, fence_s=1.0, run="echo never"), TOKEN)
    lock = spool.take_lock(share.share)
    assert lock is not None
    process = share.spawn()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.2)
    os.close(lock)
    assert (share.outcome().kind, share.texts()) == (EndKind.FENCED, [])
    assert spool.read_started(share.share) is None


def test_without_a_control_plane_there_is_no_fence(start: Start) -> None:
    assert start(an_order(fence_s=0.1, run="sleep 0.5")).run().kind is EndKind.SUCCEEDED
