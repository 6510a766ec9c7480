"""A keeper's way to the control planes over TLS: fetch the order, hand in logs and the outcome.

Only who shows a certificate of the cluster's own authority is asked. Addresses are tried in turn: a control
plane that is away, or stands by for another, is passed over.
"""

from __future__ import annotations

import http.client
import os
import ssl
from typing import TypeVar

import msgspec

from shoal.proof import sign_for
from shoal.runtime.addresses import MAX_KNOWN
from shoal.runtime.line import MAX_HEAD, Line
from shoal.wire import KEEPER_ASK_S, KEEPER_WAIT_S, Assignment, Dispatch, DispatchAnswer, Fetch

ASK_S, LONG_S = KEEPER_ASK_S, KEEPER_WAIT_S
"""Until a living process has let us in, or has answered a few words; and for all that is longer."""
PIECE = 1 << 20
MAX_ANSWER = 8 << 20
REFUSALS = (http.client.FORBIDDEN, http.client.CONFLICT, http.client.UNAUTHORIZED)
"""Words of a control plane that leads and knows. All else (404 by one with another home, 5xx) is silence."""


T = TypeVar("T")


class Refused(Exception):
    """A control plane has said no, and will again. `is_stale`: another has what was ours."""

    def __init__(self, told: str, *, is_stale: bool = False) -> None:
        super().__init__(told)
        self.is_stale = is_stale


class Silent(Exception):
    """Nobody could be asked, or had an answer: says nothing about what happened."""


class DeskClient:
    """For one share. Blocking; one thread."""

    def __init__(self, urls: tuple[str, ...], ca: str) -> None:
        self._urls = list(urls)
        self._trust = ssl.create_default_context(cadata=ca)
        self._trust.minimum_version = ssl.TLSVersion.TLSv1_2

    def fetch(self, ticket: str, asked: Fetch) -> Assignment:
        """The order, for this process alone. `Refused`: never."""
        told = self._post("/v1/desk/fetch", ticket, msgspec.json.encode(asked), "application/json")
        return _decoded(told, Assignment)

    def fetch_archive(self, ticket: str, asked: Fetch, path: str) -> None:
        """The snapshot, as a file at `path`. Its digest is for the supervisor to check."""
        self._post("/v1/desk/archive", ticket, msgspec.json.encode(asked), "application/json", path)

    def tell(self, key: str, told: Dispatch, piece: bytes) -> DispatchAnswer:
        """Hand in a piece of the log, if there is one, and what else there is to say."""
        body = msgspec.json.encode(told) + b"\n" + piece
        token = sign_for(key, told.attempt_id, told.node, body)
        answer_s = LONG_S if piece else ASK_S
        answer = self._post("/v1/desk/dispatch", token, body, "application/octet-stream", answer_s=answer_s)
        heard = _decoded(answer, DispatchAnswer)
        self.learn(heard.control_urls)
        return heard

    def learn(self, urls: tuple[str, ...]) -> None:
        """All control planes of the cluster, says the one that has just answered. That is asked first, then
        these, then those of before, the oldest of which are forgotten.
        """
        self._urls = list(dict.fromkeys((*self._urls[:1], *urls, *self._urls)))[:MAX_KNOWN]

    def _post(
        self,
        path: str,
        token: str,
        body: bytes,
        kind: str,
        save_as: str | None = None,
        answer_s: float = LONG_S,
    ) -> bytes:
        """The answer of the first control plane that gives one; it is asked first the next time."""
        reasons = []
        for url in tuple(self._urls):
            try:
                answer = self._post_to(url, path, token, body, kind, save_as, answer_s)
            except (OSError, ValueError, http.client.HTTPException, Silent) as error:
                reasons.append(f"{url}: {type(error).__name__}: {error}")
                continue
            self._urls.remove(url)
            self._urls.insert(0, url)
            return answer
        raise Silent("; ".join(reasons) or "no address of a control plane is known")

    def _post_to(
        self, url: str, path: str, token: str, body: bytes, kind: str, save_as: str | None, answer_s: float
    ) -> bytes:
        # The kernel of a process that is frozen connects, and no certificate comes.
        with Line(url, self._trust, ASK_S, 0) as line:
            line.allow(answer_s, MAX_HEAD + MAX_ANSWER)
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            answer = line.post(path, headers, body)
            if answer.status == http.client.OK and save_as is not None:
                _save(line, answer, save_as)
                return b""
            told = answer.read(MAX_ANSWER)
        if answer.status == http.client.OK:
            return told
        words = told[:500].decode("utf-8", "replace")
        if answer.status in REFUSALS:
            raise Refused(
                f"{url} answered {answer.status}: {words}", is_stale=answer.status == http.client.CONFLICT
            )
        raise Silent(f"answered {answer.status}: {words}")


def _decoded(told: bytes, kind: type[T]) -> T:
    """What was said. `Silent`: it is no such thing."""
    try:
        return msgspec.json.decode(told, type=kind)
    except (ValueError, RecursionError) as error:
        raise Silent(f"an answer that is none: {type(error).__name__}: {error}") from error


def _save(line: Line, answer: http.client.HTTPResponse, path: str) -> None:
    """Each piece has the time of an answer: nobody knows how long a whole snapshot takes."""
    size, wanted = 0, answer.length
    if wanted is None:
        raise Silent("the snapshot came without its size")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        # A body that ends too soon is no error to `http.client`; what is cut off is asked for again.
        while piece := answer.read(min(PIECE, wanted - size)):
            size += file.write(piece)
            line.allow(LONG_S, MAX_HEAD + PIECE)  # it is read a little ahead
    if size != wanted:
        raise Silent(f"only {size} of {wanted} bytes of the snapshot came")
