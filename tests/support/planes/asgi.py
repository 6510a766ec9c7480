"""Speak ASGI to an application in this process: exact bytes in the path and headers, nothing normalised."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import anyio
import msgspec
from starlette.types import ASGIApp, Message, Scope

Headers = Iterable[tuple[str, str]]


class AsgiReply(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name.lower()), None)


class AsgiStream:
    """A response as it comes in. `close` is the client going away."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.is_complete = False
        self.client_gone = anyio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in message["headers"]]
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)

    def events(self) -> list[tuple[str, Any, str | None]]:
        """The whole events so far, as (kind, data, id)."""
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if "event" in fields:
                found.append((fields["event"], json.loads(fields["data"]), fields.get("id")))
        return found


def scope_of(
    method: str, target: str, headers: Headers, client: tuple[str, int] = ("127.0.0.1", 50000)
) -> Scope:
    """The scope an HTTP server makes of this request line and these headers."""
    path, _, query = target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers],
        "client": client,
        "server": ("127.0.0.1", 7462),
    }


async def run(app: ASGIApp, scope: Scope, body: bytes, stream: AsgiStream) -> None:
    """One request from beginning to end, the body in pieces of at most 64 KiB."""
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)] or [b""]

    async def receive() -> Message:
        if pieces:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        await stream.client_gone.wait()
        return {"type": "http.disconnect"}

    await app(scope, receive, stream.send)


async def request(
    app: ASGIApp,
    method: str,
    target: str,
    *,
    headers: Headers = (),
    body: bytes = b"",
    client: tuple[str, int] = ("127.0.0.1", 50000),
) -> AsgiReply:
    """A request that ends by itself."""
    stream = AsgiStream()
    await run(app, scope_of(method, target, headers, client), body, stream)
    assert stream.status is not None, "no response was sent"
    assert stream.is_complete, "the response was not completed"
    return AsgiReply(stream.status, stream.headers, stream.body)
