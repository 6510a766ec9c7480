"""The application: the declared routes behind the guard. An undeclared route cannot be in it.

`Application` is FastAPI with a short way to routes that take nothing from the address. Their permissions and
their description are the same. The short way skips matching paths and parsing parameters, which would be most
of the cost of a submit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.api.call import ApiServices
from shoal.api.http.guard import OPEN, Guard
from shoal.api.http.limits import SCOPE_KEY
from shoal.api.http.problems import BadRequest, NoSuchMethod, describe_problem, problem_response
from shoal.api.queries import NoQuery
from shoal.api.routes import ALL
from shoal.api.routing import DeclaredRoute, RouteDeclaration, RouteHandler, route_table
from shoal.api.views.openapi import build_schema
from shoal.control import Core
from shoal.errors import Bug, NotFound, ShoalError, SpecError

OnError = Callable[[Request, Exception], Awaitable[Response]]
NOTHING_ASKED = NoQuery()
PLAIN = {"request": Request, "query": NoQuery, "return": Response}
"""The signature of a route that can be called directly."""


class Application(FastAPI):
    """FastAPI with a short way: a request with an exact path and no query skips FastAPI's routing."""

    def __init__(self) -> None:
        super().__init__(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        self._direct: dict[tuple[str, bytes], RouteHandler] = {}
        self._on_error: OnError | None = None

    def shorten(self, on_error: OnError) -> None:
        """Open the short way to the present routes. `on_error` answers for a `ShoalError`."""
        self._on_error = on_error
        for route in self.routes:
            if isinstance(route, DeclaredRoute) and get_type_hints(route.endpoint) == PLAIN:
                handler = route.guarded(_called_with_request(route))
                self._direct |= {(method, route.path.encode()): handler for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = None
        if scope["type"] == "http" and not scope["query_string"]:
            handle = self._direct.get((scope["method"], scope.get("raw_path", b"")))
        if handle is None or self._on_error is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        request = Request(scope, receive, send)
        try:
            response = await handle(request)
        except ShoalError as error:
            response = await self._on_error(request, error)
        # The guard answers other errors as FastAPI's handlers do.
        await response(scope, receive, send)


def _called_with_request(route: DeclaredRoute) -> RouteHandler:
    async def call(request: Request) -> Response:
        response: Response = await route.endpoint(request, NOTHING_ASKED)
        return response

    return call


log = structlog.get_logger()


def create_app(core: Core) -> ASGIApp:
    """The ASGI application of a running control plane."""
    services = ApiServices(core)
    return Guard(_application(services), services)


def declared_routes() -> tuple[RouteDeclaration, ...]:
    """Every route with its permission. The tests derive their requests from this table."""
    return route_table(_routed(), OPEN)


def describe_api() -> dict[str, Any]:
    """The OpenAPI document, without a running control plane."""
    return build_schema(_routed())


def _application(services: ApiServices) -> FastAPI:
    app = _routed()
    route_table(app, OPEN)
    app.state.turns = services.core.loop_health  # for the one route that has no call
    _install_handlers(app, services)
    return app


def _routed() -> Application:
    app = Application()
    for routes in ALL:
        routes.install(app.router)
    return app


def _install_handlers(app: Application, services: ApiServices) -> None:
    """Turn every failure of a handler into a problem document."""

    async def on_shoal_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ShoalError)
        if isinstance(error, Bug):
            log.error("request.bug", request_id=_request_id(request), error=error.message, **error.facts)
        await services.denials.note(request.scope, error, _request_id(request))
        return problem_response(error, _request_id(request), should_close=error.status in (408, 413))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = tuple(describe_problem(item) for item in error.errors())
        problem = SpecError(f"the request is not valid: {problems[0]}", problems=problems)
        return problem_response(problem, _request_id(request))

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
    """Starlette's own refusals: an unknown route, an unknown method, an unreadable request."""
    if error.status_code == NotFound.status:
        return NotFound("no such route", hint="routes are listed in /openapi.json")
    if error.status_code == NoSuchMethod.status:
        return NoSuchMethod("this path does not take this method", hint="routes are listed in /openapi.json")
    return BadRequest("the request could not be read")
