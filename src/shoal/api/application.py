"""FastAPI, with a short way to the routes that take nothing from the address.

The routes, their permissions and their description are the same; what is left out is matching paths and
parsing parameters where there is nothing to match or parse. That is most of what a submit would cost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import get_type_hints

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from shoal.api.queries import NoQuery
from shoal.api.routing import DeclaredRoute, RouteHandler
from shoal.errors import ShoalError

OnError = Callable[[Request, Exception], Awaitable[Response]]
NOTHING_ASKED = NoQuery()
PLAIN = {"request": Request, "query": NoQuery, "return": Response}
"""The signature of a route that can be called directly."""


class Application(FastAPI):
    """Anything but an exact path without a query goes the long way."""

    def __init__(self) -> None:
        super().__init__(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        self._direct: dict[tuple[str, bytes], RouteHandler] = {}
        self._on_error: OnError | None = None

    def shorten(self, on_error: OnError) -> None:
        """Open the short way to the routes there are now. `on_error` answers for a `ShoalError`."""
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
        # What else is raised is for the guard, which answers it as FastAPI's handlers do.
        await response(scope, receive, send)


def _called_with_request(route: DeclaredRoute) -> RouteHandler:
    async def call(request: Request) -> Response:
        response: Response = await route.endpoint(request, NOTHING_ASKED)
        return response

    return call
