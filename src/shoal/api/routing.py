"""How a route is declared: method, path, permission and reply, in one place.

A route without a permission cannot be made, and an application with a route made in any other way cannot be
created.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from shoal.api.call import call_of
from shoal.errors import Bug
from shoal.identity import Permission

PERMISSION_FIELD = "x-shoal-permission"
BODY_FIELD = "x-shoal-body"
OPEN_MARK = "open"
Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Response]])
RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]


class RouteDeclaration(msgspec.Struct, frozen=True, order=True):
    """A row of the route table. `permission` is None for routes that the guard leaves open."""

    path: str
    method: str
    permission: Permission | None


class DeclaredRoute(APIRoute):
    """Checks the declared permission before the handler, and withholds an answer that never asked for it."""

    def get_route_handler(self) -> RouteHandler:
        return self.guarded(super().get_route_handler())

    def guarded(self, inner: RouteHandler) -> RouteHandler:
        """`inner` behind the declared permission."""
        permission = permission_of(self)
        if permission is None:
            return inner

        async def handle(request: Request) -> Response:
            call = call_of(request)
            call.enter(permission)
            response = await inner(request)
            if not call.is_authorized:
                raise Bug(f"{self.path} answered without asking for `{permission}`")
            return response

        return handle


class RouteGroup:
    """The declared routes of one noun. `install` adds them to an application."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._declared: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []

    def add(
        self,
        method: str,
        path: str,
        permission: Permission | None,
        *,
        answers: Any,
        status: int = 200,
        body: type[BaseModel] | None = None,
        media_type: str = "application/json",
    ) -> Callable[[Handler], Handler]:
        """Declare a route. `answers` and `body` are only for the documentation; the handler encodes and reads
        by itself.
        """
        extra: dict[str, Any] = {PERMISSION_FIELD: permission.value if permission else OPEN_MARK}
        if body is not None:
            extra[BODY_FIELD] = body.__name__
        documented: dict[str, Any] = (
            {"model": answers}
            if media_type == "application/json"
            else {"content": {media_type: {"schema": {"type": "string"}}}}
        )

        def declare(handler: Handler) -> Handler:
            options = {
                "methods": [method],
                "status_code": status,
                "responses": {status: {"description": "Done.", **documented}},
                "openapi_extra": extra,
                "operation_id": handler.__name__,
                "summary": (handler.__doc__ or handler.__name__).partition("\n")[0],
                "description": "",
            }
            self._declared.append((path, handler, options))
            return handler

        return declare

    def install(self, router: APIRouter) -> None:
        """Put the declared routes into `router`, in order."""
        for path, handler, options in self._declared:
            router.add_api_route(
                path,
                handler,
                tags=[self._tag],
                response_model=None,
                response_class=Response,
                route_class_override=DeclaredRoute,
                **options,
            )


def permission_of(route: APIRoute) -> Permission | None:
    """The permission that the route declares. Raises `Bug` if it declares none."""
    declared = (route.openapi_extra or {}).get(PERMISSION_FIELD)
    if declared is None:
        raise Bug(f"route {route.path} declares no permission")
    return None if declared == OPEN_MARK else Permission(declared)


def route_table(app: FastAPI, open_routes: frozenset[tuple[str, str]]) -> tuple[RouteDeclaration, ...]:
    """Every route. Raises `Bug` for a route that was not declared, or that is open without being listed."""
    routes = []
    for route in app.routes:
        if not isinstance(route, DeclaredRoute):
            raise Bug(f"{getattr(route, 'path', route)!r} was added without declaring a permission")
        permission = permission_of(route)
        for method in sorted(route.methods or ()):
            if (permission is None) != ((method, route.path) in open_routes):
                raise Bug(f"{method} {route.path} is open in one place and closed in another")
            routes.append(RouteDeclaration(route.path, method, permission))
    return tuple(sorted(routes, key=lambda row: (row.path, row.method)))
