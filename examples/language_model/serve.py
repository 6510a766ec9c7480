"""The model of this folder behind OpenAI's interface: batches, streams, honest errors. See `serve.yaml`.

The model knows numbers and nothing else: to `3 5 7` it answers ` 9 11 13`. Its weights are those of the
checkpoint that `model` names in `serve.yaml`; by hand: `SHOAL_MODEL_DIR=checkpoints python serve.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import group
import torch
import uvicorn
from model import LanguageModel, Shape
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.runtime import load_model

NAME = os.environ.get("MODEL_NAME", "counting")
SECRET = os.environ.get("SHOAL_REPLICA_KEY", "")
PACE_S = float(os.environ.get("PACE_S", "0"))
"""Rest after each token: so small a model has answered before one can look."""
SHAPE = Shape()
BATCH, WAITING = 16, 64
MAX_BODY = 1 << 20
STOPS = 4
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""What would change the answer and is not done here is refused, not passed over."""


class Refused(Exception):
    """An error as OpenAI's clients expect it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(kw_only=True, eq=False)
class Ask:
    """One request: what is asked for, and what was made of it so far."""

    tokens: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    random: torch.Generator
    news: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    num_prompt: int = 0
    num_made: int = 0
    num_read: int = 0
    ended: str = "length"
    is_left: bool = False
    """Nobody waits for it any more."""


class Engine(threading.Thread):
    """The only thread that computes: one step of the model for all who run, who may come and go between."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        super().__init__(name="engine", daemon=True)
        self.loaded = ""
        """Which weights; empty: none yet."""
        self.has_failed = False
        self.num_running = self.num_made = 0
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Ask] = deque()
        self._news = threading.Condition()

    def add(self, ask: Ask) -> None:
        with self._news:
            if not self.loaded:
                raise Refused(503, "the model is being loaded; try again soon", code="loading")
            if len(self._waiting) >= WAITING:
                raise Refused(503, f"{WAITING} requests wait already; try again soon", code="overloaded")
            self._waiting.append(ask)
            self._news.notify()

    def run(self) -> None:
        try:
            device = group.device()
            model = LanguageModel(SHAPE).to(device).eval()
            step = load_model(model)
            self.loaded = f"step-{step}-{group.fingerprint(model)}"
            print(f"{NAME}: {self.loaded} on {device}", flush=True)
            running: list[Ask] = []
            while True:
                running = self._next(running)
                self._advance(model, running, device)
        except Exception:  # noqa: BLE001 - whatever it was, nobody can be answered any more
            traceback.print_exc()
            self.has_failed = True
            self._on_failure()

    def _next(self, running: list[Ask]) -> list[Ask]:
        """Who is in the next step. Waits until there is anybody."""
        with self._news:
            while True:
                going = [ask for ask in running if not ask.is_left and ask.num_made < ask.max_tokens]
                while self._waiting and len(going) < BATCH:
                    ask = self._waiting.popleft()
                    going += [] if ask.is_left else [ask]
                self.num_running = len(going)
                if going:
                    return going
                self._news.wait()

    @torch.inference_mode()
    def _advance(self, model: LanguageModel, running: list[Ask], device: torch.device) -> None:
        """One token more for each. Nobody looks ahead, so what fills up the shorter ones changes nothing.

        All of a text is computed anew for each token: of 32 at most, that is cheaper than to keep it.
        """
        batch = torch.zeros(len(running), max(len(ask.tokens) for ask in running), dtype=torch.long)
        for row, ask in enumerate(running):
            batch[row, : len(ask.tokens)] = torch.tensor(ask.tokens)
        scores = model(batch.to(device)).float().cpu()
        for row, ask in enumerate(running):
            token = choose(scores[row, len(ask.tokens) - 1], ask)
            ask.tokens.append(token)
            ask.num_made += 1
            self.num_made += 1
            with contextlib.suppress(RuntimeError):  # the server is gone
                self._loop.call_soon_threadsafe(ask.news.put_nowait, token)
        time.sleep(PACE_S)


