"""The states of an exchange, the events that it receives, and the ways in which it ends."""

from __future__ import annotations

from enum import StrEnum


class ExchangeState(StrEnum):
    """Every state but the last two holds bytes of the request, or may."""

    READING = "reading"
    """The head has come. More of the body is awaited before a replica is picked."""
    QUEUED = "queued"
    """It waits in the service's fair queue until a replica has a free slot."""
    CONNECTING = "connecting"
    """It has a slot, and a connection to the replica is being opened. Nothing has been sent, so it may go to
    any other replica.
    """
    SENDING = "sending"
    """The head has been sent, and the body is passed on as it comes. Nothing of it is kept, so the request is
    never sent again.
    """
    AWAITING = "awaiting"
    """The whole request has been sent, and the reply's head is awaited. Only here may it be sent again: if
    its body was kept, if repeating it is safe, and if the retry budget allows it.
    """
    REPLYING = "replying"
    """The reply has begun and is relayed as it comes. If it cannot be finished, it is cut off."""
    TUNNEL = "tunnel"
    """The replica has agreed to another protocol. Bytes go both ways until one side closes."""
    ENDED = "ended"
    """All that was counted for it has been given back."""


class ExchangeEvent(StrEnum):
    """What can happen to an exchange: by its caller, by the data plane, by a replica."""

    REQUEST_WHOLE = "request whole"
    """The whole request came at once."""
    BODY_FOLLOWS = "body follows"
    """The head came, and a body will follow it."""
    BODY_DATA = "body data"
    BODY_END = "body end"
    TUNNEL_DATA = "tunnel data"
    """The caller sent bytes for the tunnel."""
    CALLER_STALLED = "caller stalled"
    """The caller does not read what is ready for it."""
    CALLER_RESUMED = "caller resumed"
    CALLER_GONE = "caller gone"
    DEADLINE = "deadline"
    """The time limit of the state has passed."""
    REFUSED = "refused"
    """The data plane ends it: a limit, a revoked token, a service that is removed, a process that ends."""
    SLOT_FREE = "slot free"
    """The service's queue gives it a slot."""
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    """The connection to the replica could not be opened."""
    REPLICA_STALLED = "replica stalled"
    """The replica does not read what is ready for it."""
    REPLICA_RESUMED = "replica resumed"
    HEDGE_WON = "hedge won"
    """A second replica replied first, or is the one that is left."""
    REPLY_HEAD = "reply head"
    REPLY_DATA = "reply data"
    REPLY_END = "reply end"
    REPLICA_LOST = "replica lost"
    """The connection to the replica was closed before the reply was over, or the reply was malformed."""


class ExchangeEnd(StrEnum):
    """How an exchange ended, as its caller sees it."""

    REPLIED = "replied"
    """The caller has the replica's whole reply."""
    REFUSED = "refused"
    """The caller has a reply of the data plane itself."""
    CUT_OFF = "cut off"
    """The reply had begun when it failed, so the connection was aborted."""
    SILENT = "silent"
    """A tunnel or an event stream was silent for longer than the service allows, and was closed."""
    TUNNEL_CLOSED = "tunnel closed"
    """The replica closed the tunnel."""
    CALLER_GONE = "caller gone"
    BROKEN = "broken"
    """An event came that cannot come in its state. This is a bug of ours."""
