"""The outermost layer: no code behind it is reached without a valid token, whatever its routes declare.

`HostCheck` knows the names this server answers to. A web page that points its own name at our address uses
none of them.

`Guard` is a pure ASGI wrapper around the whole application, so it covers mounts, raw routes, documentation
and sockets without knowing of them. The literal list `OPEN` below holds everything that is open.
"""

from __future__ import annotations

import ipaddress
import random
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.api.authenticate import AuthenticatedCaller, bearer
from shoal.api.call import ApiServices, Call
from shoal.api.http.bodies import MAX_IN_MEMORY, BodyMemory, limited
from shoal.api.http.limits import SCOPE_KEY, Bucket, account_of, is_machine
from shoal.api.http.problems import BadRequest, TooManyConnections, WrongHost, problem_response
from shoal.api.http.protocol import BODY_IS_HERE, CONNECTION
from shoal.connection_quota import peer_of
from shoal.errors import Bug, LimitReached, NotFound, ShoalError, TooLarge, Unauthenticated
from shoal.fair_threads import CALLER
from shoal.identity import Caller
from shoal.settings import LOOPBACK, Settings

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared only
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::[0-9]{1,5})?", re.ASCII)


class HostCheck:
    """Loopback names, the address we listen on, and the names the operator declared."""

    def __init__(self, settings: Settings) -> None:
        reached = {urlsplit(url).hostname or "" for url in settings.urls_for_supervisors}
        names = {*LOOPBACK, settings.host, *settings.allowed_hosts, *reached} - {""}
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        # Bound to every address: an IP literal cannot be rebound, so any of ours is valid.
        self._takes_addresses = settings.host in EVERYWHERE
        self._last = b""
        """The header that was last accepted. Clients of one server send the same header."""

    def check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise `WrongHost` unless there is exactly one Host header and it has a name of ours."""
        values = [value for name, value in headers if name == b"host"]
        if len(values) != 1:
            raise WrongHost("the request names no host, or more than one")
        if values[0] == self._last:
            return
        name = _name(values[0].decode("latin-1"))
        if name in self._names or (self._takes_addresses and _is_address(name)):
            self._last = values[0]
            return
        raise WrongHost(
            "this server does not answer to the host name of the request",
            hint="an operator can add it: `shoal up --allowed-hosts NAME`",
        )


def _name(host: str) -> str:
    """The name without port and brackets. Empty for a malformed host, so that it matches no name."""
    match = _HOST.fullmatch(host.lower())
    return (match[1] or match[2]).rstrip(".") if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


OPEN = frozenset({("GET", "/healthz")})
"""All paths that answer without a token. A test holds this list to the letter."""

UPLOADS = re.compile(rb"/v1/archives/[^/]+")
"""A PUT here streams to disk and counts by itself, against the project's own limit."""

BODILESS = ("GET", "HEAD")
MAX_PATH = 1024
MAX_QUERY = 8192
MAX_FAILURES = 100
FAILURES_PER_S = 1.0
CANONICAL = re.compile(rb"(?:/[A-Za-z0-9_~.@:-]+)+")
QUERY_TOKENS = frozenset({"token", "access_token", "api_key", "apikey", "authorization", "auth", "bearer"})

HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)

log = structlog.get_logger()
# A request's id tells requests apart and is no secret, so it does not ask the kernel each time.
_numbers = random.Random()  # noqa: S311


