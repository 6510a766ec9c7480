"""An exchange: what it holds, and one method for each event. `table.py` says what the event does."""

from __future__ import annotations

from shoal.serving.admission.accounts import CallerAccount
from shoal.serving.admission.routes import RoutedRequest
from shoal.serving.balance.balancer import NO_HINTS, RoutingHints
from shoal.serving.balance.hedge import Hedge
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.balance.slot import Slot
from shoal.serving.exchange.client import ExchangeClient
from shoal.serving.exchange.queueing import QueueWait
from shoal.serving.exchange.reply_relay import ReplyRelay
from shoal.serving.exchange.request_body import RequestBody
from shoal.serving.exchange.states import ExchangeEnd, ExchangeState
from shoal.serving.exchange.table import (
    BODY_DATA,
    BODY_END,
    BODY_FOLLOWS,
    CALLER_GONE,
    CALLER_RESUMED,
    CALLER_STALLED,
    CONNECTED,
    DEADLINE,
    HEDGE_WON,
    READING,
    REFUSED,
    REPLICA_LOST,
    REPLICA_RESUMED,
    REPLICA_STALLED,
    REPLY_DATA,
    REPLY_END,
    REPLY_HEAD,
    REPLYING,
    REQUEST_WHOLE,
    ROWS,
    SLOT_FREE,
    TUNNEL,
    TUNNEL_DATA,
    UNREACHABLE,
)
from shoal.serving.exchange.to_replica import message
from shoal.serving.proxy.chunks import LAST_CHUNK
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.reply import ProxyReply
from shoal.serving.proxy.request_head import CHUNKED
from shoal.serving.proxy.upstream import ConnectionSeeker, Upstream

OVERHEAD_BYTES = 2048
"""Memory of a waiting request besides its body."""


class Exchange:
    """One request. Only `enter` changes its state."""

    __slots__ = (
        "_row",
        "account",
        "began",
        "body",
        "client",
        "entry",
        "hedge",
        "hints",
        "how_ended",
        "num_connects",
        "num_repeats",
        "relay",
        "request",
        "slot",
        "state",
        "up",
        "wait",
    )

    def __init__(
        self, client: ExchangeClient, request: RoutedRequest, account: CallerAccount, now: float
    ) -> None:
        """`request` has an id."""
        self.client = client
        self.request = request
        self.entry = request[0]
        self.account = account
        self.began = now
        self.hints: RoutingHints = NO_HINTS
        self.state = READING
        self._row = ROWS[READING]
        self.how_ended: ExchangeEnd | None = None
        self.body = RequestBody(request[4], client.held)
        self.relay = ReplyRelay()
        self.wait: QueueWait | None = None
        """The last wait for a slot."""
        self.slot: Slot | None = None
        self.up: Upstream | None = None
        """The connection to the slot's replica, from the sending of the head to the end of the reply."""
        self.hedge: Hedge | None = None
        self.num_connects = 0
        """Connections asked for. The attempts are limited, although none of them begins anything."""
        self.num_repeats = 0
        """How often the request was sent again."""

    def enter(self, state: ExchangeState) -> None:
        self.state = state
        self._row = ROWS[state]

    # What others ask.

    @property
    def request_id(self) -> bytes:
        return self.request[2]

    @property
    def is_head(self) -> bool:
        return self.entry.is_head

    @property
    def is_upgrade(self) -> bool:
        return self.entry.is_websocket

    @property
    def is_whole(self) -> bool:
        """Whether the whole request has come from the caller."""
        return self.body.is_whole

    @property
    def is_tunnel(self) -> bool:
        """Whether the replica has agreed to the upgrade. Before that, no byte from the caller goes to it."""
        return self.state is TUNNEL

    @property
    def is_answered(self) -> bool:
        """Whether the caller has the head of the replica's reply."""
        return self.state is REPLYING or self.state is TUNNEL

    @property
    def has_begun(self) -> bool:
        """Whether any part of a reply is on its way to the caller."""
        return self.is_answered or self.relay.is_warming

    @property
    def is_events(self) -> bool:
        """Whether the reply is an event stream, which may be silent for any time."""
        return self.relay.events is not None

    @property
    def weight_bytes(self) -> int:
        """What a waiting request counts for. It does not shrink while the request waits."""
        return OVERHEAD_BYTES + self.body.num_bytes

    # From the caller.

    def on_request(self, body: bytes) -> None:
        """Take the whole request, which came at once."""
        self._row[REQUEST_WHOLE](self, body)

    def on_body_follows(self) -> None:
        """Take the head. `on_body` and `on_body_end` bring the rest."""
        self._row[BODY_FOLLOWS](self)

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body as it is framed."""
        self._row[BODY_DATA](self, data)

    def on_body_end(self) -> None:
        if self.body.length == CHUNKED:
            self._row[BODY_DATA](self, LAST_CHUNK)
        self.body.is_whole = True
        self._row[BODY_END](self)

    def on_tunnel_data(self, data: bytes) -> None:
        self._row[TUNNEL_DATA](self, data)

    def on_caller_stalled(self) -> None:
        self._row[CALLER_STALLED](self)

    def on_caller_resumed(self) -> None:
        self._row[CALLER_RESUMED](self)

    def on_gone(self) -> None:
        """The caller is gone, so end without a reply."""
        self._row[CALLER_GONE](self)

    # From the data plane.

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        self._row[DEADLINE](self, now)

    def refuse(self, refused: ProxyRefusal) -> None:
        """End with a reply of the data plane itself, or cut off a reply that has begun."""
        self._row[REFUSED](self, refused)

    def bind(self, replica: LiveReplica) -> None:
        self._row[SLOT_FREE](self, replica)

    # From the replica's connection.

    def on_connected(self, up: Upstream) -> None:
        self._row[CONNECTED](self, up)

    def on_refused(self, replica: LiveReplica, *, is_local: bool = False) -> None:
        self._row[UNREACHABLE](self, replica, is_local=is_local)

    def on_stalled(self) -> None:
        self._row[REPLICA_STALLED](self)

    def on_resumed(self) -> None:
        self._row[REPLICA_RESUMED](self)

    def on_reply(self, reply: ProxyReply, body: bytes) -> None:
        self._row[REPLY_HEAD](self, reply, body)

    def on_data(self, data: bytes, num_chunks: int = 1) -> None:
        self._row[REPLY_DATA](self, data, num_chunks)

    def on_end(self) -> None:
        self._row[REPLY_END](self)

    def on_lost(self, reason: str) -> None:
        """The connection was lost before the reply was over."""
        self._row[REPLICA_LOST](self, reason)

    # From the hedge in a second replica.

    def pick_second(self) -> LiveReplica | None:
        """Return another replica with a free slot, if no request waits and the retry budget allows it."""
        service, first = self.entry.service, self.slot.replica if self.slot is not None else None
        if service.waiting.count:
            return None
        second = service.pick(self.hints, first)
        return second if second is not first and second is not None and service.may_retry() else None

    def message(self, replica: LiveReplica) -> bytes:
        """Return the request for that replica, with the body that was kept."""
        return message(self, replica, self.body.kept or b"")

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        self.client.open(replica, seeker)

    def move_to(self, slot: Slot, up: Upstream) -> None:
        self._row[HEDGE_WON](self, slot, up)
