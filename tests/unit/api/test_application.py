"""The short way to a route gives every caller the same answer as the long way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.api.app import Application
from shoal.api.http.bodies import MAX_KEPT, SubmissionCache
from shoal.api.views.openapi import schema_bytes
from shoal.errors import SpecError
from tests.support.planes.asgi import AsgiReply
from tests.support.planes.world import ApiWorld, open_world

VARYING = ("x-request-id", "date")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("home")) as opened:
        yield opened


def application(world: ApiWorld) -> Application:
    app = world.app._app  # type: ignore[attr-defined]
    assert isinstance(app, Application)
    return app


def test_description_of_the_api_is_encoded_once(world: ApiWorld) -> None:
    app = application(world)
    document = world.call("GET", "/openapi.json", role="viewer").body
    assert document.startswith(b'{"openapi"')
    assert schema_bytes(app) == document
    assert schema_bytes(app) is schema_bytes(app)


def shape(answer: AsgiReply) -> tuple[object, ...]:
    """Everything but the parts that differ every time."""
    headers = [(k, v) for k, v in answer.headers if k not in (*VARYING, "content-length")]
    body = answer.json()
    return answer.status, headers, body.get("code"), body.get("detail"), sorted(body)


BODIES = [b"", b"{}", b"[1", b'{"spec":{"run":"true"},"project":"vision"}', b'{"spec":{"run":5},"x":1}']


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("role", [None, "viewer", "member", "stranger", "admin", "job", "supervisor"])
def test_the_short_way_answers_as_the_long_way_does(world: ApiWorld, role: str | None, body: bytes) -> None:
    app = application(world)
    routes = sorted(app._direct)
    assert ("POST", b"/v1/jobs") in routes
    headers = [("content-type", "application/json")] if body else []
    for method, path in routes:
        if path in (b"/v1/tokens", b"/v1/users", b"/v1/projects") and method == "POST" and role == "admin":
            continue  # the first request changes the answer to the second
        short = world.call(method, path.decode(), role=role, body=body, headers=headers)
        kept, app._direct = app._direct, {}
        try:
            long = world.call(method, path.decode(), role=role, body=body, headers=headers)
        finally:
            app._direct = kept
        assert shape(short) == shape(long), (method, path)


def test_a_query_where_none_may_be_goes_the_long_way_and_is_refused(world: ApiWorld) -> None:
    body = b'{"spec":{"run":"true"},"project":"vision"}'
    headers = [("content-type", "application/json")]
    got = world.call("POST", "/v1/jobs?dry=1", role="member", body=body, headers=headers)
    assert got.status == 422


def test_a_body_is_parsed_once_unless_it_carries_secrets() -> None:
    kept = SubmissionCache()
    plain = b'{"spec":{"run":"true"}}'
    assert kept.parse(plain) is kept.parse(plain)
    secret = b'{"spec":{"run":"true","secrets":["PIN"]},"secrets":{"PIN":"1234"}}'
    assert kept.parse(secret) is not kept.parse(secret)
    assert not any(b"1234" in raw for raw in kept._kept)


def test_remembered_bodies_are_bounded_and_wrong_ones_are_not_remembered() -> None:
    kept = SubmissionCache()
    for number in range(3 * MAX_KEPT):
        kept.parse(b'{"spec":{"run":"echo %d"}}' % number)
    kept.parse(b'{"spec":{"run":"%s"}}' % (b"x" * (64 << 10)))
    with pytest.raises(SpecError):
        kept.parse(b'{"spec":{}}')
    assert len(kept._kept) <= MAX_KEPT
    assert max(map(len, kept._kept)) < 100
