"""Rows 24 and 37: a job acts only for itself, a supervisor only for its own lease, and only
while they live.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shoal.control.commands import renewals
from shoal.identity import job_token, proof_key
from shoal.model.attempt import Attempt, AttemptState
from shoal.proof import is_proven
from shoal.store import StaleRecord
from shoal.wire import Renewal, RenewalReply
from tests.support.planes.asgi import AsgiReply
from tests.support.planes.world import ApiWorld


def renewal(attempt: Attempt, **changes: Any) -> dict[str, Any]:
    fields = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": attempt.node_names[0]}
    return {**fields, "phase": "running", "nonce": "n0", **changes}


def renew(
    world: ApiWorld,
    attempt: Attempt,
    data: dict[str, Any],
    *,
    node: str = "",
    key: bytes | None = None,
    client: tuple[str, int] = ("127.0.0.1", 50000),
) -> AsgiReply:
    """Return the reply to the supervisor of `attempt` that sends and signs `data`."""
    token = world.supervisor_token(attempt, json.dumps(data).encode(), node=node, key=key)
    return world.call("POST", "/v1/supervisor/renew", token=token, data=data, client=client)


def is_stale(world: ApiWorld, fields: dict[str, Any], answered: AsgiReply) -> bool:
    """Whether the control plane itself said so, and proved it."""
    request, answer = msgspec.convert(fields, Renewal), msgspec.convert(answered.json(), RenewalReply)
    key = proof_key(world.plane.core.sealing.key, request.attempt_id, request.node)
    assert is_proven(key, request, answer)
    return answer.is_stale


def running(world: ApiWorld, role: str = "member", project: str = "vision") -> tuple[str, Attempt]:
    job_id = world.submit(role, project)
    return job_id, world.until_state(job_id, AttemptState.RUNNING)


def test_a_job_sees_itself_and_no_other_job_even_in_its_project(world: ApiWorld) -> None:
    sibling = world.submit("member", "vision")
    assert world.call("GET", f"/v1/jobs/{world.jobs['vision']}", role="job").status == 200
    for other in (sibling, world.jobs["speech"]):
        for end in ("", "/why", "/logs", "/logs/stream"):
            assert world.call("GET", f"/v1/jobs/{other}{end}", role="job").status == 404


def test_a_job_cannot_submit_stop_or_make_tokens(world: ApiWorld) -> None:
    mine = world.jobs["vision"]
    body = {"spec": {"run": "true"}, "project": "vision"}
    assert world.call("POST", "/v1/jobs", role="job", data=body).status == 403
    assert world.call("POST", f"/v1/jobs/{mine}/stop", role="job", data={}).status == 403
    assert world.call("POST", "/v1/tokens", role="job", data={}).status == 403


def test_a_jobs_token_dies_with_its_attempt(world: ApiWorld) -> None:
    job_id, attempt = running(world)
    token = job_token(world.plane.core.sealing.key, attempt.attempt_id)
    assert world.call("GET", "/v1/self", token=token).status == 200
    assert world.call("POST", f"/v1/jobs/{job_id}/stop", role="member", data={}).status == 200
    world.until_state(job_id, AttemptState.ENDED)
    assert world.call("GET", "/v1/self", token=token).status == 401
    assert world.call("GET", f"/v1/jobs/{job_id}", token=token).status == 401


def test_a_token_signed_with_another_key_is_nobodys(world: ApiWorld) -> None:
    attempt = world.newest_attempt(world.jobs["vision"])
    refused = renew(world, attempt, renewal(attempt), key=b"k" * 32, client=("10.1.1.1", 1))
    assert refused.status == 401
    denied = world.read(lambda tx: [e for e in tx.events.page(0, limit=100_000) if e.kind == "access.denied"])
    assert refused.json()["request_id"] in {event.request_id for event in denied}


def test_a_supervisor_renews_only_its_own_attempt_on_its_own_node(world: ApiWorld) -> None:
    _, mine = running(world)
    _, other = running(world)

    def status(data: dict[str, Any]) -> int:
        return renew(world, mine, data).status

    assert status(renewal(mine)) == 200
    assert status(renewal(other)) == 403
    assert status(renewal(mine, node="node-9")) == 403
    assert world.newest_attempt(other.job_id) == other


def test_a_stale_or_future_epoch_is_refused_and_changes_nothing(world: ApiWorld) -> None:
    job_id, attempt = running(world)
    outcome = {**renewal(attempt), "kind": "succeeded", "ended_at": 1.0, "exit_code": 0}
    for epoch in (attempt.epoch - 1, attempt.epoch + 1, -1, 2**62):
        data = renewal(attempt, epoch=epoch, phase="ended", outcome={**outcome, "epoch": epoch})
        assert is_stale(world, data, renew(world, attempt, data))
    assert world.newest_attempt(job_id) == attempt


def test_an_outcome_about_another_attempt_is_refused(world: ApiWorld) -> None:
    _, attempt = running(world)
    victim_id, victim = running(world)
    outcome = {**renewal(victim), "kind": "exited", "exit_code": 1, "ended_at": 1.0}
    data = renewal(attempt, phase="ended", outcome=outcome)
    assert is_stale(world, data, renew(world, attempt, data))
    assert world.newest_attempt(victim_id) == victim


def test_a_replayed_renewal_of_an_ended_attempt_brings_nothing_back(world: ApiWorld) -> None:
    job_id, attempt = running(world)
    world.call("POST", f"/v1/jobs/{job_id}/stop", role="member", data={})
    ended = world.until_state(job_id, AttemptState.ENDED)
    data = renewal(attempt)
    assert is_stale(world, data, renew(world, attempt, data))
    assert world.newest_attempt(job_id) == ended


def test_a_node_that_was_never_given_the_attempt_cannot_report_it(world: ApiWorld) -> None:
    _, attempt = running(world)
    elsewhere = next(name for name in ("node-1", "node-2") if name not in attempt.node_names)
    data = renewal(attempt, node=elsewhere)
    assert is_stale(world, data, renew(world, attempt, data, node=elsewhere))


def test_passing_conflict_in_the_store_is_not_reported_as_stale(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, attempt = running(world)

    async def in_conflict(*_: object) -> RenewalReply:
        raise StaleRecord("somebody else wrote first")

    monkeypatch.setattr(renewals, "renew", in_conflict)
    answered = renew(world, attempt, renewal(attempt))
    assert answered.status == 409
    assert "proof" not in answered.json()


def test_every_answer_to_a_supervisor_is_proven_for_its_nonce_alone(world: ApiWorld) -> None:
    _, attempt = running(world)
    data = renewal(attempt, nonce="first")
    answered = renew(world, attempt, data)
    assert not is_stale(world, data, answered)
    answer = msgspec.convert(answered.json(), RenewalReply)
    key = proof_key(world.plane.core.sealing.key, attempt.attempt_id, attempt.node_names[0])
    for other in ({"nonce": "second"}, {"nonce": "first", "epoch": attempt.epoch + 1}):
        assert not is_proven(key, msgspec.convert(renewal(attempt, **other), Renewal), answer)


def test_signature_of_a_supervisor_fits_no_other_message(world: ApiWorld) -> None:
    job_id, attempt = running(world)
    fields = renewal(attempt)
    caught = world.supervisor_token(attempt, json.dumps(fields).encode())
    outcome = {**fields, "kind": "exited", "exit_code": 1, "ended_at": 1.0}
    for other in ({**fields, "nonce": "mine"}, {**fields, "phase": "ended", "outcome": outcome}, {}):
        assert world.call("POST", "/v1/supervisor/renew", token=caught, data=other).status == 403
    assert world.newest_attempt(job_id) == attempt
    assert world.call("POST", "/v1/supervisor/renew", token=caught, data=fields).status == 200


def test_replayed_renewal_changes_nothing(world: ApiWorld) -> None:
    job_id, attempt = running(world)
    early = renewal(attempt, phase="preparing")
    first = world.supervisor_token(attempt, json.dumps(early).encode())
    for _ in range(2):
        assert world.call("POST", "/v1/supervisor/renew", token=first, data=early).status == 200
        assert world.newest_attempt(job_id) == attempt
    outcome = {**early, "kind": "exited", "exit_code": 1, "ended_at": 1.0}
    last = renewal(attempt, phase="ended", outcome=outcome)
    assert renew(world, attempt, last).status == 200
    ended = world.read(lambda tx: tx.attempts.get(attempt.attempt_id))
    assert ended is not None
    assert ended.state is AttemptState.ENDED
    for again in (early, last):
        renew(world, attempt, again)
    assert world.read(lambda tx: tx.attempts.get(attempt.attempt_id)) == ended
