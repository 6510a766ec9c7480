"""A route without a permission, or made without the route table, cannot exist."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

from shoal.api.app import declared_routes
from shoal.api.call import json_response
from shoal.api.http.guard import OPEN
from shoal.api.requests import RenewalBody
from shoal.api.routing import RouteGroup, route_table
from shoal.errors import Bug
from shoal.identity import Permission
from shoal.wire import Renewal
from tests.support.planes.world import open_world


async def handler(request: Request) -> Response:
    """Answer without checking the permission."""
    return json_response({"secret": 1})


def test_every_route_declares_a_permission() -> None:
    table = declared_routes()
    assert len(table) > 35
    assert {row.path for row in table if row.permission is None} == {"/healthz"}


def test_every_permission_is_used_by_some_route() -> None:
    assert {row.permission for row in declared_routes()} == {*Permission, None}


@pytest.mark.parametrize("how", ["plain", "raw", "mount"])
def test_an_application_with_an_undeclared_route_cannot_be_made(how: str, tmp_path: Path) -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    if how == "plain":
        app.get("/x")(handler)
    elif how == "raw":
        app.router.add_route("/x", handler)
    else:
        app.mount("/x", StaticFiles(directory=tmp_path))
    with pytest.raises(Bug):
        route_table(app, OPEN)


def test_a_route_cannot_declare_itself_open() -> None:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    routes = RouteGroup("x")
    routes.add("GET", "/x", None, answers=dict)(handler)
    routes.install(app.router)
    with pytest.raises(Bug):
        route_table(app, OPEN)


def test_an_answer_given_without_asking_is_withheld(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        routes = RouteGroup("x")
        routes.add("GET", "/v1/forgetful", Permission.JOB_READ, answers=dict)(handler)
        routes.install(world.app._app.router)  # type: ignore[attr-defined]
        got = world.call("GET", "/v1/forgetful", role="admin")
        assert got.status == 500
        assert b"secret" not in got.body


def test_application_mounted_later_is_still_behind_the_guard(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("open sesame")
    with open_world(tmp_path / "home") as world:
        app = world.app._app  # type: ignore[attr-defined]
        app.mount("/static", StaticFiles(directory=tmp_path))
        app.router.add_route("/raw", handler)
        for path in ("/static/secret.txt", "/raw"):
            assert world.call("GET", path).status == 401


def test_every_field_of_a_renewal_is_published() -> None:
    fields = {field.name for field in msgspec.structs.fields(Renewal)}
    assert set(RenewalBody.model_fields) == fields
