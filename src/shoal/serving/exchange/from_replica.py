"""Events of the replica: its reply, that it does not read, that it is late, and that it is lost."""

from __future__ import annotations

from bisect import bisect_left
from time import monotonic
from typing import TYPE_CHECKING

from shoal.serving.balance.hedge import GATEWAY_ERRORS
from shoal.serving.balance.slot import Slot
from shoal.serving.exchange.client import FOREVER
from shoal.serving.exchange.ending import close_silent, cut_off, end, refuse
from shoal.serving.exchange.states import ExchangeEnd, ExchangeState
from shoal.serving.exchange.to_replica import may_repeat, repeat
from shoal.serving.proxy.chunks import LAST_CHUNK
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.reply import UNTIL_CLOSE, ProxyReply, ReplyRewriter
from shoal.serving.proxy.request_head import CHUNKED
from shoal.serving.table import BOUNDS_S

if TYPE_CHECKING:
    from shoal.serving.exchange.exchange import Exchange


def begin_reply(exchange: Exchange, reply: ProxyReply, body: bytes) -> None:
    """Relay the reply's head, with a body that came at once."""
    now = monotonic()
    slot = exchange.slot
    assert slot is not None
    replica = slot.replica
    replica.tally.first_byte[bisect_left(BOUNDS_S, now - exchange.began)] += 1
    if reply.status >= 500 or slot.prefill_tokens or replica.failures or replica.ejections:
        _judge(exchange, slot, reply.status, now)
    exchange.body.drop()
    if exchange.hedge is not None:
        exchange.hedge.end()
    exchange.client.due = now + exchange.entry.service.timeout_s
    relay = exchange.relay
    relay.reply = reply
    relay.events = replica.tally if reply.is_stream else None
    if relay.rewriter is None and exchange.entry.is_http10:
        relay.rewriter = ReplyRewriter()
    if relay.rewriter is not None:
        exchange.enter(ExchangeState.REPLYING)
        _write_rewritten(exchange, relay.rewriter, reply, body)
    elif reply.status == 101:
        exchange.enter(ExchangeState.TUNNEL)
        _write_head(exchange, reply, body)
        exchange.client.switch()
    else:
        exchange.enter(ExchangeState.REPLYING)
        _write_head(exchange, reply, body)


def _judge(exchange: Exchange, slot: Slot, status: int, now: float) -> None:
    """Count what the reply says about its replica."""
    replica = slot.replica
    if slot.prefill_tokens:
        slot.end_prefill()
    if status in GATEWAY_ERRORS:
        exchange.entry.service.count_failure(replica, now)
    elif replica.failures or replica.ejections:
        replica.succeed()


def _write_head(exchange: Exchange, reply: ProxyReply, body: bytes) -> None:
    client = exchange.client
    if reply.length == UNTIL_CLOSE and not exchange.entry.is_head:
        client.is_last = True
    end_of_head = b"\r\n\r\n"
    if client.is_last or reply.upgrade:
        end_of_head = b"\r\n%b\r\n" % (reply.upgrade or b"connection: close\r\n")
    client.write(b"".join((reply.start, _own_lines(exchange, reply), end_of_head, body)))


def _write_rewritten(exchange: Exchange, rewriter: ReplyRewriter, reply: ProxyReply, body: bytes) -> None:
    client = exchange.client
    client.is_last = client.is_last or exchange.entry.is_http10
    head = rewriter.head(reply, _own_lines(exchange, reply))
    client.write(head + (rewriter.data(body) if body else b""))


def _own_lines(exchange: Exchange, reply: ProxyReply) -> bytes:
    """Return what follows the replica's headers: the request's id and the data plane's own lines."""
    return exchange.request_id if reply.has_cors else exchange.request_id + exchange.entry.cors


def relay_data(exchange: Exchange, data: bytes, num_chunks: int = 1) -> None:
    """Relay a piece of the body as the replica framed it."""
    relay = exchange.relay
    relay.has_moved = True
    if relay.events is not None:
        relay.events.tokens += num_chunks
    write = exchange.client.write
    write(data if relay.rewriter is None else relay.rewriter.data(data))


