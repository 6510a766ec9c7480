"""Renewals, stop requests, staleness and the fence, against a small HTTP server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from shoal.proof import prove
from shoal.runtime.files import spool
from shoal.wire import EndKind, Renewal, RenewalReply, TaskCredentials
from tests.support.runtime.tasks import (
    ATTEMPT_ID,
    TASK_CREDENTIALS,
    RenewalServer,
    RunningTask,
    StartTask,
    a_task_spec,
    proven_reply,
    until,
)

FOREVER = "echo ready; sleep 300"


@pytest.fixture
def plane() -> Iterator[RenewalServer]:
    server = RenewalServer()
    yield server
    server.close()


def is_ready(task: RunningTask) -> Callable[[], bool]:
    return lambda: "ready" in task.texts()


def test_start_is_reported_at_once_and_the_end_with_its_outcome(
    start: StartTask, plane: RenewalServer
) -> None:
    task = start(
        a_task_spec(control_url=plane.url, renew_s=60.0, epoch=4, run="sleep 0.5; exit 2"), TASK_CREDENTIALS
    )
    outcome = task.run()
    assert outcome.kind is EndKind.EXITED
    assert plane.renewals[0]["phase"] == "running"
    assert plane.renewals[0]["started_at"] == outcome.started_at
    assert (plane.renewals[-1]["phase"], plane.renewals[-1]["outcome"]["exit_code"]) == ("ended", 2)
    assert {(renewal["attempt_id"], renewal["epoch"], renewal["node"]) for renewal in plane.renewals} == {
        (ATTEMPT_ID, 4, "node-1")
    }
    assert {renewal["path"] for renewal in plane.renewals} == {"/v1/supervisor/renew"}
    assert len(set(plane.tokens)) == len(plane.renewals)
    assert all(str(token).startswith(f"Bearer shs_{ATTEMPT_ID}.node-1_") for token in plane.tokens)


def test_lease_is_renewed_during_a_long_setup(start: StartTask, plane: RenewalServer) -> None:
    task = start(a_task_spec(control_url=plane.url, setup="sleep 0.5", renew_s=0.1), TASK_CREDENTIALS)
    task.run()
    assert plane.phases().count("preparing") >= 2
    assert plane.phases()[-1] == "ended"


def test_stop_in_a_reply_stops_the_ranks(start: StartTask, plane: RenewalServer) -> None:
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, run=FOREVER), TASK_CREDENTIALS)
    task.spawn()
    until(is_ready(task), describe=task.describe)
    plane.reply = lambda body: proven_reply(body, should_stop=True, grace_s=2.0, because="drained")
    outcome = task.outcome()
    assert (outcome.kind, outcome.message) == (EndKind.STOPPED, "stopped by the control plane: drained")


def test_stale_reply_kills_the_ranks_at_once(start: StartTask, plane: RenewalServer) -> None:
    run = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, run=run, grace_s=300.0), TASK_CREDENTIALS)
    task.spawn()
    until(is_ready(task), describe=task.describe)
    plane.reply = lambda body: proven_reply(body, is_stale=True, because="it has ended")
    outcome = task.outcome()
    assert outcome.kind is EndKind.FENCED
    assert "may not run: it has ended" in outcome.message


STALE = {"is_stale": True, "should_stop": True, "grace_s": 0.0, "because": "not yours"}


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        *((status, {}) for status in (200, 401, 403, 404, 409)),
        (200, STALE),
        (200, {**STALE, "proof": "0" * 64}),
        (409, STALE),
    ],
)
def test_foreign_program_on_the_port_can_neither_stop_ranks_nor_renew_their_lease(
    start: StartTask, plane: RenewalServer, status: int, fields: dict[str, Any]
) -> None:
    plane.reply = lambda body: proven_reply(body) if body["outcome"] else (status, fields)
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, fence_s=3.0, run=FOREVER), TASK_CREDENTIALS)
    outcome = task.run()
    assert (outcome.kind, "fence 3" in outcome.message) == (EndKind.FENCED, True)
    assert plane.phases().count("running") > 2


def test_stale_reply_to_another_renewal_stops_nothing(start: StartTask, plane: RenewalServer) -> None:
    task = start(
        a_task_spec(control_url=plane.url, renew_s=0.1, run="sleep 1.5; echo done"), TASK_CREDENTIALS
    )
    task.spawn()
    until(lambda: bool(plane.renewals), describe=task.describe)
    _, replayed = proven_reply({**plane.renewals[0]}, is_stale=True)
    plane.reply = lambda body: proven_reply(body) if body["outcome"] else (200, replayed)
    assert (task.outcome().kind, task.texts()) == (EndKind.SUCCEEDED, ["done"])


def test_reply_that_was_changed_on_the_way_is_ignored(start: StartTask, plane: RenewalServer) -> None:
    changed = {"should_stop": True, "grace_s": 0.0}
    plane.reply = lambda body: (200, proven_reply(body)[1] | ({} if body["outcome"] else changed))
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, run="sleep 1; echo done"), TASK_CREDENTIALS)
    assert task.run().kind is EndKind.SUCCEEDED


def test_supervisor_without_a_key_accepts_no_reply(start: StartTask, plane: RenewalServer) -> None:
    keyless = TaskCredentials()
    plane.reply = lambda body: (
        200,
        msgspec.to_builtins(prove("", msgspec.convert(body, Renewal), RenewalReply(is_stale=True))),
    )
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, run="sleep 1; echo done"), keyless)
    assert task.run().kind is EndKind.SUCCEEDED


def test_proof_key_is_never_sent(start: StartTask, plane: RenewalServer) -> None:
    start(a_task_spec(control_url=plane.url, renew_s=0.1, run="sleep 0.3"), TASK_CREDENTIALS).run()
    assert len({renewal["nonce"] for renewal in plane.renewals}) == len(plane.renewals)
    assert TASK_CREDENTIALS.proof_key not in json.dumps([plane.renewals, plane.tokens])


def test_silent_control_plane_kills_nothing_before_the_fence(start: StartTask, plane: RenewalServer) -> None:
    task = start(
        a_task_spec(control_url=plane.url, renew_s=0.1, fence_s=300.0, run="sleep 1.5; echo done"),
        TASK_CREDENTIALS,
    )
    task.spawn()
    until(lambda: bool(plane.renewals), describe=task.describe)
    plane.close()
    outcome = task.outcome()
    assert (outcome.kind, task.texts()) == (EndKind.SUCCEEDED, ["done"])


def test_silence_longer_than_the_fence_stops_the_ranks(start: StartTask, plane: RenewalServer) -> None:
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, fence_s=1.0, run=FOREVER), TASK_CREDENTIALS)
    task.spawn()
    until(lambda: len(plane.renewals) > 2, describe=task.describe)
    plane.close()
    outcome = task.outcome()
    assert outcome.kind is EndKind.FENCED
    assert "fence 1" in outcome.message


def test_server_errors_are_silence_and_not_an_answer(start: StartTask, plane: RenewalServer) -> None:
    plane.reply = lambda _: (503, {})
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, fence_s=0.8, run=FOREVER), TASK_CREDENTIALS)
    assert task.run().kind is EndKind.FENCED


def test_restarted_control_plane_is_found_through_its_file(start: StartTask, plane: RenewalServer) -> None:
    task = start(
        a_task_spec(control_url="http://127.0.0.1:9", renew_s=0.2, fence_s=60.0, run=FOREVER),
        TASK_CREDENTIALS,
    )
    server_file = task.home / "server.json"
    server_file.write_text(json.dumps({"url": plane.url, "pid": 1}))
    task.spawn(SHOAL_SERVER_FILE=str(server_file))
    until(lambda: "running" in plane.phases(), describe=task.describe)
    plane.reply = lambda body: proven_reply(body, should_stop=True, grace_s=1.0)
    assert task.outcome().kind is EndKind.STOPPED


@pytest.fixture
def other() -> Iterator[RenewalServer]:
    server = RenewalServer()
    yield server
    server.close()


def test_second_control_plane_of_the_task_spec_is_asked_if_the_first_is_silent(
    start: StartTask, plane: RenewalServer
) -> None:
    urls = ("http://127.0.0.1:9", plane.url)
    task_spec = a_task_spec(control_url=urls[0], control_urls=urls, renew_s=0.2, fence_s=60.0, run=FOREVER)
    task = start(task_spec, TASK_CREDENTIALS)
    task.spawn()
    until(lambda: "running" in plane.phases(), describe=task.describe)
    plane.reply = lambda body: proven_reply(body, should_stop=True, grace_s=1.0)
    assert task.outcome().kind is EndKind.STOPPED


def test_control_plane_named_in_a_reply_is_found_and_a_standby_is_not_obeyed(
    start: StartTask, plane: RenewalServer, other: RenewalServer
) -> None:
    plane.reply = lambda body: proven_reply(body, control_urls=(plane.url, other.url))
    task = start(a_task_spec(control_url=plane.url, renew_s=0.1, fence_s=60.0, run=FOREVER), TASK_CREDENTIALS)
    task.spawn()
    until(lambda: "running" in plane.phases(), describe=task.describe)
    plane.reply = lambda _: (200, {"should_stop": True, "is_stale": True})
    until(lambda: "running" in other.phases(), describe=task.describe)
    other.reply = lambda body: proven_reply(body, should_stop=True, grace_s=1.0)
    assert task.outcome().kind is EndKind.STOPPED


def test_supervisor_that_hung_for_a_fence_before_its_claim_starts_nothing(
    start: StartTask, plane: RenewalServer
) -> None:
    task = start(
        a_task_spec(control_url=plane.url, renew_s=0.1, fence_s=1.0, run="echo never"), TASK_CREDENTIALS
    )
    lock = spool.take_lock(task.task)
    assert lock is not None
    process = task.spawn()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.2)
    os.close(lock)
    assert (task.outcome().kind, task.texts()) == (EndKind.FENCED, [])
    assert spool.read_started(task.task) is None


def test_without_a_control_plane_there_is_no_fence(start: StartTask) -> None:
    assert start(a_task_spec(fence_s=0.1, run="sleep 0.5")).run().kind is EndKind.SUCCEEDED
