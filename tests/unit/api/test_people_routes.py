"""Users, projects, members and tokens over HTTP: requests can be repeated, are limited, and take effect at
once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.planes.world import ApiWorld, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("people")) as opened:
        yield opened


def test_a_name_is_taken_once_and_a_repeated_request_is_not_a_second_one(world: ApiWorld) -> None:
    key = [("idempotency-key", "u-1")]
    first = world.call("POST", "/v1/users", role="admin", data={"name": "eve"}, headers=key)
    again = world.call("POST", "/v1/users", role="admin", data={"name": "eve"}, headers=key)
    assert (first.status, again.status, first.json()) == (201, 201, again.json())
    assert world.call("POST", "/v1/users", role="admin", data={"name": "eve"}).status == 409


@pytest.mark.parametrize("name", ["", "Eve", "-eve", "e v e", "../eve", "x" * 64, "é"])
def test_names_that_could_be_mistaken_are_refused(world: ApiWorld, name: str) -> None:
    assert world.call("POST", "/v1/users", role="admin", data={"name": name}).status == 422
    assert world.call("POST", "/v1/projects", role="admin", data={"name": name}).status == 422


def test_the_last_admin_cannot_be_taken_away(world: ApiWorld) -> None:
    assert world.call("PATCH", "/v1/users/ada", role="admin", data={"is_active": False}).status == 409
    assert world.call("PATCH", "/v1/users/ada", role="admin", data={"cluster_role": None}).status == 409
    assert world.call("GET", "/v1/me", role="admin").json()["cluster_role"] == "admin"


def test_taking_a_member_out_may_be_repeated(world: ApiWorld) -> None:
    path = "/v1/projects/speech/members/oz"
    assert world.call("PUT", path, role="admin", data={"role": "member"}).status == 200
    assert [world.call("DELETE", path, role="admin").status for _ in range(2)] == [200, 200]
    members = world.call("GET", "/v1/projects/speech/members", role="admin").json()["items"]
    assert [member["user"] for member in members] == ["dora"]


def test_a_new_limit_is_in_force_for_the_next_request(world: ApiWorld) -> None:
    def submit(priority: int) -> int:
        body = {"spec": {"run": "true", "priority": priority}, "project": "speech"}
        return world.call("POST", "/v1/jobs", role="stranger", data=body).status

    assert submit(50) == 201
    world.call("PATCH", "/v1/projects/speech", role="admin", data={"max_priority": 10})
    assert submit(50) == 403
    world.call("PATCH", "/v1/projects/speech", role="admin", data={"max_priority": 100})
    assert submit(50) == 201


def test_a_tokens_text_is_shown_once(world: ApiWorld) -> None:
    key = [("idempotency-key", "t-1")]
    first = world.call("POST", "/v1/tokens", role="member", data={"label": "ci"}, headers=key).json()
    again = world.call("POST", "/v1/tokens", role="member", data={"label": "ci"}, headers=key).json()
    assert (first["id"], again["text"]) == (again["id"], None)
    assert world.call("GET", "/v1/me", token=first["text"]).json()["token"]["id"] == first["id"]
    listed = world.call("GET", "/v1/tokens", role="member").body.decode()
    assert first["id"] in listed
    assert first["text"].rsplit("_", 1)[1] not in listed


def test_only_an_admin_makes_and_sees_tokens_of_others(world: ApiWorld) -> None:
    made = world.call("POST", "/v1/tokens", role="admin", data={"user": "cy", "scope": "viewer"}).json()
    assert world.call("GET", "/v1/me", token=made["text"]).json()["user"] == "cy"
    listed = world.call("GET", "/v1/tokens?user=cy", role="admin").json()["items"]
    assert made["id"] in {token["id"] for token in listed}
    assert world.call("GET", "/v1/tokens?user=cy", role="operator").status == 403
    assert world.call("POST", "/v1/tokens", role="lead", data={"user": "cy"}).status == 403


def test_an_admin_gives_a_project_its_place_its_quota_and_its_limit(world: ApiWorld) -> None:
    share = {"parent": "vision", "quota": {"gpus": 4}, "limit": {"gpus": 8, "cpus": 64}, "weight": 2}
    made = world.call("POST", "/v1/projects", role="admin", data={"name": "ocr", **share})
    assert made.status == 201
    view = made.json()
    assert (view["parent"], view["quota"], view["weight"]) == ("vision", {"gpus": 4, "cpus": None}, 2.0)
    assert (view["held"], view["borrow"]) == ({"gpus": 0, "cpus": 0.0}, None)
    taken = world.call("PATCH", "/v1/projects/ocr", role="admin", data={"quota": None, "parent": None})
    assert (taken.json()["quota"], taken.json()["parent"]) == (None, None)
    assert taken.json()["limit"] == {"gpus": 8, "cpus": 64.0}
    kept = world.call("PATCH", "/v1/projects/ocr", role="admin", data={"weight": 3.5, "max_priority": None})
    assert (kept.json()["weight"], kept.json()["max_priority"]) == (3.5, 100)


@pytest.mark.parametrize("role", ["viewer", "member", "lead", "operator"])
@pytest.mark.parametrize(
    "data", [{"quota": {"gpus": 4}}, {"limit": None}, {"weight": 100.0}, {"parent": None}, {"borrow": None}]
)
def test_only_an_admin_changes_a_projects_share(world: ApiWorld, role: str, data: dict[str, object]) -> None:
    assert world.call("PATCH", "/v1/projects/vision", role=role, data=data).status == 403


@pytest.mark.parametrize(
    "data",
    [
        {"parent": "vision"},
        {"parent": "nowhere"},
        {"quota": {"gpus": -1}},
        {"quota": {"gpus": 1.5}},
        {"quota": {"tpus": 1}},
        {"quota": 4},
        {"weight": 0},
        {"borrow": {"gpus": 4}},
        {"quota": {"gpus": 8}, "limit": {"gpus": 4}},
    ],
)
def test_a_share_that_makes_no_sense_is_refused_with_a_sentence(
    world: ApiWorld, data: dict[str, object]
) -> None:
    refused = world.call("PATCH", "/v1/projects/vision", role="admin", data=data)
    assert (refused.status, bool(refused.json()["detail"])) == (422, True)


def test_a_change_that_changes_nothing_is_refused(world: ApiWorld) -> None:
    assert world.call("PATCH", "/v1/users/cy", role="admin", data={}).status == 422
    assert world.call("PATCH", "/v1/projects/vision", role="admin", data={}).status == 422


def test_every_user_sees_their_own_projects_with_their_role(world: ApiWorld) -> None:
    mine = world.call("GET", "/v1/projects", role="viewer").json()["items"]
    assert [(project["name"], project["role"]) for project in mine] == [("vision", "viewer")]
    names = {
        project["name"] for project in world.call("GET", "/v1/projects", role="operator").json()["items"]
    }
    assert {"vision", "speech"} <= names


def test_names_that_are_not_there_are_named_with_the_nearest(world: ApiWorld) -> None:
    there = sorted(
        world.call("GET", "/v1/nodes", role="admin").json()["items"], key=lambda node: node["name"]
    )
    near = there[0]["name"]
    detail = world.call("GET", f"/v1/nodes/{near}x", role="viewer").json()["detail"]
    assert detail == f"no node `{near}x`; did you mean `{near}`?"
    assert world.call("POST", "/v1/users", role="admin", data={"name": "vicky"}).status == 201
    detail = world.call("GET", "/v1/tokens?user=vicki", role="admin").json()["detail"]
    assert detail == "no user `vicki`; did you mean `vicky`?"
    detail = world.call("PATCH", "/v1/users/vicki", role="admin", data={"is_active": False}).json()["detail"]
    assert detail == "no user `vicki`; did you mean `vicky`?"


def test_viewer_who_submits_gets_the_role_that_it_needs(world: ApiWorld) -> None:
    for body in ({"spec": {"run": "true"}}, {"spec": {"run": "true"}, "project": "vision"}):
        refused = world.call("POST", "/v1/jobs", role="viewer", data=body)
        assert refused.status == 403
        assert refused.json()["detail"].startswith("you are viewer in vision")
        assert refused.json()["detail"].endswith("submitting needs member")
