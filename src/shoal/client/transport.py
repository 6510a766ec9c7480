"""One connection to a control plane: keep-alive, TLS, idempotent retries, problem documents as errors.

Every mutation carries an Idempotency-Key, the same over its retries, so repeating a call whose answer
was lost is always safe. Not for use by two threads at once.
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
from shoal.client.credentials import Endpoint
from shoal.client.http1 import Answer, BadAnswer, Connection
from shoal.client.problems import error_from
from shoal.client.trust import refuse_strangers
from shoal.errors import Deposed, ServerUnreachable, ShoalError, SpecError, StandingBy, Unauthenticated
from shoal.loopback import Stranger

TIMEOUT_S = 60.0
PASS_OVER_S = 15.0
"""For the first answer where there are others to ask: who is frozen takes connections and says nothing."""
BUSY_PATIENCE_S = 10.0
"""How long a 503 is asked again: longer, and the person would rather be told."""
SAFE = ("GET", "HEAD")
ELSEWHERE = {
    "SHOAL_URL": "check the address, or `unset SHOAL_URL`",
    "shoal login": "check the address, or talk to this machine's own server: `shoal login local`",
    "": "check the address",
}
"""What to type when a server that is not this home's does not answer, by what chose it."""

Params = Mapping[str, Any]
Lost = OSError
"""The connection or its answer; whether the request was heard is not known."""
LEADS_NOT = (StandingBy, Deposed)
"""What a control plane says that does not lead: nothing was done. Another one of the cluster may."""


class Elsewhere(ConnectionResetError):
    """Somebody is there, and says that another control plane leads."""


def backoff() -> Iterator[float]:
    """Pauses before each further try: none first (a keep-alive that the server closed), then growing."""
    yield 0.0
    pause = 0.1
    while True:
        yield pause
        pause = min(pause * 1.6, 2.0)


