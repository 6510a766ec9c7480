"""The reply on its way to the caller: relayed as the replica framed it, or rewritten."""

from __future__ import annotations

from shoal.serving.balance.replica import ReleaseTally
from shoal.serving.proxy.reply import ProxyReply, ReplyRewriter, WarmingStream


class ReplyRelay:
    """What is known of the reply while it is relayed."""

    __slots__ = ("events", "has_moved", "reply", "rewriter")

    def __init__(self) -> None:
        self.reply: ProxyReply | None = None
        """Its head, once it has come."""
        self.events: ReleaseTally | None = None
        """Counts the events, if the reply is an event stream. Such a reply may be silent for any time."""
        self.rewriter: ReplyRewriter | None = None
        """A `WarmingStream` before the reply's head has come: the caller already has a head of ours."""
        self.has_moved = False
        """Bytes have moved since the last check of the time limit, in the reply or in the tunnel."""

    @property
    def is_warming(self) -> bool:
        return isinstance(self.rewriter, WarmingStream)
