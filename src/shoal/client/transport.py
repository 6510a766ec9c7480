"""One connection to a control plane: keep-alive, TLS, idempotent retries, problem documents as errors.

Every mutation carries an Idempotency-Key, the same for its retries, so repeating a call whose reply was lost
is always safe. Not for use by two threads at once.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import IO, Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from shoal import __version__
from shoal.client.credentials import Endpoint, refuse_strangers
from shoal.client.http1 import BadHttpReply, HttpConnection, HttpReply, error_from
from shoal.errors import Deposed, ServerUnreachable, ShoalError, SpecError, StandingBy, Unauthenticated
from shoal.local_sockets import UnexpectedListener

TIMEOUT_S = 60.0
PASS_OVER_S = 15.0
"""Limit for the first reply if there are other servers: a frozen process accepts connections and is
silent."""
BUSY_PATIENCE_S = 10.0
"""How long a 503 is retried. After that, an error helps the user more."""
SAFE = ("GET", "HEAD")
ADDRESS_HINTS = {
    "SHOAL_URL": "check the address, or `unset SHOAL_URL`",
    "shoal login": "check the address, or talk to this machine's own server: `shoal login local`",
    "": "check the address",
}
"""What to type when a server that is not this home's does not answer, by what chose it."""

Params = Mapping[str, Any]
ConnectionLost = OSError
"""The connection or its reply is lost. Whether the server acted on the request is unknown."""
NOT_LEADER_ERRORS = (StandingBy, Deposed)
"""Errors of a control plane that is not the leader. It did nothing; another one of the cluster may lead."""


class NotTheLeader(ConnectionResetError):
    """A server answers that another control plane leads."""


def backoff() -> Iterator[float]:
    """Yield pauses before retries: 0 first (for a keep-alive that the server closed), then growing."""
    yield 0.0
    pause = 0.1
    while True:
        yield pause
        pause = min(pause * 1.6, 2.0)


