"""Row 57: revoking a token ends what was made with it; no token reaches one wider than itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.settings import ServerLimits
from tests.support.planes.world import ApiWorld, open_world

MOST = 8


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ApiWorld]:
    """A world in which few tokens reach the limit."""
    with open_world(
        tmp_path, limits=ServerLimits(max_tokens_per_user=MOST, max_tokens_per_service=4)
    ) as opened:
        yield opened


def make(world: ApiWorld, *, role: str | None = None, token: str | None = None, **wanted: Any) -> Any:
    created = world.call("POST", "/v1/tokens", role=role, token=token, data=wanted)
    assert created.status == 201, created.body
    return created.json()


def me(world: ApiWorld, token: Any) -> int:
    return world.call("GET", "/v1/me", token=token["text"]).status


def revoke(world: ApiWorld, revoked: Any, query: str = "", **by: Any) -> Any:
    return world.call("DELETE", f"/v1/tokens/{revoked['id']}{query}", **by)


def listed(world: ApiWorld, **by: Any) -> dict[str, Any]:
    items = world.call("GET", "/v1/tokens", **by).json()["items"]
    return {item["id"]: item for item in items}


def test_revoking_a_token_revokes_what_was_made_with_it_at_any_depth(world: ApiWorld) -> None:
    line = [make(world, role="lead", scope="member", label="first")]
    for _ in range(4):
        line.append(make(world, token=line[-1]["text"]))
    assert [entry["parent"] for entry in line[1:]] == [entry["id"] for entry in line[:-1]]
    reply = revoke(world, line[1], role="lead")
    assert reply.status == 200
    assert sorted(reply.json()["revoked_with_it"]) == [entry["id"] for entry in line[2:]]
    assert [me(world, entry) for entry in line] == [200, 401, 401, 401, 401]


def test_token_made_by_an_admin_for_another_user_ends_with_its_parent(world: ApiWorld) -> None:
    session = make(world, role="admin", label="leaked")
    token = make(world, token=session["text"], user="ben", scope="member")
    again = make(world, token=token["text"])
    assert (token["user"], me(world, again)) == ("ben", 200)
    assert revoke(world, session, role="admin").status == 200
    assert (me(world, token), me(world, again)) == (401, 401)


def test_a_service_token_ends_with_the_one_it_was_made_with(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        service = {"spec": {"name": "chat", "run": "sleep 1000", "public": False}, "project": "vision"}
        assert world.call("POST", "/v1/services", role="member", data=service).status == 201
        session = make(world, role="member")
        called = make(world, token=session["text"], project="vision", service="chat")
        reply = revoke(world, session, role="member").json()
        assert reply["revoked_with_it"] == [called["id"]]
        events = world.call("GET", "/v1/events?kind=token.&limit=500", role="lead").json()["items"]
        assert ("token.revoked", "chat") in {
            (entry["kind"], entry["data"].get("service")) for entry in events
        }
        assert me(world, called) == 401


def test_children_that_are_kept_count_as_the_grandparents(world: ApiWorld) -> None:
    first = make(world, role="lead")
    second = make(world, token=first["text"])
    third = make(world, token=second["text"])
    kept = revoke(world, second, "?keep_children=true", role="lead")
    assert kept.json()["kept"] == [third["id"]]
    assert (me(world, second), me(world, third)) == (401, 200)
    assert listed(world, role="lead")[third["id"]]["parent"] == first["id"]
    assert revoke(world, first, role="lead").status == 200
    assert me(world, third) == 401


def test_a_token_does_not_save_itself_by_revoking_what_it_was_made_with(world: ApiWorld) -> None:
    first = make(world, role="lead")
    second = make(world, token=first["text"])
    third = make(world, token=second["text"])
    for child in (second, third):
        refused = revoke(world, first, "?keep_children=true", token=child["text"])
        assert refused.status == 409
    assert me(world, first) == 200
    assert revoke(world, first, token=third["text"]).status == 200
    assert [me(world, entry) for entry in (first, second, third)] == [401] * 3


def test_a_leaked_token_does_not_save_what_was_made_with_it_by_revoking_itself(world: ApiWorld) -> None:
    first = make(world, role="lead")
    leaked = make(world, token=first["text"])
    hidden = make(world, token=leaked["text"])
    refused = revoke(world, leaked, "?keep_children=true", token=leaked["text"])
    assert refused.status == 409
    assert revoke(world, leaked, role="lead").json()["revoked_with_it"] == [hidden["id"]]
    assert (me(world, first), me(world, leaked), me(world, hidden)) == (200, 401, 401)


def test_a_token_of_less_scope_neither_lists_nor_revokes_a_wider_one(world: ApiWorld) -> None:
    wide = make(world, role="admin", label="wide")
    for scope in ("viewer", "member", "operator"):
        narrow = make(world, role="admin", scope=scope)
        assert wide["id"] not in listed(world, token=narrow["text"])
        assert narrow["id"] in listed(world, token=narrow["text"])
        refused = revoke(world, wide, token=narrow["text"])
        assert refused.status == 403
        assert scope in refused.json()["detail"]
    assert me(world, wide) == 200


def test_a_token_bound_to_a_project_reaches_that_projects_alone(world: ApiWorld) -> None:
    bound = make(world, role="admin", scope="admin", project="vision")
    same = make(world, role="admin", scope="member", project="vision")
    others = [make(world, role="admin", scope="viewer", project="speech"), make(world, role="admin")]
    seen = listed(world, token=bound["text"])
    assert {bound["id"], same["id"]} <= set(seen)
    assert {entry["project"] for entry in seen.values()} == {"vision"}
    unknown = world.call("DELETE", "/v1/tokens/tok_00000000000000000000000000", token=bound["text"])
    for other in others:
        refused = revoke(world, other, token=bound["text"])
        assert (refused.status, refused.json()["detail"]) == (404, unknown.json()["detail"])
        assert me(world, other) == 200
    assert revoke(world, same, token=bound["text"]).status == 200


@pytest.mark.parametrize("scope", ["viewer", "member", "admin"])
def test_a_token_always_ends_itself(world: ApiWorld, scope: str) -> None:
    token = make(world, role="admin", scope=scope)
    assert revoke(world, token, token=token["text"]).status == 200
    assert me(world, token) == 401


def test_a_token_ends_those_made_with_it_also_when_its_user_is_admin_no_more(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        oz = make(world, role="admin", user="oz")
        assert world.call("PATCH", "/v1/users/oz", role="admin", data={"cluster_role": "admin"}).status == 200
        token = make(world, token=oz["text"], user="ben", scope="member")
        for_cy = make(world, role="admin", user="cy")
        assert world.call("PATCH", "/v1/users/oz", role="admin", data={"cluster_role": None}).status == 200
        assert revoke(world, for_cy, token=oz["text"]).status == 404
        assert revoke(world, token, token=oz["text"]).status == 200
        assert me(world, token) == 401


def test_a_token_that_only_reads_makes_none(world: ApiWorld) -> None:
    reader = make(world, role="admin", scope="viewer")
    refused = world.call("POST", "/v1/tokens", token=reader["text"], data={"scope": "viewer"})
    assert (refused.status, refused.json()["code"]) == (403, "denied")


def test_tokens_of_one_user_are_bounded_and_those_that_ended_do_not_count(small: ApiWorld) -> None:
    tokens = [make(small, role="member", label="ci") for _ in range(MOST - 1)]
    full = small.call("POST", "/v1/tokens", role="member", data={})
    assert full.status == 429
    assert f"at most {MOST}" in full.json()["detail"]
    assert "shoal token revoke" in full.json()["hint"]
    by_admin = small.call("POST", "/v1/tokens", role="admin", data={"user": "ben"})
    assert by_admin.status == 429
    assert small.call("POST", "/v1/tokens", role="lead", data={}).status == 201
    assert revoke(small, tokens[0], role="member").status == 200
    assert small.call("POST", "/v1/tokens", role="member", data={}).status == 201


def test_tokens_of_one_service_are_bounded_across_users(small: ApiWorld) -> None:
    for role in ("member", "other", "lead", "member"):
        make(small, role=role, project="vision", service="bot")
    full = small.call("POST", "/v1/tokens", role="other", data={"project": "vision", "service": "bot"})
    assert full.status == 429
    assert "service `bot` of vision has 4" in full.json()["detail"]
    make(small, role="other", project="vision", service="search")


def test_tokens_made_and_revoked_without_end_leave_a_bounded_number_of_rows(
    small: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.commands.tokens.MAX_ENDED", 5)
    for _ in range(20):
        assert revoke(small, make(small, role="member"), role="member").status == 200
    ben = small.read(lambda tx: tx.people.user_by_name("ben"))
    assert len(small.read(lambda tx: tx.tokens.of_user(ben.user_id))) <= 5 + 2