def end_reply(exchange: Exchange) -> None:
    relay, client = exchange.relay, exchange.client
    exchange.up = None  # it may serve another request now: a pause for this one must not stop it
    reply = relay.reply
    assert reply is not None
    if relay.rewriter is not None:
        client.write(relay.rewriter.end())
    elif reply.length == CHUNKED and not exchange.entry.is_head:
        client.write(LAST_CHUNK)
    end(exchange, ExchangeEnd.REPLIED, is_error=reply.status >= 500)
    client.finish()


def hold_caller(exchange: Exchange) -> None:
    """The replica reads more slowly than the caller sends, so from now on the time limit is the replica's."""
    body, client = exchange.body, exchange.client
    client.hold()
    body.is_replica_stalled = True
    if not body.is_whole:
        client.due = monotonic() + exchange.entry.service.timeout_s


def resume_caller(exchange: Exchange) -> None:
    exchange.client.resume()
    exchange.body.is_replica_stalled = False


def resume_sender(exchange: Exchange) -> None:
    """The replica reads again, so the exchange waits for its caller, without a limit of its own."""
    resume_caller(exchange)
    exchange.client.due = FOREVER


def expire_replica(exchange: Exchange, now: float) -> None:
    """Give the replica up, because it is late. While its caller has not sent everything, it is not."""
    if exchange.body.is_callers_turn:
        exchange.client.due = FOREVER
    else:
        refuse(exchange, _count_late(exchange, now))


def expire_reply(exchange: Exchange, now: float) -> None:
    """Cut off a reply that has stopped."""
    if exchange.relay.has_moved or exchange.body.is_callers_turn:
        _renew_time_limit(exchange, now)
    elif exchange.relay.events is not None:
        close_silent(exchange)
    else:
        cut_off(exchange, _count_late(exchange, now))


def expire_tunnel(exchange: Exchange, now: float) -> None:
    if exchange.relay.has_moved:
        _renew_time_limit(exchange, now)
    else:
        close_silent(exchange)


def _renew_time_limit(exchange: Exchange, now: float) -> None:
    exchange.relay.has_moved = False
    exchange.client.due = now + exchange.entry.service.timeout_s


def _count_late(exchange: Exchange, now: float) -> ProxyRefusal:
    service, slot = exchange.entry.service, exchange.slot
    if slot is not None:
        service.count_failure(slot.replica, now)
    return ProxyRefusal(504, "replica.late", f"the replica did not answer for {service.timeout_s:g} s")


def lose_request(exchange: Exchange, reason: str) -> None:
    """The connection is lost, and no reply has begun: continue in a second replica, send the request again,
    or refuse it.
    """
    slot = _count_lost(exchange)
    if exchange.hedge is not None and exchange.hedge.take_over():
        return
    if may_repeat(exchange):
        repeat(exchange, slot.replica)
        return
    outcome = "the request may have had an effect"
    if exchange.entry.is_safe:
        tries = exchange.num_repeats + 1
        times = "once" if tries == 1 else f"{tries} times"
        outcome = f"tried {times}; it does no harm to ask again"
    refuse(exchange, ProxyRefusal(502, "replica.lost", f"{reason}; {outcome}"))


def lose_reply(exchange: Exchange, reason: str) -> None:
    _count_lost(exchange)
    cut_off(exchange, ProxyRefusal(502, "replica.lost", reason))


def _count_lost(exchange: Exchange) -> Slot:
    exchange.up = None
    slot = exchange.slot
    assert slot is not None
    slot.replica.close_idle()  # they may have ended with it unnoticed: a second try needs a new connection
    exchange.entry.service.count_failure(slot.replica, monotonic())
    return slot


def close_tunnel(exchange: Exchange, reason: str) -> None:
    """The replica closed the tunnel, and that is how a tunnel ends."""
    exchange.up = None
    end(exchange, ExchangeEnd.TUNNEL_CLOSED, is_error=False)
    exchange.client.is_last = True
    exchange.client.finish()