def path_of(*parts: str) -> str:
    """Return `/v1/...` with every part escaped, so that a name can never become another path."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class Transport:
    """`locate` is called again after every loss, because a restarted control plane may have
    another address.
    """

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        *,
        patience_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._locate = locate
        self._patience_s = patience_s
        self._sleep = sleep
        self._monotonic = monotonic
        self._connection: HttpConnection | None = None
        self._endpoint: Endpoint | None = None
        self._has_been_reached = False
        self._has_been_served = False
        """A server has sent a reply other than that another one leads."""
        self._turn = 0
        """Grows with every control plane that failed to answer; the next one is tried then."""
        self._num_lost = 0
        """Number of such failures since the last reply."""
        self._num_others = 0
        self.listener_uid: int | None = None
        """User id of the listener of the last connection, if it is on this machine."""

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = self._choose()
        return self._endpoint

    def _choose(self) -> Endpoint:
        """Return the control plane whose turn it is."""
        first = self._locate()
        self._num_others = len(first.others)
        return (first, *first.others)[self._turn % (1 + len(first.others))]

    def _switch_server(self) -> None:
        self.close()
        self._turn += 1
        self._num_lost += 1

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        json_body: Any = None,
        file: IO[bytes] | None = None,
        key: str | None = None,
    ) -> Any:
        """Return the decoded reply, or raise its error. Blocks at most about `patience_s` on a lost server.

        A mutation that raises `ServerUnreachable` may have happened; calling with the same `key` finds out.
        """
        headers = {"Accept": "application/json"}
        body: Any = None
        if method not in SAFE:
            headers["Idempotency-Key"] = key or os.urandom(16).hex()
        if json_body is not None:
            body = json.dumps(json_body).encode()
            headers["Content-Type"] = "application/json"
        elif file is not None:
            body = file
            headers["Content-Type"] = "application/x-tar"
            headers["Content-Length"] = str(file.seek(0, 2))
        status, data = self._send_with_retries(method, _target(path, params), body, headers)
        if status >= 400:
            raise _refusal(status, data, self.endpoint)
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise error_from(status, data, self.endpoint.url) from error

    @contextmanager
    def open_stream(self, path: str, params: Params | None, last_event_id: str | None) -> Iterator[HttpReply]:
        """Open a separate connection to an event stream. Raises `ConnectionLost` unchanged: the reader
        retries.
        """
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        self._endpoint = self._choose()
        try:
            with closing(self._connect(self._endpoint)) as connection:
                connection.request("GET", _target(path, params), self._with_identity(headers))
                reply = connection.read_reply()
                if reply.status >= 400:
                    raise _refusal(reply.status, reply.read(), self._endpoint)
                self._count_reply()
                yield reply
        except ConnectionLost:
            self._switch_server()
            raise
        except NOT_LEADER_ERRORS as error:
            if not self._num_others:
                raise
            self._switch_server()
            self._has_been_reached = True
            raise NotTheLeader(error.message) from error

    def _count_reply(self) -> None:
        self._has_been_reached = self._has_been_served = True
        self._num_lost = 0

    def pauses(self, *, patience_s: float | None = None) -> Iterator[bool]:
        """Wait before one more try at each step. It ends when the patience, counted from the first step, is
        over.
        """
        deadline = self._monotonic() + (self._patience_s if patience_s is None else patience_s)
        for pause in backoff():
            if self._monotonic() + pause > deadline:
                return
            self._sleep(pause)
            yield True

    def unreachable(self, error: BaseException) -> ServerUnreachable:
        """Return `error` as an error with a sentence for people."""
        url = self._endpoint.url if self._endpoint else "the server"
        if (distrust := _certificate_problem(error)) is not None:
            return ServerUnreachable(
                f"cannot trust {url}: {distrust}",
                hint="name the authority's certificate: `export SSL_CERT_FILE=/path/to/ca.pem`",
            )
        if isinstance(error, UnexpectedListener):
            return ServerUnreachable(f"no token was sent to {url}: {error}", hint=error.hint)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if self._endpoint and self._endpoint.is_local:
            return ServerUnreachable(f"no answer from {url}: {reason}", hint="start it with `shoal up`")
        by = self._endpoint.chosen_by if self._endpoint else ""
        why = f" (chosen by {by})" if by else ""
        return ServerUnreachable(f"no answer from {url}{why}: {reason}", hint=ADDRESS_HINTS[by])

    def is_hopeless(self, error: BaseException) -> bool:
        """Return whether retries are useless: no connection to this server has ever succeeded."""
        if _certificate_problem(error) is not None:
            return True
        is_listening = isinstance(error, ConnectionResetError | BrokenPipeError | BadHttpReply)
        if self._has_been_reached or is_listening:
            return False
        return self._num_lost > self._num_others

    def _send_with_retries(
        self, method: str, target: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        pauses, busy_pauses = self.pauses(), self.pauses(patience_s=BUSY_PATIENCE_S)
        while True:
            try:
                reply = self._send_once(method, target, body, headers)
            except ConnectionLost as error:
                self._switch_server()
                if self.is_hopeless(error) or not next(pauses, False):
                    raise self.unreachable(error) from error
                self._endpoint = self._choose()
                continue
            if reply[0] != 503:
                self._count_reply()
                return reply
            if _is_not_leader(*reply, self.endpoint.url):
                if not self._num_others and not self._has_been_served:
                    return reply
                self._switch_server()
                if not next(pauses, False):
                    return reply
                self._endpoint = self._choose()
            elif not next(busy_pauses, False):
                return reply

    def _send_once(self, method: str, target: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is None:
            endpoint = self.endpoint
            is_first = 0 < self._num_others >= self._num_lost
            self._connection = self._connect(endpoint, PASS_OVER_S if is_first else TIMEOUT_S)
        if hasattr(body, "seek"):
            body.seek(0)
        try:
            self._connection.request(method, target, self._with_identity(headers), body)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses an upload answers before it has read it all, and the reply says why.
            if not hasattr(body, "seek"):
                raise
        reply = self._connection.read_reply()
        data = reply.read()
        self._has_been_reached = True
        if reply.is_last:
            self.close()
        return reply.status, data

    def _with_identity(self, headers: dict[str, str]) -> dict[str, str]:
        token = self.endpoint.token
        identity = {"User-Agent": f"shoal/{__version__}"}
        if token:
            identity["Authorization"] = f"Bearer {token}"
        return {**headers, **identity}

    def _connect(self, endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> HttpConnection:
        parts, port = _address(endpoint.url)
        host = parts.hostname or ""
        # As bytes: text would go through the IDNA codec, whose tables take 3 ms to load.
        target = host.encode() if host.isascii() else host
        link = socket.create_connection((target, port), timeout=timeout_s)  # type: ignore[arg-type]
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                link = importlib.import_module("shoal.client.tls").wrap(link, host, endpoint.ca_file)
            else:
                self.listener_uid = refuse_strangers(link, endpoint)
        except BaseException:
            link.close()
            raise
        return HttpConnection(link, parts.netloc.rpartition("@")[2])


def _address(url: str) -> tuple[SplitResult, int]:
    """Return the parsed address and its port. Raises `SpecError` if it is invalid."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, port
    except ValueError:
        pass  # the port is not a number
    raise SpecError(
        f"server address `{url}` is not http://HOST[:PORT] or https://HOST[:PORT]",
        hint="name it again: `shoal login https://HOST:PORT`",
    )


def _refusal(status: int, data: bytes, endpoint: Endpoint) -> ShoalError:
    """Return the reply's error. If SHOAL_TOKEN was refused, the hint names only that: a saved token was not
    tried, and may be valid.
    """
    error = error_from(status, data, endpoint.url)
    from_env = os.environ.get("SHOAL_TOKEN")
    if isinstance(error, Unauthenticated) and from_env and endpoint.token == from_env:
        error.hint = (
            "SHOAL_TOKEN is set and was refused: `unset SHOAL_TOKEN` uses what `shoal login` saved, "
            "`shoal token create` makes another where you are known"
        )
    return error


def _is_not_leader(status: int, data: bytes, url: str) -> bool:
    return isinstance(error_from(status, data, url), NOT_LEADER_ERRORS)


def _certificate_problem(error: BaseException) -> str | None:
    """Return why a certificate was refused. By attribute, because the error's class would import `ssl`."""
    return getattr(error, "verify_message", None)


def _target(path: str, params: Params | None) -> str:
    pairs = [(k, v) for k, v in (params or {}).items() if v is not None and v != ()]
    return f"{path}?{urlencode(pairs, doseq=True)}" if pairs else path
