"""The way to a replica: pick one, connect, send, and try another where that is safe."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from shoal.serving.balance.balancer import NO_HINTS, routing_hints
from shoal.serving.balance.hedge import Hedge
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.balance.slot import Slot
from shoal.serving.exchange.client import FOREVER
from shoal.serving.exchange.ending import refuse, release_slot
from shoal.serving.exchange.queueing import queue
from shoal.serving.exchange.states import ExchangeState
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.upstream import Upstream

if TYPE_CHECKING:
    from shoal.serving.exchange.exchange import Exchange

MAX_CONNECTS = 5
"""Connection attempts for one request, besides one for each replica. No attempt has begun anything, and all
replicas of a lost node may have to be tried before one elsewhere."""


def seek(exchange: Exchange, avoid: LiveReplica | None = None) -> None:
    """Take a slot in a replica now, or as soon as one is free."""
    entry = exchange.entry
    if entry.is_asking and exchange.hints is NO_HINTS:
        exchange.hints = routing_hints(entry.affinity, exchange.body.joined() if entry.has_prompt else b"")
    service = entry.service
    replica = None if service.waiting.count else service.pick(exchange.hints, avoid)
    if replica is None:
        queue(exchange)
    else:
        bind(exchange, replica)


def bind(exchange: Exchange, replica: LiveReplica) -> None:
    """Take a slot in this replica, and send the request as soon as there is a connection."""
    service, body = exchange.entry.service, exchange.body
    exchange.enter(ExchangeState.CONNECTING)
    exchange.slot = slot = Slot(replica, exchange.account)
    slot.prefill_tokens = service.balancer.bound(replica, exchange.hints)
    # A replica's time starts at the request's last byte, so a slow caller cannot make it late.
    exchange.client.due = monotonic() + service.timeout_s if body.is_whole else FOREVER
    if replica.idle:
        send(exchange, replica.idle.pop())
    else:
        exchange.num_connects += 1
        exchange.client.open(replica, exchange)


def close_unwanted(exchange: Exchange, up: Upstream) -> None:
    """Close a connection that came after the request had ended."""
    up.close()


def try_elsewhere(exchange: Exchange, replica: LiveReplica, *, is_local: bool) -> None:
    """Try another replica, because this one could not be reached."""
    service = exchange.entry.service
    release_slot(exchange)
    if not is_local:
        service.count_failure(replica, monotonic(), is_refused=True)
    if exchange.num_connects < MAX_CONNECTS + len(service.replicas):
        seek(exchange, replica)
    elif is_local:
        detail = "no more connections can be made for now"
        refuse(exchange, ProxyRefusal(503, "plane.busy", detail, retry_s=2.0))
    else:
        refuse(exchange, ProxyRefusal(502, "replica.unreachable", "no replica could be reached"))


def send(exchange: Exchange, up: Upstream) -> None:
    """Send the head and the body so far. A body that is sent whole is kept until the reply begins."""
    client, body = exchange.client, exchange.body
    data = message(exchange, up.replica, body.take())
    exchange.up = up
    exchange.enter(ExchangeState.AWAITING if body.is_whole else ExchangeState.SENDING)
    up.send(exchange, data)
    if client.is_stalled:
        client.pause_writing()  # pause this new connection as well
    if not body.is_whole:
        client.resume()
    elif 0 <= body.length <= exchange.entry.hedge_bytes:
        exchange.hedge = Hedge(exchange, exchange.entry.service.spec.hedge_s)


def message(exchange: Exchange, replica: LiveReplica, body: bytes) -> bytes:
    """Return the request as this replica gets it. Its id is the last header but the replica's own."""
    entry, query, request_id, own_headers, _ = exchange.request
    forwarded = exchange.client.forwarded
    head = (entry.start, query, entry.prefix, own_headers, forwarded, request_id, replica.ends_head)
    return b"".join((*head, body))


def may_repeat(exchange: Exchange) -> bool:
    """Return whether the request may be sent again. If so, it has been taken out of the retry budget."""
    entry = exchange.entry
    return (
        entry.is_safe
        and exchange.body.kept is not None
        and exchange.num_repeats < entry.service.spec.retries
        and entry.service.may_retry()
    )


def repeat(exchange: Exchange, avoid: LiveReplica) -> None:
    """Send the request again, to another replica if there is one."""
    exchange.num_repeats += 1
    exchange.body.hold_kept()
    release_slot(exchange)
    seek(exchange, avoid)


def move_to_second(exchange: Exchange, slot: Slot, up: Upstream) -> None:
    """Leave the first replica for the second one, where the hedge has taken a slot and sent the request."""
    exchange.hedge = None
    release_slot(exchange)
    exchange.slot = slot
    exchange.up = up
    if exchange.client.is_stalled:
        exchange.client.pause_writing()
