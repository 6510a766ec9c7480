"""Server-sent events that survive the server: a lost stream is taken up again where it broke."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from shoal.client.http1 import Answer
from shoal.client.transport import Lost, Params, Transport
from shoal.errors import ServerUnreachable, ShoalError

Reach = Literal["gone", "back"]


class StreamEvent(NamedTuple):
    """One event: its kind (`line`, `attempt`, `end`, ...), the decoded data and where it was."""

    kind: str
    data: Any
    id: str | None


def follow(
    transport: Transport,
    path: str,
    params: Params | None = None,
    on_change: Callable[[Reach], None] | None = None,
) -> Iterator[StreamEvent]:
    """Every event from now on, each once, over as many connections as it takes.

    Reconnects with Last-Event-ID while the transport's patience lasts, counted anew from each event.
    The caller stops when it has seen the end; the stream itself never ends by itself. `on_change` is called
    with `gone` when the server has gone, and with `back` when it answers again.
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
        except Lost as error:
            lost = error
        except ShoalError as error:
            if error.status != ServerUnreachable.status:
                raise
            lost = error
        losses += 1
        is_hopeless = transport.is_hopeless(lost)
        # A single cut may be a proxy's: the first try to go on comes at once, and only then it is news.
        if losses == 2 and not is_hopeless and on_change is not None:
            on_change("gone")
        if is_hopeless or not next(pauses, False):
            raise lost if isinstance(lost, ShoalError) else transport.unreachable(lost) from lost


def read_events(answer: Answer) -> Iterator[StreamEvent]:
    """The events of one connection, until it closes. An event cut off in the middle is not delivered."""
    kind, last_id = "message", None
    data: list[str] = []
    for raw in answer.lines():
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
