"""Callers of a service who keep their connections, count every request, and look at every answer."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Self

from tests.support.real_plane import until

PAUSE_S = 0.03
MOST = 200_000
"""Requests of one caller: a load has an end, also when nobody ends it."""


class Fault(NamedTuple):
    what: str
    replica_id: str
    """Who had begun to answer; empty: nobody had."""
    told: str


class Link:
    """One connection that is kept, opened anew where it was closed after an answer that said so."""

    def __init__(self, address: str, path: str, token: str) -> None:
        self._link = http.client.HTTPConnection(address, timeout=120)
        self._path = path
        self._headers = {"authorization": f"Bearer {token}"}
        self.replica_id = ""
        self.version = ""

    def begin(self, method: str, path: str, body: str = "", **headers: str) -> http.client.HTTPResponse:
        self.replica_id = self.version = ""
        sent = body.encode() if method == "POST" else None
        self._link.request(method, self._path + path, sent, {**self._headers, **headers})
        answer = self._link.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"{answer.status}: {answer.read().decode()}")
        return answer

    def said_by(self, text: str) -> str:
        """What was said, once it is noted who said it."""
        self.version, self.replica_id, said = text.split(" ", 2)
        return said

    def close(self) -> None:
        self._link.close()


def get(link: Link, number: int) -> bool:
    """Whether it was answered, all of it and rightly."""
    said = link.said_by(link.begin("GET", f"echo?{number}").read().decode())
    return said == f"/echo?{number}"


def post(link: Link, number: int) -> bool:
    return link.said_by(link.begin("POST", "", f"plain {number}").read().decode()) == f"plain {number}"


def post_with_key(link: Link, number: int) -> bool:
    answer = link.begin("POST", "", f"keyed {number}", **{"idempotency-key": f"key-{number}"})
    return link.said_by(answer.read().decode()) == f"keyed {number}"


def stream(link: Link, number: int) -> bool:
    answer = link.begin("GET", f"stream?{number}")
    events = []
    while line := answer.readline():
        if line.startswith(b"data: "):
            events.append(link.said_by(line.decode()[6:-1]))
    return events == [f"{place} /stream?{number}" for place in range(20)]


class Asker(threading.Thread):
    """One caller: one request after the other."""

    def __init__(self, link: Link, ask: Callable[[Link, int], bool]) -> None:
        super().__init__(daemon=True)
        self._link = link
        self._ask = ask
        self.is_over = threading.Event()
        self.sent = self.right = 0
        self.faults: list[Fault] = []
        self.versions: Counter[str] = Counter()

    def run(self) -> None:
        for number in itertools.takewhile(lambda _: not self.is_over.is_set(), range(MOST)):
            self.sent += 1
            try:
                is_right, told = self._ask(self._link, number), "not what was asked for"
            except (OSError, http.client.HTTPException, ValueError) as error:
                is_right, told = False, repr(error)
            if is_right:
                self.right += 1
                self.versions[self._link.version] += 1
            else:
                self.faults.append(Fault(self._ask.__name__, self._link.replica_id, told))
                self._link.close()  # an answer that was cut off ended with its connection
            time.sleep(PAUSE_S)
        self._link.close()


class Crowd:
    """Askers of these kinds, from `with` to its end."""

    def __init__(self, address: str, path: str, token: str, *kinds: Callable[[Link, int], bool]) -> None:
        self.askers = [Asker(Link(address, path, token), kind) for kind in kinds]

    def __enter__(self) -> Self:
        for asker in self.askers:
            asker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for asker in self.askers:
            asker.is_over.set()
        for asker in self.askers:
            asker.join(180)

    @property
    def sent(self) -> int:
        return sum(asker.sent for asker in self.askers)

    @property
    def right(self) -> int:
        return sum(asker.right for asker in self.askers)

    @property
    def versions(self) -> set[str]:
        return {version for asker in self.askers for version in asker.versions}

    def faults(self, *, but_of: frozenset[str] = frozenset()) -> list[Fault]:
        """What failed, but for answers that these replicas had begun when they were killed."""
        found = [fault for asker in self.askers for fault in asker.faults]
        return [fault for fault in found if fault.replica_id not in but_of]

    def until_more(self, count: int = 2) -> None:
        """Until every one of them was answered, or failed, so many times more."""
        before = [asker.right + len(asker.faults) for asker in self.askers]
        until(
            lambda: all(
                asker.right + len(asker.faults) >= seen + count
                for asker, seen in zip(self.askers, before, strict=True)
            ),
            f"everybody is answered {count} times",
        )
