"""Rows 12 to 16: what a web page, a proxy header or a log could be made to do for an attacker."""

from __future__ import annotations

import pytest

from shoal.api.routing import RouteDeclaration
from tests.attacks.inventory import GUARDED, TABLE, bare, title
from tests.support.planes.world import ApiWorld

MUTATING = [row for row in GUARDED if row.method != "GET"]


@pytest.mark.parametrize("row", TABLE, ids=title)
def test_a_name_that_is_not_ours_gets_no_answer_from_any_route(
    world: ApiWorld, row: RouteDeclaration
) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:7462"):
        assert world.call(row.method, bare(row).target, role="admin", host=host).status == 421, host


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost, evil.example",
        "[::1]evil",
        "localhost:x",
        "localhost@evil",
        "0.0.0.0",
        "169.254.169.254",
    ],
)
def test_a_malformed_or_foreign_host_is_refused(world: ApiWorld, host: str) -> None:
    assert world.call("GET", "/v1/me", role="admin", host=host).status == 421


def test_a_request_without_a_host_or_with_two_is_refused(world: ApiWorld) -> None:
    assert world.call("GET", "/v1/me", role="admin", host=None).status == 421
    twice = [("host", "evil.example")]
    assert world.call("GET", "/v1/me", role="admin", headers=twice).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:7462", "[::1]:7462", "localhost."])
def test_our_own_names_are_answered(world: ApiWorld, host: str) -> None:
    assert world.call("GET", "/v1/me", role="admin", host=host).status == 200


@pytest.mark.parametrize(
    "header",
    [
        "x-forwarded-user",
        "x-auth-request-email",
        "x-remote-user",
        "remote-user",
        "x-webauth-user",
        "x-shoal-user",
    ],
)
def test_identity_in_a_header_is_ignored(world: ApiWorld, header: str) -> None:
    assert world.call("GET", "/v1/me", headers=[(header, "ada")]).status == 401
    assert world.call("GET", "/v1/me", role="viewer", headers=[(header, "ada")]).json()["user"] == "cy"


@pytest.mark.parametrize("header", ["x-forwarded-host", "forwarded", "x-host"])
def test_a_forwarded_host_changes_nothing(world: ApiWorld, header: str) -> None:
    trick = [(header, "localhost")]
    assert world.call("GET", "/v1/me", role="admin", host="evil.example", headers=trick).status == 421


@pytest.mark.parametrize("name", ["token", "access_token", "api_key", "authorization", "TOKEN", "%74oken"])
def test_a_token_in_the_address_is_refused(world: ApiWorld, name: str) -> None:
    token = world.tokens["admin"]
    assert world.call("GET", f"/v1/me?{name}={token}").status == 401
    refused = world.call("GET", f"/v1/me?{name}={token}", role="admin")
    assert refused.status == 400
    assert token not in refused.body.decode()


@pytest.mark.parametrize("row", MUTATING, ids=title)
def test_a_cookie_is_no_credential_and_none_is_ever_set(world: ApiWorld, row: RouteDeclaration) -> None:
    shot = bare(row)
    for origin in ("https://evil.example", "null"):
        headers = [*shot.headers, ("cookie", f"session={world.tokens['admin']}"), ("origin", origin)]
        got = world.call(shot.method, shot.target, data=shot.data, body=shot.body, headers=headers)
        assert got.status == 401
        assert got.header("set-cookie") is None


@pytest.mark.parametrize("row", TABLE, ids=title)
def test_no_answer_can_be_read_framed_or_sniffed_by_another_site(
    world: ApiWorld, row: RouteDeclaration
) -> None:
    if row.path.endswith("/stream"):
        return
    for role in (None, "viewer", "admin"):
        got = world.call("GET", bare(row).target, role=role, headers=[("origin", "https://evil.example")])
        names = {name for name, _ in got.headers}
        assert not [name for name in names if name.startswith("access-control-")]
        assert "frame-ancestors 'none'" in (got.header("content-security-policy") or "")
        assert got.header("x-content-type-options") == "nosniff"
        assert got.header("cache-control") == "no-store"
        assert "set-cookie" not in names
        assert "server" not in names


def test_a_preflight_is_not_answered(world: ApiWorld) -> None:
    headers = [("origin", "https://evil.example"), ("access-control-request-method", "POST")]
    assert world.call("OPTIONS", "/v1/jobs", headers=headers).status == 401
    assert world.call("OPTIONS", "/v1/jobs", role="admin", headers=headers).status == 405
