"""Row 9: a credential taken away ends requests at once and open streams within five seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.planes.world import ApiWorld, eventually

LIFETIME_S = 3.0
"""Of a token that expires: long enough to be used once on a busy machine."""


def fresh_user(world: ApiWorld, name: str) -> str:
    assert world.call("POST", "/v1/users", role="admin", data={"name": name}).status == 201
    path = f"/v1/projects/vision/members/{name}"
    assert world.call("PUT", path, role="admin", data={"role": "viewer"}).status == 200
    return str(fresh_token(world, name)["text"])


def fresh_token(world: ApiWorld, name: str, **wanted: Any) -> Any:
    created = world.call("POST", "/v1/tokens", role="admin", data={"user": name, **wanted})
    assert created.status == 201, created.body
    return created.json()


def test_a_revoked_token_is_refused_at_once(world: ApiWorld) -> None:
    token = fresh_token(world, "ben")
    assert world.call("GET", "/v1/me", token=token["text"]).status == 200
    assert world.call("DELETE", f"/v1/tokens/{token['id']}", role="member").status == 200
    assert world.call("GET", "/v1/me", token=token["text"]).status == 401
    assert world.call("DELETE", f"/v1/tokens/{token['id']}", role="member").status == 200


def test_a_deactivated_user_is_refused_at_once_and_can_come_back(world: ApiWorld) -> None:
    token = fresh_user(world, "leaver")
    assert world.call("GET", "/v1/me", token=token).status == 200
    assert world.call("PATCH", "/v1/users/leaver", role="admin", data={"is_active": False}).status == 200
    assert world.call("GET", "/v1/me", token=token).status == 401
    assert world.call("PATCH", "/v1/users/leaver", role="admin", data={"is_active": True}).status == 200
    assert world.call("GET", "/v1/me", token=token).status == 200


def test_an_expired_token_is_refused_although_it_was_just_remembered(world: ApiWorld) -> None:
    token = fresh_token(world, "ben", lifetime_s=LIFETIME_S)
    assert world.call("GET", "/v1/me", token=token["text"]).status == 200
    eventually(
        lambda: world.call("GET", "/v1/me", token=token["text"]).status == 401, within_s=LIFETIME_S + 3
    )


def test_a_membership_taken_away_hides_the_project_at_once(world: ApiWorld) -> None:
    token = fresh_user(world, "mover")
    path = f"/v1/jobs/{world.jobs['vision']}"
    assert world.call("GET", path, token=token).status == 200
    assert world.call("DELETE", "/v1/projects/vision/members/mover", role="lead").status == 200
    assert world.call("GET", path, token=token).status == 404


@pytest.mark.parametrize("how", ["revoke", "deactivate", "expire", "expel"])
@pytest.mark.parametrize("kind", ["logs", "events"])
def test_open_streams_end_within_five_seconds(world: ApiWorld, how: str, kind: str) -> None:
    name = f"{how}-{kind}"
    fresh_user(world, name)
    token = fresh_token(world, name, **({"lifetime_s": LIFETIME_S} if how == "expire" else {}))
    target = f"/v1/jobs/{world.jobs['vision']}/logs/stream" if kind == "logs" else "/v1/events/stream?after=0"
    with world.stream(target, token=token["text"]) as stream:
        eventually(lambda: bool(stream.body))
        began = time.monotonic()
        if how == "revoke":
            world.call("DELETE", f"/v1/tokens/{token['id']}", role="admin")
        elif how == "deactivate":
            world.call("PATCH", f"/v1/users/{name}", role="admin", data={"is_active": False})
        elif how == "expel":
            world.call("DELETE", f"/v1/projects/vision/members/{name}", role="lead")
        alive_s = LIFETIME_S if how == "expire" else 0.0
        eventually(lambda: stream.is_complete, within_s=alive_s + 5)
        assert time.monotonic() - began < alive_s + 6.5
        assert stream.events()[-1][0] == "closed"
