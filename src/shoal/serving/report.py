"""The report that a process sends once a second, and the same numbers as text for Prometheus.

Operators reach them on an address of its own: `/-/health` without a token, `/-/metrics` with one.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import cast

from shoal.serving.balance.replica import ReleaseTally
from shoal.serving.balance.service import LiveService
from shoal.serving.plane import DataPlane
from shoal.serving.proxy.local_reply import HEALTH, ProxyRefusal, health_reply, refusal_reply
from shoal.serving.proxy.request_head import parse_head, too_large
from shoal.serving.table import BOUNDS_S, ReleaseCounters, ReplicaHealth, ServingReport


def report(plane: DataPlane) -> ServingReport:
    now = monotonic()
    counts = [
        _count(live, tally)
        for live in plane.services.values()
        for tally in live.tallies.values()
        if tally.release or tally.requests or live.waiting.count
    ]
    health = [
        ReplicaHealth(
            replica_id=replica.spec.replica_id,
            is_ejected=replica.is_ejected(now),
            in_flight=replica.outstanding,
            failures=replica.failures,
        )
        for live in plane.services.values()
        for replica in live.replicas.values()
    ]
    return ServingReport(
        process_id=plane.process_id,
        version=plane.version,
        epoch=plane.epoch,
        counts=tuple(counts),
        health=tuple(health),
    )


def _count(live: LiveService, tally: ReleaseTally) -> ReleaseCounters:
    return ReleaseCounters(
        project=live.spec.project,
        name=live.spec.name,
        release=tally.release,
        in_flight=tally.in_flight,
        queued=live.waiting.count if tally.release == 0 else 0,
        requests=tally.requests,
        errors=tally.errors,
        first_byte_s=list(tally.first_byte),
        tokens=tally.tokens,
    )


def metrics(plane: DataPlane) -> str:
    """Return the metrics in Prometheus' text format."""
    serving_report = report(plane)
    lines = [
        *_series("shoal_serving_table_version", "gauge", [("", plane.version)]),
        *_series("shoal_serving_table_left_out", "gauge", [("", len(plane.left_out))]),
        *_series("shoal_serving_table_stale", "gauge", [("", int(plane.freshness.is_stale))]),
        *_series("shoal_serving_connections", "gauge", [("", len(plane.clients))]),
        *_series(
            "shoal_serving_refused_total",
            "counter",
            [(_labels(status=status, code=code), n) for (status, code), n in plane.refusals.items()],
        ),
        *_series(
            "shoal_serving_repeated_total",
            "counter",
            [(_labels(project=p, service=n), live.repeated) for (p, n), live in plane.services.items()],
        ),
    ]
    for name, kind in (
        ("in_flight", "gauge"),
        ("queued", "gauge"),
        ("requests", "counter"),
        ("errors", "counter"),
        ("tokens", "counter"),
    ):
        shown = f"shoal_serving_{name}" + ("_total" if kind == "counter" else "")
        lines += _series(shown, kind, [(_of(count), getattr(count, name)) for count in serving_report.counts])
    lines += _histogram(serving_report.counts)
    ejected = [(_labels(replica=seen.replica_id), int(seen.is_ejected)) for seen in serving_report.health]
    lines += _series("shoal_serving_replica_ejected", "gauge", ejected)
    return "\n".join(lines) + "\n"


def _histogram(counts: Iterable[ReleaseCounters]) -> Iterator[str]:
    name = "shoal_serving_first_byte_seconds"
    yield f"# TYPE {name} histogram"
    for count in counts:
        total = 0
        for bound, number in zip([*BOUNDS_S, "+Inf"], count.first_byte_s, strict=True):
            total += number
            yield f"{name}_bucket{_of(count, le=bound)} {total}"
        yield f"{name}_count{_of(count)} {total}"


def _series(name: str, kind: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{labels} {value}"


def _of(count: ReleaseCounters, **more: object) -> str:
    return _labels(project=count.project, service=count.name, release=count.release, **more)


def _labels(**labels: object) -> str:
    """Format labels. Names of projects, services and replicas need no escapes, because they are
    plain words.
    """
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


WITHIN_S = 10.0
"""From the connection to the last byte of its reply."""
MAX_OPEN = 64


class AdminConnection(asyncio.Protocol):
    """One request on one connection. `connections` holds all open ones; above `MAX_OPEN` the oldest is
    aborted.
    """

    def __init__(
        self,
        plane: DataPlane,
        token: str,
        connections: dict[AdminConnection, None],
        within_s: float = WITHIN_S,
    ) -> None:
        self._plane = plane
        self._token = token
        self._open = connections
        self._within_s = within_s
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._is_over = False
        self._end = asyncio.get_running_loop().call_later(self._within_s, self._transport.abort)
        self._open[self] = None
        if len(self._open) > MAX_OPEN:
            next(iter(self._open)).abort()

    def abort(self) -> None:
        self._open.pop(self, None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        self._end.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n") + 4
        try:
            if end > 3:
                self._transport.write(self._answer(self._buffer[:end]))
            elif (refused := too_large(self._buffer)) is not None:
                raise refused
            else:
                return
        except ProxyRefusal as refused:
            self._transport.write(refusal_reply(refused, closes=True))
        self._is_over = True
        self._transport.close()

    def _answer(self, raw: bytes) -> bytes:
        head = parse_head(raw)
        if head.target == HEALTH:
            problem = self._plane.health
            if problem is not None:
                raise problem
            return health_reply(self._plane.version, closes=True)
        if head.target != b"/-/metrics":
            raise ProxyRefusal(404, "not_found", "there are /-/health and /-/metrics")
        authorization = head.value(b"authorization")
        if self._token and not hmac.compare_digest(authorization, b"Bearer " + self._token.encode()):
            raise ProxyRefusal(401, "unauthenticated", "a token is needed: `Authorization: Bearer TOKEN`")
        return _page("200 OK", metrics(self._plane).encode(), "text/plain; version=0.0.4")


def _page(status: str, body: bytes, kind: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
