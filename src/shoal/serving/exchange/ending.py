"""Every way to end an exchange. In each of them, all that was counted is given back exactly once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shoal.serving.exchange.states import ExchangeEnd, ExchangeEvent, ExchangeState
from shoal.serving.proxy.local_reply import ProxyRefusal, problem_document
from shoal.serving.proxy.reply import WarmingStream
from shoal.serving.proxy.upstream import Upstream

if TYPE_CHECKING:
    from shoal.serving.exchange.exchange import Exchange

log = logging.getLogger(__name__)


def ignore(exchange: Exchange, *_: object, **__: object) -> None:
    """The event is late, or says nothing new."""


def refuse(exchange: Exchange, refused: ProxyRefusal) -> None:
    """End with a reply of the data plane itself."""
    end(exchange, ExchangeEnd.REFUSED, is_error=refused.status >= 500)
    refused.headers = exchange.entry.cors
    rewriter, client = exchange.relay.rewriter, exchange.client
    if isinstance(rewriter, WarmingStream):
        client.write(rewriter.error_event(problem_document(refused, exchange.request_id.decode())))
        client.finish()
    else:
        client.refuse(refused, exchange)


def cut_off(exchange: Exchange, refused: ProxyRefusal) -> None:
    """End a reply that has begun. Aborting is all that tells the caller that it is not whole."""
    end(exchange, ExchangeEnd.CUT_OFF, is_error=refused.status >= 500)
    exchange.client.abort()


def leave(exchange: Exchange) -> None:
    """End without a reply, because the caller is gone."""
    end(exchange, ExchangeEnd.CALLER_GONE, is_error=False)


def close_silent(exchange: Exchange) -> None:
    """End a silent tunnel or event stream. Silence is no failure of the replica: otherwise a caller could
    have a replica ejected by opening quiet streams.
    """
    end(exchange, ExchangeEnd.SILENT, is_error=False)
    exchange.client.abort()


def end_broken(event: ExchangeEvent, exchange: Exchange, *arguments: object, **_: object) -> None:
    """End an exchange that received an event which cannot come in its state. A bug of ours must not send a
    request twice or mix two replies, so its connections are closed.
    """
    log.error(
        "bug: an exchange was `%s` (%s) when `%s` came; its connection is aborted",
        exchange.state,
        exchange.how_ended or "not ended",
        event,
    )
    for argument in arguments:
        if isinstance(argument, Upstream):
            argument.close()
    if exchange.state is not ExchangeState.ENDED:
        end(exchange, ExchangeEnd.BROKEN, is_error=True)
    exchange.client.abort()


def end(exchange: Exchange, how: ExchangeEnd, *, is_error: bool) -> None:
    """Give everything back. Only handlers of states before `ENDED` call it, so it happens once."""
    was_queued = exchange.state is ExchangeState.QUEUED
    exchange.enter(ExchangeState.ENDED)
    exchange.how_ended = how
    service, slot, account = exchange.entry.service, exchange.slot, exchange.account
    tally = slot.replica.tally if slot is not None else service.tallies[0]
    tally.requests += 1
    if is_error:
        tally.errors += 1
    if was_queued and exchange in account.waiting:
        service.waiting.remove(exchange)
    exchange.body.drop()
    if exchange.hedge is not None:
        exchange.hedge.end()
    release_slot(exchange)
    account.admitted -= 1


def release_slot(exchange: Exchange) -> None:
    """Leave the replica, if there is one, and give its slot to a waiting request."""
    slot = exchange.slot
    if slot is None:
        return
    exchange.slot = None
    slot.release()
    if exchange.up is not None:
        exchange.up.close()
        exchange.up = None
    service = exchange.entry.service
    if service.waiting.count:
        service.pump()