def choose(scores: torch.Tensor, ask: Ask) -> int:
    if ask.temperature == 0:
        return int(scores.argmax())
    odds, tokens = torch.softmax(scores / ask.temperature, dim=0).sort(descending=True)
    odds[odds.cumsum(0) - odds > ask.top_p] = 0  # the likeliest always stays
    return int(tokens[torch.multinomial(odds, 1, generator=ask.random)])


async def written(engine: Engine, ask: Ask) -> AsyncGenerator[str]:
    """The text as it is made, held back where it may become a stop. Whoever leaves, leaves the engine too."""
    held = ""
    engine.add(ask)
    try:
        for _ in range(ask.max_tokens):
            held += f" {await ask.news.get()}"
            ask.num_read += 1
            found = [at for stop in ask.stop if (at := held.find(stop)) >= 0]
            if found:
                ask.ended = "stop"
                yield held[: min(found)]
                return
            safe = len(held) - max((begun(held, stop) for stop in ask.stop), default=0)
            if safe:
                yield held[:safe]
            held = held[safe:]
        if held:
            yield held
    finally:
        ask.is_left = True


def begun(text: str, stop: str) -> int:
    """How many of the last characters may be the first ones of a stop."""
    return next(size for size in range(len(stop) - 1, -1, -1) if text.endswith(stop[:size]))


# From a request's body to an `Ask`.


def read_ask(body: dict[str, Any], prompt: list[int], max_tokens: int | None, usual: int) -> Ask:
    for name, allowed in ONLY.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise Refused(400, f"`{name}` of {json.dumps(body[name])} is not supported here", name)
    if body.get("model") != NAME:
        raise Refused(
            404, f"there is no model {body.get('model')!r}; this is `{NAME}`", "model", "model_not_found"
        )
    room = SHAPE.context - len(prompt) + 1  # the last token made is not read again
    if len(prompt) > SHAPE.context or (max_tokens or 0) > room:
        told = f"{len(prompt)} tokens and {max_tokens or 1} more do not fit into a context of {SHAPE.context}"
        raise Refused(400, told, "max_tokens", "context_length_exceeded")
    seed = number(body, "seed", -(2**63), 2**63 - 1, None)
    random = torch.Generator()
    if seed is None:
        random.seed()
    else:
        random.manual_seed(int(seed))
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > STOPS
        or not all(isinstance(one, str) and one for one in stops)
    ):
        raise Refused(400, f"`stop` is a text or up to {STOPS} of them", "stop")
    return Ask(
        tokens=prompt,
        num_prompt=len(prompt),
        max_tokens=min(usual, room) if max_tokens is None else max_tokens,
        temperature=number(body, "temperature", 0, 2, 1.0),
        top_p=number(body, "top_p", 0, 1, 1.0),
        stop=tuple(stops),
        random=random,
    )


def number(body: dict[str, Any], name: str, low: float, high: float, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f"`{name}` is a number from {low} to {high}, not {json.dumps(value)}", name)
    return value


def whole(body: dict[str, Any], name: str) -> int | None:
    value = number(body, name, 1, 10**9, None)
    if isinstance(value, float):
        raise Refused(400, f"`{name}` is a whole number, not {value}", name)
    return value


def tokens_of(value: object, name: str) -> list[int]:
    """A text of numbers, or the numbers themselves."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    are_tokens = isinstance(value, list) and all(type(one) is int for one in value)
    words = [str(one) for one in value] if are_tokens else value.split() if isinstance(value, str) else []
    if not words:
        raise Refused(400, f"`{name}` is one text such as `3 5 7`, or its tokens", name)
    known = {str(token): token for token in range(SHAPE.vocabulary)}
    strange = next((word for word in words if word not in known), None)
    if strange is not None:
        told = f"{strange!r} is not in the vocabulary: numbers from 0 to {SHAPE.vocabulary - 1}"
        raise Refused(400, told, name)
    return [known[word] for word in words]


def said(messages: object) -> list[int]:
    """All that was said, one after the other."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise Refused(400, "`messages` is a list of messages", "messages")
    contents = [one.get("content") for one in messages]
    if not all(isinstance(one, str) for one in contents):
        raise Refused(400, "the `content` of every message is a text here", "messages")
    return tokens_of(" ".join(contents), "messages")