def path_of(*parts: str) -> str:
    """`/v1/...` with every part escaped, so that a name can never become another path."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class Transport:
    """`locate` is asked again after every loss: a restarted control plane may have another address."""

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
        self._connection: Connection | None = None
        self._endpoint: Endpoint | None = None
        self._has_been_reached = False
        self._has_been_served = False
        """Something else was answered than that another one leads."""
        self._turn = 0
        """Grows with every control plane that was asked in vain: the next one is asked then."""
        self._num_lost = 0
        """How many were, since the last answer."""
        self._num_others = 0
        self.listener_uid: int | None = None
        """Who took the last connection, where that is a user of this machine."""

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = self._choose()
        return self._endpoint

    def _choose(self) -> Endpoint:
        """Of the control planes that are named, the one whose turn it is."""
        first = self._locate()
        self._num_others = len(first.others)
        return (first, *first.others)[self._turn % (1 + len(first.others))]

    def _ask_the_next(self) -> None:
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
        """The decoded answer, or the error it stands for. Blocks at most about `patience_s` on a lost server.

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
        status, data = self._until_answered(method, _target(path, params), body, headers)
        if status >= 400:
            raise _refusal(status, data, self.endpoint)
        try:
            return json.loads(data) if data else None
        except ValueError as error:
            raise error_from(status, data, self.endpoint.url) from error

    @contextmanager
    def open_stream(self, path: str, params: Params | None, last_event_id: str | None) -> Iterator[Answer]:
        """One connection of its own to an event stream. Raises `Lost` as it is: the reader retries."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        self._endpoint = self._choose()
        try:
            with closing(self._connect(self._endpoint)) as connection:
                connection.request("GET", _target(path, params), self._with_identity(headers))
                answer = connection.answer()
                if answer.status >= 400:
                    raise _refusal(answer.status, answer.read(), self._endpoint)
                self._heard()
                yield answer
        except Lost:
            self._ask_the_next()
            raise
        except LEADS_NOT as error:
            if not self._num_others:
                raise
            self._ask_the_next()
            self._has_been_reached = True
            raise Elsewhere(error.message) from error

    def _heard(self) -> None:
        self._has_been_reached = self._has_been_served = True
        self._num_lost = 0

    def pauses(self, *, patience_s: float | None = None) -> Iterator[bool]:
        """Each step waits before one more try; it is over when patience, counted from the first step, is."""
        deadline = self._monotonic() + (self._patience_s if patience_s is None else patience_s)
        for pause in backoff():
            if self._monotonic() + pause > deadline:
                return
            self._sleep(pause)
            yield True

    def unreachable(self, error: BaseException) -> ServerUnreachable:
        """`error` as a sentence for people."""
        url = self._endpoint.url if self._endpoint else "the server"
        if (distrust := _distrust(error)) is not None:
            return ServerUnreachable(
                f"cannot trust {url}: {distrust}",
                hint="name the authority's certificate: `export SSL_CERT_FILE=/path/to/ca.pem`",
            )
        if isinstance(error, Stranger):
            return ServerUnreachable(f"no token was sent to {url}: {error}", hint=error.hint)
        told = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if self._endpoint and self._endpoint.is_local:
            return ServerUnreachable(f"no answer from {url}: {told}", hint="start it with `shoal up`")
        by = self._endpoint.chosen_by if self._endpoint else ""
        why = f" (chosen by {by})" if by else ""
        return ServerUnreachable(f"no answer from {url}{why}: {told}", hint=ELSEWHERE[by])

    def is_hopeless(self, error: BaseException) -> bool:
        """A server never reached that takes no connection is not there: waiting helps nobody."""
        if _distrust(error) is not None:
            return True
        somebody_is_there = isinstance(error, ConnectionResetError | BrokenPipeError | BadAnswer)
        if self._has_been_reached or somebody_is_there:
            return False
        return self._num_lost > self._num_others

    def _until_answered(
        self, method: str, target: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        pauses, busy_pauses = self.pauses(), self.pauses(patience_s=BUSY_PATIENCE_S)
        while True:
            try:
                answer = self._once(method, target, body, headers)
            except Lost as error:
                self._ask_the_next()
                if self.is_hopeless(error) or not next(pauses, False):
                    raise self.unreachable(error) from error
                self._endpoint = self._choose()
                continue
            if answer[0] != 503:
                self._heard()
                return answer
            if _leads_not(*answer, self.endpoint.url):
                if not self._num_others and not self._has_been_served:
                    return answer
                self._ask_the_next()
                if not next(pauses, False):
                    return answer
                self._endpoint = self._choose()
            elif not next(busy_pauses, False):
                return answer

    def _once(self, method: str, target: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is None:
            endpoint = self.endpoint
            is_first = 0 < self._num_others >= self._num_lost
            self._connection = self._connect(endpoint, PASS_OVER_S if is_first else TIMEOUT_S)
        if hasattr(body, "seek"):
            body.seek(0)
        try:
            self._connection.request(method, target, self._with_identity(headers), body)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses an upload answers before it has read it all: the answer says why.
            if not hasattr(body, "seek"):
                raise
        answer = self._connection.answer()
        data = answer.read()
        self._has_been_reached = True
        if answer.is_last:
            self.close()
        return answer.status, data

    def _with_identity(self, headers: dict[str, str]) -> dict[str, str]:
        token = self.endpoint.token
        identity = {"User-Agent": f"shoal/{__version__}"}
        if token:
            identity["Authorization"] = f"Bearer {token}"
        return {**headers, **identity}

    def _connect(self, endpoint: Endpoint, timeout_s: float = TIMEOUT_S) -> Connection:
        parts, port = _address(endpoint.url)
        host = parts.hostname or ""
        # As bytes: text would be encoded by IDNA's codec, whose tables take 3 ms to load.
        place = host.encode() if host.isascii() else host
        link = socket.create_connection((place, port), timeout=timeout_s)  # type: ignore[arg-type]
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https":
                link = importlib.import_module("shoal.client.tls").wrap(link, host, endpoint.ca_file)
            else:
                self.listener_uid = refuse_strangers(link, endpoint)
        except BaseException:
            link.close()
            raise
        return Connection(link, parts.netloc.rpartition("@")[2])


def _address(url: str) -> tuple[SplitResult, int]:
    """The address and its port. Raises `SpecError` for what is none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts, port
    except ValueError:
        pass  # a port that is no number
    raise SpecError(
        f"server address `{url}` is not http://HOST[:PORT] or https://HOST[:PORT]",
        hint="name it again: `shoal login https://HOST:PORT`",
    )


def _refusal(status: int, data: bytes, endpoint: Endpoint) -> ShoalError:
    """What the answer stands for. Who is not known by SHOAL_TOKEN hears of that alone: a token that is
    saved was not tried, and may be good.
    """
    error = error_from(status, data, endpoint.url)
    from_env = os.environ.get("SHOAL_TOKEN")
    if isinstance(error, Unauthenticated) and from_env and endpoint.token == from_env:
        error.hint = (
            "SHOAL_TOKEN is set and was refused: `unset SHOAL_TOKEN` uses what `shoal login` saved, "
            "`shoal token create` makes another where you are known"
        )
    return error


def _leads_not(status: int, data: bytes, url: str) -> bool:
    return isinstance(error_from(status, data, url), LEADS_NOT)


def _distrust(error: BaseException) -> str | None:
    """Why a certificate was not believed. By its attribute: the error's class would load `ssl`."""
    return getattr(error, "verify_message", None)


def _target(path: str, params: Params | None) -> str:
    given = [(k, v) for k, v in (params or {}).items() if v is not None and v != ()]
    return f"{path}?{urlencode(given, doseq=True)}" if given else path
