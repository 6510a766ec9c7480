"""Events of the caller: what it sends, and that it does not read."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from shoal.serving.exchange.queueing import hold_data, hold_far_ahead
from shoal.serving.exchange.states import ExchangeState
from shoal.serving.exchange.to_replica import seek

if TYPE_CHECKING:
    from shoal.serving.exchange.exchange import Exchange


def take_whole(exchange: Exchange, body: bytes) -> None:
    """Take the whole request, which came at once."""
    exchange.body.is_whole = True
    if not body or hold_data(exchange, body):
        seek(exchange)


def take_head(exchange: Exchange) -> None:
    """Pick a replica before the body comes, unless the body says which one, or may be sent again."""
    if exchange.entry.hold_bytes == 0:
        seek(exchange)


def read_data(exchange: Exchange, data: bytes) -> None:
    """Hold a piece of the body. Pick a replica once more of it has come than is held for all requests."""
    if not hold_data(exchange, data):
        return
    if exchange.body.num_bytes > exchange.entry.hold_bytes:
        seek(exchange)
    hold_far_ahead(exchange)


def hold_until_connected(exchange: Exchange, data: bytes) -> None:
    if hold_data(exchange, data):
        hold_far_ahead(exchange)


def pass_on(exchange: Exchange, data: bytes) -> None:
    """Send a piece of the body on, as it is framed."""
    assert exchange.up is not None
    exchange.up.transport.write(data)


def seek_for_whole(exchange: Exchange) -> None:
    seek(exchange)


def begin_time_limit(exchange: Exchange) -> None:
    """The replica's time begins, because the caller has sent everything."""
    exchange.client.due = monotonic() + exchange.entry.service.timeout_s


def await_reply(exchange: Exchange) -> None:
    exchange.enter(ExchangeState.AWAITING)
    begin_time_limit(exchange)


def send_through_tunnel(exchange: Exchange, data: bytes) -> None:
    exchange.relay.has_moved = True
    pass_on(exchange, data)


def pause_replica(exchange: Exchange) -> None:
    """Read no more from the replica. At the reply's very end there is none: its connection may already serve
    another request, which this pause must not stop.
    """
    if exchange.up is not None:
        exchange.up.pause()


def resume_replica(exchange: Exchange) -> None:
    begin_time_limit(exchange)
    if exchange.up is not None:
        exchange.up.unpause()