# Answers.


async def complete(request: Request) -> Response:
    body = await read_body(request)
    ask = read_ask(body, tokens_of(body.get("prompt"), "prompt"), whole(body, "max_tokens"), usual=16)
    return await respond(request, body, ask, is_chat=False)


async def chat(request: Request) -> Response:
    body = await read_body(request)
    most = whole(body, "max_completion_tokens") or whole(body, "max_tokens")
    ask = read_ask(body, said(body.get("messages")), most, usual=SHAPE.context)
    return await respond(request, body, ask, is_chat=True)


async def read_body(request: Request) -> dict[str, Any]:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise Refused(413, f"the body is larger than {MAX_BODY} bytes")
    try:
        body = json.loads(data)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body is not an object")
    return body


async def respond(request: Request, body: dict[str, Any], ask: Ask, *, is_chat: bool) -> Response:
    engine: Engine = request.app.state.engine
    text = written(engine, ask)
    first = await anext(text, "")  # who cannot be taken is told so with a status
    head = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": NAME,
        "system_fingerprint": engine.loaded,
    }
    if body.get("stream"):
        has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        stream = events(head, ask, first, text, is_chat=is_chat, has_usage=has_usage)
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
    pieces = [first]
    async with contextlib.aclosing(text):
        async for piece in text:
            pieces.append(piece)
            if await request.is_disconnected():
                break
    told = "".join(pieces)
    content = {"message": {"role": "assistant", "content": told}} if is_chat else {"text": told}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": ask.ended}
    kind = "chat.completion" if is_chat else "text_completion"
    return JSONResponse({**head, "object": kind, "choices": [choice], "usage": usage(ask)})


async def events(
    head: dict[str, Any], ask: Ask, first: str, text: AsyncGenerator[str], *, is_chat: bool, has_usage: bool
) -> AsyncIterator[str]:
    """Cancelled when the client leaves, and with it what makes the text."""
    head = {**head, "object": "chat.completion.chunk" if is_chat else "text_completion"}

    def event(piece: str, ended: str | None = None, role: str | None = None) -> str:
        delta = {"content": piece} | ({"role": role} if role else {})
        part = {"delta": delta} if is_chat else {"text": piece}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": ended}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    async with contextlib.aclosing(text):
        yield event(first, role="assistant")
        async for piece in text:
            yield event(piece)
    yield event("", ask.ended)
    if has_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(ask)})}\n\n"
    yield "data: [DONE]\n\n"


def usage(ask: Ask) -> dict[str, int]:
    total = ask.num_prompt + ask.num_read
    return {"prompt_tokens": ask.num_prompt, "completion_tokens": ask.num_read, "total_tokens": total}


async def models(request: Request) -> Response:
    one = {"id": NAME, "object": "model", "created": request.app.state.began, "owned_by": "shoal"}
    return JSONResponse({"object": "list", "data": [one]})


async def health(request: Request) -> Response:
    engine: Engine = request.app.state.engine
    told = {"loaded": engine.loaded, "running": engine.num_running, "tokens": engine.num_made}
    return JSONResponse(told, 200 if engine.loaded else 503)


async def refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refused(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, Refused)
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(error.body, error.status, headers)


class Gate:
    """Lets in what came through Shoal's data plane, or anybody where there is none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"x-shoal-secret", b"")
        if scope["type"] == "http" and SECRET and not hmac.compare_digest(given, SECRET.encode()):
            refusal = Refused(403, "call it by its address at the data plane: `shoal services` prints it")
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    app.state.engine, app.state.began = Engine(app.state.stop), int(time.time())
    app.state.engine.start()
    yield


def main() -> int:
    """Serve until SIGTERM; who is being answered then is answered to the end."""
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        exception_handlers={Refused: refuse, HTTPException: refuse},
        lifespan=lifespan,
    )
    host, port = os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8000"))
    server = uvicorn.Server(
        uvicorn.Config(Gate(app), host=host, port=port, access_log=False, timeout_graceful_shutdown=25)
    )
    app.state.stop = lambda: setattr(server, "should_exit", True)
    server.run()
    return int(app.state.engine.has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
