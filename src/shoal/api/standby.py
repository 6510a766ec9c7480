"""What a control plane answers that waits for the lead: how it is, who leads, and to the rest that it cannot.

It checks no token, and so tells nobody anything but where to ask.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.api.guard import HEADERS
from shoal.api.hosts import HostCheck
from shoal.api.problems import MEDIA_TYPE, problem, problem_response
from shoal.errors import ShoalError, StandingBy
from shoal.settings import Settings

RETRY = {"Retry-After": "1", "Connection": "close"}
_numbers = random.Random()  # noqa: S311 - tells requests apart, and is no secret


class Waiting(NamedTuple):
    """What is known of the lead."""

    leader: str | None = None
    """Where whoever leads listens; None: nobody does, or nobody can say."""
    is_well: bool = True
    """Whether the database answers."""


class StandbyApp:
    """The ASGI application of a control plane that stands by."""

    def __init__(self, settings: Settings, known: Callable[[], Waiting]) -> None:
        self._url = settings.url
        self._hosts = HostCheck(settings)
        self._known = known

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
        known = self._known()
        try:
            self._hosts.check(scope["headers"])
        except ShoalError as error:
            return problem_response(error, request_id, should_close=True)
        if (scope["method"], scope["path"]) == ("GET", "/healthz"):
            status = "ok" if known.is_well else "degraded"
            health = {"status": status, "role": "standby", "leader": known.leader}
            return Response(msgspec.json.encode(health), media_type="application/json")
        document = problem(standing_by(self._url, known.leader), request_id)
        body = msgspec.json.encode({**document, "leader": known.leader})
        return Response(body, status_code=StandingBy.status, headers=RETRY, media_type=MEDIA_TYPE)


def standing_by(url: str, leader: str | None) -> StandingBy:
    leads = f"{leader} leads" if leader else "nobody leads at this moment"
    return StandingBy(
        f"the control plane at {url} stands by; {leads}",
        hint=f"name both: `shoal login {leader or 'URL'},{url}`",
    )
