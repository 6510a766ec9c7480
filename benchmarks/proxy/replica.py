"""The same answers as an ASGI program: what a user's replica is, under uvicorn behind Shoal and in Ray Serve.

uvicorn benchmarks.proxy.replica:program
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from benchmarks.proxy.payload import ANSWER, EVERY_S, NUM_EVENTS, WANTS_EVENTS, event

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Program:
    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # of its life it wants to know nothing
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if WANTS_EVENTS in body:
            await _stream(send)
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": ANSWER})


async def _stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(NUM_EVENTS):
        await send({"type": "http.response.body", "body": event(), "more_body": True})
        await asyncio.sleep(EVERY_S)
    await send({"type": "http.response.body", "body": b""})


program = Program()
