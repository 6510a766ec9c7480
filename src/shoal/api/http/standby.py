"""The answers of a control plane that waits to lead: its health, the leader's address, and a refusal of the
rest.

It checks no token, so it reveals only where to ask.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.api.http.guard import HEADERS, HostCheck
from shoal.api.http.problems import MEDIA_TYPE, problem, problem_response
from shoal.errors import ShoalError, StandingBy
from shoal.settings import Settings

RETRY = {"Retry-After": "1", "Connection": "close"}
_numbers = random.Random()  # noqa: S311 - tells requests apart, and is no secret


class LeaderStatus(NamedTuple):
    """What is known of the leader."""

    leader: str | None = None
    """Where the leader listens. None: there is no leader, or it is unknown."""
    is_well: bool = True
    """Whether the database answers."""


class StandbyApp:
    """The ASGI application of a control plane on standby."""

    def __init__(self, settings: Settings, leader_status: Callable[[], LeaderStatus]) -> None:
        self._url = settings.url
        self._hosts = HostCheck(settings)
        self._leader_status = leader_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            response = self._answer(scope)
            response.raw_headers.extend(HEADERS)
            await response(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        request_id = f"req_{_numbers.getrandbits(96):024x}"
        leader_status = self._leader_status()
        try:
            self._hosts.check(scope["headers"])
        except ShoalError as error:
            return problem_response(error, request_id, should_close=True)
        if (scope["method"], scope["path"]) == ("GET", "/healthz"):
            status = "ok" if leader_status.is_well else "degraded"
            health = {"status": status, "role": "standby", "leader": leader_status.leader}
            return Response(msgspec.json.encode(health), media_type="application/json")
        document = problem(standing_by(self._url, leader_status.leader), request_id)
        body = msgspec.json.encode({**document, "leader": leader_status.leader})
        return Response(body, status_code=StandingBy.status, headers=RETRY, media_type=MEDIA_TYPE)


def standing_by(url: str, leader: str | None) -> StandingBy:
    leads = f"{leader} leads" if leader else "no control plane leads at this moment"
    return StandingBy(
        f"the control plane at {url} is on standby; {leads}",
        hint=f"name both: `shoal login {leader or 'URL'},{url}`",
    )
