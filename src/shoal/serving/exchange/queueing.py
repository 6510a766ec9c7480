"""The wait for a free slot: its limit, and the signs of life for a caller that waits for a stream."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from shoal.serving.balance.service import LiveService
from shoal.serving.exchange.ending import refuse
from shoal.serving.exchange.states import ExchangeState
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.reply import HEARTBEAT_S, WANTS_STREAM, WarmingStream

if TYPE_CHECKING:
    from shoal.serving.exchange.exchange import Exchange

AHEAD_BYTES = 64 << 10
"""Bytes of a body that are read beyond `hold_bytes` while there is no replica to send them to."""


class QueueWait:
    __slots__ = ("_service", "since", "until")

    def __init__(self, service: LiveService, now: float) -> None:
        self._service = service
        self.since = now
        self.until = now + service.spec.queue_s

    def deadline(self) -> float:
        """Return the end of the wait: later while there is no replica, and still so when one has come."""
        service = self._service
        if not service.open and service.spec.is_failing:
            return self.since + service.spec.queue_s
        if not service.open:
            self.until = max(self.until, self.since + service.spec.start_s)
        return self.until

    def refusal(self, now: float) -> ProxyRefusal:
        service, waited_s = self._service, now - self.since
        if service.spec.is_failing and not service.open:
            detail = f"no replica was ready for {waited_s:.0f} s: every replica that started has ended"
            return ProxyRefusal(503, "service.failing", detail, retry_s=30.0)
        detail = f"no replica had a free slot for {waited_s:.0f} s"
        return ProxyRefusal(503, "service.busy", detail, retry_s=5.0)


def queue(exchange: Exchange) -> None:
    """Wait until a replica has a free slot. The service may refuse the request at once."""
    service, now = exchange.entry.service, monotonic()
    exchange.enter(ExchangeState.QUEUED)
    exchange.wait = wait = QueueWait(service, now)
    exchange.client.due = min(wait.deadline(), now + HEARTBEAT_S)
    service.wait(exchange)


def expire_wait(exchange: Exchange, now: float) -> None:
    """Send a heartbeat, or refuse the request if it has waited for too long."""
    wait = exchange.wait
    assert wait is not None
    if now < wait.deadline():
        _send_heartbeat(exchange)
        exchange.client.due = min(wait.until, now + HEARTBEAT_S)
    else:
        refuse(exchange, wait.refusal(now))


def _send_heartbeat(exchange: Exchange) -> None:
    """Show a caller that waits for a stream that it will come. Only while no replica exists: a queue is
    short.
    """
    relay, client, entry = exchange.relay, exchange.client, exchange.entry
    if relay.rewriter is None:
        is_stream = exchange.body.is_whole and WANTS_STREAM.search(exchange.body.joined()) is not None
        if not is_stream or entry.is_http10 or entry.service.open:
            return
        relay.rewriter = WarmingStream()
        client.write(relay.rewriter.begin(exchange.request_id + entry.cors))
    if isinstance(relay.rewriter, WarmingStream):
        client.write(relay.rewriter.heartbeat())


def hold_data(exchange: Exchange, data: bytes) -> bool:
    """Hold bytes that have no replica to go to. If the process holds too much, refuse and return False."""
    if exchange.body.hold(data):
        return True
    refuse(exchange, ProxyRefusal(503, "plane.full", "too many requests are held here", retry_s=2.0))
    return False


def hold_far_ahead(exchange: Exchange) -> None:
    """Read no more from a caller that has sent far more than is read before a replica is picked."""
    body = exchange.body
    if body.is_held and body.num_bytes > exchange.entry.hold_bytes + AHEAD_BYTES:
        exchange.client.hold()


def queue_data(exchange: Exchange, data: bytes) -> None:
    """Hold a piece of the body of a request that waits. The queue is bounded by bytes as well."""
    if not hold_data(exchange, data):
        return
    service = exchange.entry.service
    if service.waiting.grow(len(data), max_bytes=service.spec.queue_bytes):
        hold_far_ahead(exchange)
    else:
        detail = "too many bytes wait for this service"
        refuse(exchange, ProxyRefusal(503, "service.busy", detail, retry_s=2.0))
