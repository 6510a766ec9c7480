"""Rows 1 to 4 and 6: without a credential there is nothing to find, whatever the path, method or protocol."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.http.guard import OPEN
from shoal.api.routing import RouteDeclaration
from tests.attacks.inventory import GUARDED, METHODS, TABLE, bare, title
from tests.support.planes import asgi
from tests.support.planes.world import ApiWorld

UNMOUNTED = (
    *("/", "/docs", "/redoc", "/openapi.json", "/metrics", "/static/app.js", "/v1", "/v1/", "/favicon.ico"),
    *("/admin", "/api/2.0/mlflow/experiments/list", "/api/jobs/", "/.env", "/.git/config", "/graphql"),
)
SPELLINGS = (
    *("//v1/jobs", "/v1//jobs", "/v1/./jobs", "/v1/../v1/jobs", "/v1/jobs/", "/v1/jobs;x=1", "/v1/jobs%2f"),
    *("/%76%31/jobs", "/v1/%2e/jobs", "/v1/%2e%2e/v1/jobs", "/V1/JOBS", "/v1/jobs%00", "/v1/jobs%20"),
    *(
        "/healthz/../v1/jobs",
        "/healthz/%2e%2e/v1/jobs",
        "/healthz;/../v1/jobs",
        "/v1\\jobs",
        "http://x/v1/jobs",
    ),
)
NOT_TOKENS = (
    *("", "null", "undefined", "None", "admin", "admin:admin", "shl_", "shl__", "shl_tok_0_", "shj_", "shs_"),
    *(
        "shl_tok_0_" + "0" * 64,
        "shj_att_0_" + "0" * 64,
        "shs_att_0.node-1_" + "0" * 64 + "_" + "0" * 64,
        "0" * 10_000,
        "*",
    ),
)


def test_only_the_health_check_is_open() -> None:
    assert sorted(OPEN) == [("GET", "/healthz")]
    assert {(row.method, row.path) for row in TABLE if row.permission is None} == OPEN


@pytest.mark.parametrize("row", TABLE, ids=title)
def test_no_method_of_any_route_answers_without_a_token(world: ApiWorld, row: RouteDeclaration) -> None:
    shot = bare(row)
    for method in METHODS:
        if (method, shot.target) in OPEN:
            continue
        got = world.call(method, shot.target, data=shot.data, body=shot.body, headers=shot.headers)
        assert got.status == 401, (method, shot.target)
        assert got.header("www-authenticate") == 'Bearer realm="shoal"'
        assert set(got.json()) == {"type", "title", "status", "detail", "code", "hint", "request_id"}


@pytest.mark.parametrize("path", [*UNMOUNTED, *SPELLINGS])
def test_paths_that_no_route_has_are_not_known_to_strangers_and_not_found_by_others(
    world: ApiWorld, path: str
) -> None:
    assert world.call("GET", path).status == 401
    if path == "/openapi.json":
        return
    assert world.call("GET", path, role="admin").status in (400, 404)


@pytest.mark.parametrize(
    "header", ["x-original-url", "x-rewrite-url", "x-forwarded-uri", "x-forwarded-prefix"]
)
def test_a_header_cannot_change_which_path_is_judged(world: ApiWorld, header: str) -> None:
    assert world.call("GET", "/v1/jobs", headers=[(header, "/healthz")]).status == 401
    got = world.call("GET", "/healthz", headers=[(header, "/v1/jobs")])
    assert (got.status, got.json()) == (200, {"status": "ok", "role": "leader"})


@pytest.mark.parametrize("header", ["x-http-method-override", "x-method-override", "x-http-method"])
def test_a_header_cannot_change_the_method(world: ApiWorld, header: str) -> None:
    before = world.newest_attempt(world.jobs["vision"])
    path = f"/v1/jobs/{world.jobs['vision']}"
    assert world.call("GET", f"{path}/stop", role="lead", headers=[(header, "POST")]).status == 405
    assert world.call("GET", path, role="lead", headers=[(header, "DELETE")]).status == 200
    assert world.newest_attempt(world.jobs["vision"]) == before


@pytest.mark.parametrize("row", GUARDED, ids=title)
def test_methods_that_a_route_does_not_declare_do_nothing(world: ApiWorld, row: RouteDeclaration) -> None:
    declared = {other.method for other in GUARDED if other.path == row.path}
    for method in set(METHODS) - declared:
        assert world.call(method, bare(row).target, role="admin").status in (404, 405), method


@pytest.mark.parametrize("token", NOT_TOKENS, ids=lambda token: token[:20] or "empty")
def test_text_that_is_no_token_opens_nothing(world: ApiWorld, token: str) -> None:
    assert world.call("GET", "/v1/me", token=token).status in (401, 429)


@pytest.mark.parametrize(
    "value",
    [
        "Basic YWRtaW46YWRtaW4=",
        "Bearer",
        "Bearer ",
        "Token {}",
        "{}",
        "Bearer {} x",
        "Bearer,{}",
        "Negotiate {}",
    ],
)
def test_a_token_in_another_shape_opens_nothing(world: ApiWorld, value: str) -> None:
    sent = value.format(world.tokens["admin"])
    assert world.call("GET", "/v1/me", headers=[("authorization", sent)]).status in (401, 429)


def test_two_credentials_in_one_request_open_nothing(world: ApiWorld) -> None:
    both = [("authorization", f"Bearer {world.tokens['viewer']}")]
    assert world.call("GET", "/v1/me", role="admin", headers=both).status in (401, 429)


@pytest.mark.parametrize("where", ["/v1/jobs", "/v1/events/stream", "/ws", "/healthz"])
def test_a_socket_is_closed_before_it_is_accepted(world: ApiWorld, where: str) -> None:
    sent: list[Any] = []

    async def shake_hands() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [("host", "localhost"), ("authorization", f"Bearer {world.tokens['admin']}")]
        scope = {**asgi.scope_of("GET", where, headers), "type": "websocket", "subprotocols": []}
        await world.app(scope, receive, send)

    world.portal.call(shake_hands)
    assert [message["type"] for message in sent] == ["websocket.close"]
