"""The short way to a route answers what the long way does, to everybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.api.application import Application
from shoal.api.openapi import schema_bytes
from shoal.api.submissions import MAX_KEPT, Submissions
from shoal.errors import SpecError
from tests.support.asgi import Answer
from tests.support.world import World, open_world

VARYING = ("x-request-id", "date")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("home")) as opened:
        yield opened


def application(world: World) -> Application:
    app = world.app._app  # type: ignore[attr-defined]
    assert isinstance(app, Application)
    return app


def test_description_of_the_api_is_encoded_once(world: World) -> None:
    app = application(world)
    told = world.call("GET", "/openapi.json", role="viewer").body
    assert told.startswith(b'{"openapi"')
    assert schema_bytes(app) == told
    assert schema_bytes(app) is schema_bytes(app)


def shape(answer: Answer) -> tuple[object, ...]:
    """All but what is different every time."""
    headers = [(k, v) for k, v in answer.headers if k not in (*VARYING, "content-length")]
    body = answer.json()
    return answer.status, headers, body.get("code"), body.get("detail"), sorted(body)


BODIES = [b"", b"{}", b"[1", b'{"spec":{"run":"true"},"project":"vision"}', b'{"spec":{"run":5},"x":1}']


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("role", [None, "viewer", "member", "stranger", "admin", "job", "supervisor"])
def test_the_short_way_answers_as_the_long_way_does(world: World, role: str | None, body: bytes) -> None:
    app = application(world)
    routes = sorted(app._direct)
    assert ("POST", b"/v1/jobs") in routes
    headers = [("content-type", "application/json")] if body else []
    for method, path in routes:
        if path in (b"/v1/tokens", b"/v1/users", b"/v1/projects") and method == "POST" and role == "admin":
            continue  # what it makes the first time is in the way the second time
        short = world.call(method, path.decode(), role=role, body=body, headers=headers)
        kept, app._direct = app._direct, {}
        try:
            long = world.call(method, path.decode(), role=role, body=body, headers=headers)
        finally:
            app._direct = kept
        assert shape(short) == shape(long), (method, path)


def test_a_query_where_none_may_be_goes_the_long_way_and_is_refused(world: World) -> None:
    body = b'{"spec":{"run":"true"},"project":"vision"}'
    headers = [("content-type", "application/json")]
    got = world.call("POST", "/v1/jobs?dry=1", role="member", body=body, headers=headers)
    assert got.status == 422


def test_a_body_is_parsed_once_unless_it_carries_secrets() -> None:
    kept = Submissions()
    plain = b'{"spec":{"run":"true"}}'
    assert kept.parse(plain) is kept.parse(plain)
    secret = b'{"spec":{"run":"true","secrets":["PIN"]},"secrets":{"PIN":"1234"}}'
    assert kept.parse(secret) is not kept.parse(secret)
    assert not any(b"1234" in raw for raw in kept._kept)


def test_what_is_remembered_of_bodies_is_bounded_and_mistakes_are_not() -> None:
    kept = Submissions()
    for number in range(3 * MAX_KEPT):
        kept.parse(b'{"spec":{"run":"echo %d"}}' % number)
    kept.parse(b'{"spec":{"run":"%s"}}' % (b"x" * (64 << 10)))
    with pytest.raises(SpecError):
        kept.parse(b'{"spec":{}}')
    assert len(kept._kept) <= MAX_KEPT
    assert max(map(len, kept._kept)) < 100
