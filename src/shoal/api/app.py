"""The application: the declared routes behind the guard. A route that declares nothing cannot be in it."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from shoal.api.application import Application
from shoal.api.call import Services
from shoal.api.denials import SCOPE_KEY
from shoal.api.guard import OPEN, Guard
from shoal.api.openapi import build_schema
from shoal.api.problems import BadRequest, NoSuchMethod, problem_response
from shoal.api.refusals import describe
from shoal.api.routes import ALL
from shoal.api.routing import Declared, route_table
from shoal.control import ControlPlane
from shoal.errors import Bug, NotFound, ShoalError, SpecError

log = structlog.get_logger()


def create_app(plane: ControlPlane) -> ASGIApp:
    """The ASGI application of a running control plane."""
    services = Services(plane)
    return Guard(_application(services), services)


def declared_routes() -> tuple[Declared, ...]:
    """Every route with its permission: what the tests try is made from this."""
    return route_table(_routed(), OPEN)


def describe_api() -> dict[str, Any]:
    """The OpenAPI document, without a running control plane."""
    return build_schema(_routed())


def _application(services: Services) -> FastAPI:
    app = _routed()
    route_table(app, OPEN)
    app.state.turns = services.plane.core.turns  # for the one route that has no call
    _install_handlers(app, services)
    return app


def _routed() -> Application:
    app = Application()
    for routes in ALL:
        routes.install(app.router)
    return app


def _install_handlers(app: Application, services: Services) -> None:
    """Every way a handler can fail becomes a problem document."""

    async def on_shoal_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        if isinstance(error, Bug):
            log.error("request.bug", request_id=_request_id(request), error=error.message, **error.facts)
        await services.denials.note(request.scope, error, _request_id(request))
        return problem_response(error, _request_id(request), should_close=error.status in (408, 413))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = tuple(describe(item) for item in error.errors())
        told = SpecError(f"the request is not valid: {problems[0]}", problems=problems)
        return problem_response(told, _request_id(request))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem_response(_from_http(error), _request_id(request))

    async def on_anything(request: Request, error: Exception) -> Response:
        log.error("request.failed", request_id=_request_id(request), exc_info=error)
        return problem_response(Bug("unhandled"), _request_id(request), should_close=True)

    app.shorten(on_shoal_error)
    app.add_exception_handler(ShoalError, on_shoal_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_anything)


def _request_id(request: Request) -> str:
    call = request.scope.get(SCOPE_KEY)
    return str(call.request_id) if call is not None else "req_none"


def _from_http(error: HTTPException) -> ShoalError:
    """Starlette's own refusals: no such route, no such method, an unreadable request."""
    if error.status_code == NotFound.status:
        return NotFound("no such route", hint="routes are listed in /openapi.json")
    if error.status_code == NoSuchMethod.status:
        return NoSuchMethod("this path does not do that", hint="routes are listed in /openapi.json")
    return BadRequest("the request could not be read")