class Guard:
    """Refuse by default. Check host, then token, then the shape of the request, and only then call the
    application.
    """

    def __init__(self, app: ASGIApp, services: ApiServices) -> None:
        core = services.core
        self._app = app
        self._services = services
        self._monotonic = core.records.clock.monotonic
        self._hosts = HostCheck(core.settings)
        self._failures = Bucket(MAX_FAILURES, FAILURES_PER_S, self._monotonic)
        self._max_body = core.settings.limits.max_body_bytes
        self._bodies = BodyMemory(MAX_IN_MEMORY * self._max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            # The server has no WebSocket. Closing before accept answers the handshake with 403.
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{_numbers.getrandbits(96):024x}"
        outcome = _Outcome(send, request_id)
        has_body = _has_body(scope)
        try:
            await self._admit(scope, request_id, has_body=has_body)
            if has_body:
                is_here = scope.get(BODY_IS_HERE, False)
                receive = limited(receive, self._body_limit(scope), self._monotonic, is_here=is_here)
            with self._counted(scope, receive, has_body=has_body) as receive_counted:
                await self._app(scope, receive_counted, outcome.send)
        except ShoalError as error:
            await self._services.denials.note(scope, error, request_id)
            await outcome.answer(scope, receive, problem_response(error, request_id, should_close=has_body))
        except ClientDisconnect:
            return
        except Exception:
            if not outcome.has_started:
                log.exception("request.failed", request_id=request_id, method=scope["method"])
            answer = problem_response(Bug("unhandled"), request_id, should_close=True)
            await outcome.answer(scope, receive, answer)

    async def _admit(self, scope: Scope, request_id: str, *, has_body: bool) -> None:
        """Raise unless the request may pass, and put its `Call` into the scope."""
        self._hosts.check(scope["headers"])
        path = scope.get("raw_path") or scope["path"].encode()
        if (scope["method"], path.decode("latin-1")) in OPEN:
            _check_body(scope["method"], has_body=has_body)
            if scope["query_string"]:
                raise BadRequest("an open path takes no query")
            return
        token = bearer(scope["headers"])
        authenticated = await self._authenticate(scope, token)
        assert token is not None
        _sign(scope, authenticated.caller)
        CALLER.set(account_of(authenticated.caller))
        _check_body(scope["method"], has_body=has_body)
        _check_shape(scope, path, self._body_limit(scope))
        scope[SCOPE_KEY] = Call(self._services, authenticated, token, request_id)

    async def _authenticate(self, scope: Scope, token: str | None) -> AuthenticatedCaller:
        """Identify the caller. A wrong token costs its peer; a right one is served whatever that peer did
        before.

        So no client locks others out by guessing from the same machine, and guesses get 429 soon.
        """
        try:
            return await self._services.authenticator.identify(token or "")
        except Unauthenticated:
            if token is not None and not self._failures.take(peer_of(scope.get("client"))):
                raise LimitReached(
                    f"more than {MAX_FAILURES} wrong tokens came from your address",
                    hint="wait a minute, then sign in with `shoal login`",
                ) from None
            raise

    def _counted(self, scope: Scope, receive: Receive, *, has_body: bool) -> AbstractContextManager[Receive]:
        """Wrap `receive` to count a body in memory against its sender."""
        call = scope.get(SCOPE_KEY)
        if call is None or not has_body or self._body_limit(scope) is None:
            return nullcontext(receive)
        return self._bodies.counted(account_of(call.caller), receive)

    def _body_limit(self, scope: Scope) -> int | None:
        if scope["method"] == "PUT" and UPLOADS.fullmatch(scope.get("raw_path") or b""):
            return None
        return self._max_body


class _Outcome:
    """Adds our headers to every answer, and records whether an answer was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = (*HEADERS, (b"x-request-id", request_id.encode()))
        self.has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def answer(self, scope: Scope, receive: Receive, response: Response) -> None:
        if not self.has_started:
            await response(scope, receive, self.send)


def _sign(scope: Scope, caller: Caller) -> None:
    """Count the request's connection against its caller, if it is one of ours."""
    connection = scope.get(CONNECTION)
    if connection is not None and not connection.sign(account_of(caller), is_machine=is_machine(caller)):
        raise TooManyConnections(
            "you, or all callers together, hold as many connections as this server allows",
            hint="close some and try again",
        )


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )


def _check_body(method: str, *, has_body: bool) -> None:
    if has_body and method in BODILESS:
        raise BadRequest(f"a {method} request has no body on this server", hint="send it without one")


def _check_shape(scope: Scope, path: bytes, max_body: int | None) -> None:
    """Refuse a request that two readers could understand differently."""
    if len(path) > MAX_PATH or not CANONICAL.fullmatch(path) or {b".", b".."} & set(path.split(b"/")):
        raise NotFound("no such route", hint="routes are listed in /openapi.json")
    query: bytes = scope.get("query_string", b"")
    if len(query) > MAX_QUERY:
        raise BadRequest(f"the query has {len(query)} bytes; at most {MAX_QUERY} are read")
    if query and _query_names(query) & QUERY_TOKENS:
        raise BadRequest(
            "a token in the address ends up in logs and histories, so this server refuses it",
            hint="send the header `Authorization: Bearer TOKEN`, and revoke that token",
        )
    for name, value in scope["headers"]:
        if name != b"content-length":
            continue
        if not value.isdigit() or len(value) > 18:
            raise BadRequest("Content-Length is not a number of bytes")
        if max_body is not None and int(value) > max_body:
            raise TooLarge(f"the body has {int(value)} bytes; the limit is {max_body}")


def _query_names(query: bytes) -> set[str]:
    try:
        pairs: list[tuple[Any, Any]] = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, max_num_fields=100, errors="strict"
        )
    except ValueError as error:
        raise BadRequest("the query is not ASCII with UTF-8 escapes, or has over 100 fields") from error
    if any("\0" in name or "\0" in value for name, value in pairs):
        raise BadRequest("the query holds a NUL character")
    return {name.lower() for name, _ in pairs}
