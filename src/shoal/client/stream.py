"""Server-sent events across restarts of the server: a lost stream resumes where it broke."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from shoal.client.http1 import HttpReply
from shoal.client.transport import ConnectionLost, Params, Transport
from shoal.errors import ServerUnreachable, ShoalError

ServerReach = Literal["gone", "back"]


class StreamEvent(NamedTuple):
    """One event: its kind (`line`, `attempt`, `end`, ...), the decoded data, and its id in the stream."""

    kind: str
    data: Any
    id: str | None


def follow(
    transport: Transport,
    path: str,
    params: Params | None = None,
    on_change: Callable[[ServerReach], None] | None = None,
) -> Iterator[StreamEvent]:
    """Yield every event from now on, each once, over as many connections as it takes.

    After a loss it reconnects with Last-Event-ID for the transport's patience, which each event resets. The
    stream never ends by itself: the caller stops when it has seen the end. `on_change` is called with `gone`
    when the server has gone, and with `back` when it answers again.
    """
    last_id: str | None = None
    pauses = transport.pauses()
    losses = 0
    while True:
        try:
            with transport.open_stream(path, params, last_id) as answer:
                if losses > 1 and on_change is not None:
                    on_change("back")
                losses = 0
                for event in read_events(answer):
                    last_id = event.id if event.id is not None else last_id
                    pauses = transport.pauses()
                    yield event
            lost: BaseException = ConnectionResetError("the stream ended early")
        except ConnectionLost as error:
            lost = error
        except ShoalError as error:
            if error.status != ServerUnreachable.status:
                raise
            lost = error
        losses += 1
        is_hopeless = transport.is_hopeless(lost)
        # A single cut may be a proxy's. The first retry is immediate, and only its failure is reported.
        if losses == 2 and not is_hopeless and on_change is not None:
            on_change("gone")
        if is_hopeless or not next(pauses, False):
            raise lost if isinstance(lost, ShoalError) else transport.unreachable(lost) from lost


def read_events(reply: HttpReply) -> Iterator[StreamEvent]:
    """Yield the events of one connection until it closes. An event that is cut off is not delivered."""
    kind, last_id = "message", None
    data: list[str] = []
    for raw in reply.lines():
        line = raw.decode("utf-8", "replace").rstrip("\r")
        if not line:
            if data:
                yield StreamEvent(kind, json.loads("\n".join(data)), last_id)
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            last_id = value
