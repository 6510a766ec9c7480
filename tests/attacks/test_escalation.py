"""Rows 22, 23 and 26: no caller gets more rights than it was given, by asking, by granting or by sneaking it
in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.model.people import Role
from tests.support.planes.world import ApiWorld, open_world

SNEAKED = {
    "owner": "ada",
    "owner_id": "usr_1",
    "project_id": "speech",
    "role": "admin",
    "state": "running",
    "status": "succeeded",
    "uid": 0,
    "version": 99,
    "job_id": "job_1",
    "user_id": "usr_1",
    "outcome": "failed",
}
CREATES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/jobs", {"spec": {"run": "true"}, "project": "vision"}),
    ("POST", "/v1/users", {"name": "sneaky"}),
    ("PATCH", "/v1/users/cy", {"is_active": True}),
    ("POST", "/v1/projects", {"name": "sneaky"}),
    ("PATCH", "/v1/projects/vision", {"max_open_jobs": 10_000}),
    ("POST", "/v1/tokens", {"label": "sneaky"}),
    ("POST", "/v1/nodes/node-2/cordon", {"because": "sneaky"}),
]


@pytest.mark.parametrize("method,path,body", CREATES, ids=[f"{m} {p}" for m, p, _ in CREATES])
@pytest.mark.parametrize("field", SNEAKED)
def test_unknown_field_is_refused(
    world: ApiWorld, method: str, path: str, body: dict[str, Any], field: str
) -> None:
    refused = world.call(method, path, role="admin", data={**body, field: SNEAKED[field]})
    assert refused.status == 422
    assert any(field in problem for problem in refused.json()["problems"])


@pytest.mark.parametrize("field", [*SNEAKED, "priority_class", "preemptible"])
def test_a_field_hidden_in_the_spec_is_refused(world: ApiWorld, field: str) -> None:
    body = {"spec": {"run": "true", field: SNEAKED.get(field, 1)}, "project": "vision"}
    assert world.call("POST", "/v1/jobs", role="member", data=body).status == 422


@pytest.mark.parametrize("role", ["operator", "admin"])
def test_a_role_of_the_whole_cluster_cannot_be_given_in_a_project(world: ApiWorld, role: str) -> None:
    reply = world.call("PUT", "/v1/projects/vision/members/ana", role="lead", data={"role": role})
    assert reply.status == 422


def test_a_lead_gives_and_takes_up_to_their_own_role(world: ApiWorld) -> None:
    for role in ("viewer", "member", "lead"):
        data = {"role": role}
        assert world.call("PUT", "/v1/projects/vision/members/oz", role="lead", data=data).status == 200
    assert world.call("DELETE", "/v1/projects/vision/members/oz", role="lead").status == 200


def test_a_token_with_less_scope_cannot_give_more_than_its_scope(world: ApiWorld) -> None:
    created = world.call("POST", "/v1/tokens", role="lead", data={"scope": "member"})
    weak = created.json()["text"]
    assert (
        world.call("PUT", "/v1/projects/vision/members/cy", token=weak, data={"role": "viewer"}).status == 403
    )
    assert world.call("POST", "/v1/tokens", token=weak, data={"scope": "lead"}).status == 403
    assert world.call("POST", "/v1/tokens", token=weak, data={"scope": "admin"}).status == 403
    again = world.call("POST", "/v1/tokens", token=weak, data={})
    assert again.json()["scope"] == Role.MEMBER


def test_a_token_of_one_project_is_good_there_alone(world: ApiWorld) -> None:
    created = world.call("POST", "/v1/tokens", role="admin", data={"scope": "member", "project": "vision"})
    narrow = created.json()["text"]
    assert world.call("GET", f"/v1/jobs/{world.jobs['vision']}", token=narrow).status == 200
    assert world.call("GET", f"/v1/jobs/{world.jobs['speech']}", token=narrow).status == 404
    assert {job["project"] for job in world.call("GET", "/v1/jobs", token=narrow).json()["items"]} == {
        "vision"
    }
    assert world.call("POST", "/v1/users", token=narrow, data={"name": "x"}).status == 403
    assert world.call("POST", "/v1/tokens", token=narrow, data={"project": "speech"}).status == 403
    assert world.call("POST", "/v1/tokens", token=narrow, data={}).json()["project"] == "vision"


def test_a_token_made_with_an_expiring_one_does_not_outlive_it(world: ApiWorld) -> None:
    short = world.call("POST", "/v1/tokens", role="member", data={"lifetime_s": 100.0}).json()
    longer = world.call("POST", "/v1/tokens", token=short["text"], data={"lifetime_s": 1e8}).json()
    endless = world.call("POST", "/v1/tokens", token=short["text"], data={}).json()
    assert longer["expires_at"] <= short["expires_at"] + 1
    assert endless["expires_at"] <= short["expires_at"] + 1


def test_a_lead_cannot_change_the_limits_of_their_own_project_and_the_attempt_is_audited(
    tmp_path: Path,
) -> None:
    # A world of its own: after 20 refused changes in a row, the audit only counts those of a person.
    with open_world(tmp_path) as world:
        refused = world.call("PATCH", "/v1/projects/vision", role="lead", data={"max_open_jobs": 10**6})
        assert refused.status == 403
        events = world.call("GET", "/v1/audit?limit=1000", role="admin").json()["items"]
    mine = [event for event in events if event["request_id"] == refused.json()["request_id"]]
    assert [(event["kind"], event["actor"]) for event in mine] == [("access.denied", "user:ana")]


def test_refused_attempts_cannot_flood_the_audit(world: ApiWorld) -> None:
    before = len(_denied(world))
    for _ in range(100):
        assert world.call("POST", "/v1/users", role="stranger", data={"name": "x"}).status == 403
    assert len(_denied(world)) - before <= 25


def test_a_priority_above_the_allowance_is_refused(world: ApiWorld) -> None:
    def submit(priority: int) -> int:
        body = {"spec": {"run": "true", "priority": priority}, "project": "vision"}
        return world.call("POST", "/v1/jobs", role="member", data=body).status

    assert (submit(100), submit(101), submit(1000)) == (201, 403, 403)


def _denied(world: ApiWorld) -> list[Any]:
    return world.read(lambda tx: [e for e in tx.events.page(0, limit=100_000) if e.kind == "access.denied"])
