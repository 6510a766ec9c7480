"""Server-sent events over a plain ASGI response, so that Shoal decides every end of a stream.

A stream ends within `CHECK_EVERY_S` plus the authenticator's cache time when its token is revoked or expires
or its user is deactivated, and at once when the client goes away or stops reading.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.api.call import Call
from shoal.errors import Unauthenticated

CHECK_EVERY_S = 2.0
HEARTBEAT_S = 10.0
MAX_SEND_S = 20.0
"""A client that reads nothing for this long is gone."""
HEARTBEAT = b": still here\n\n"
CLOSED = b'event: closed\ndata: {"because":"the token is not valid any more"}\n\n'


def event(kind: str, data: Any, event_id: str | int | None = None) -> bytes:
    """One event as bytes. JSON has no raw newline, so one `data` line is enough."""
    head = f"id: {event_id}\n" if event_id is not None else ""
    return f"{head}event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields until it ends, the caller loses the right to it, or the caller goes away."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, events: AsyncIterator[bytes]) -> None:
        super().__init__(status_code=200, headers={"X-Accel-Buffering": "no"})
        self._call = call
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._call.services.slots.held(self._call.caller):
            headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            was_revoked = await self._run(receive, send)
            with anyio.move_on_after(MAX_SEND_S):
                last = CLOSED if was_revoked else b""
                await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _run(self, receive: Receive, send: Send) -> bool:
        """Whether the stream ended because its token is no longer valid."""
        was_revoked = False

        async def until_revoked() -> None:
            nonlocal was_revoked
            while await _is_still_known(self._call):  # noqa: ASYNC110 - a revocation raises no event
                await anyio.sleep(CHECK_EVERY_S)
            was_revoked = True
            group.cancel_scope.cancel()

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(until_revoked)
            group.start_soon(until_gone)
            await self._send_all(send)
            group.cancel_scope.cancel()
        return was_revoked

    async def _send_all(self, send: Send) -> None:
        async for chunk in self._events:
            with anyio.move_on_after(MAX_SEND_S) as timer:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if timer.cancelled_caught:
                return


async def _is_still_known(call: Call) -> bool:
    try:
        authenticated = await call.services.authenticator.identify(call.token)
    except Unauthenticated:
        return False
    # Taking a role away ends the stream too. The remaining rights decide about the client's next request.
    return authenticated.caller == call.caller
