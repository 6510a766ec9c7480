"""What an exchange needs of the connection on which its request came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shoal.serving.admission.accounts import HeldBytes
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.upstream import ConnectionSeeker

if TYPE_CHECKING:
    from shoal.serving.exchange.exchange import Exchange

FOREVER = float("inf")


class ExchangeClient(Protocol):
    """The connection on which the request came."""

    due: float
    """When `expire` is to be called. `FOREVER`: the exchange waits for its caller."""
    forwarded: bytes
    """Headers about the caller, for the replica, up to the request's id."""
    held: HeldBytes
    is_last: bool
    """No more requests are taken from this connection."""

    @property
    def is_stalled(self) -> bool:
        """Whether the caller does not read what is ready for it."""
        ...

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """The reply is over."""
        ...

    def refuse(self, refused: ProxyRefusal, exchange: Exchange) -> None:
        """Write a whole reply of the data plane itself."""
        ...

    def switch(self) -> None:
        """The replica has agreed to another protocol. From now on `on_tunnel_data` takes the data."""
        ...

    def abort(self) -> None: ...

    def hold(self) -> None:
        """Stop reading from the caller until `resume`. May be repeated."""
        ...

    def resume(self) -> None: ...

    def pause_writing(self) -> None:
        """Pause the exchange's replica, because the caller does not read."""
        ...

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        """Connect, then call `on_connected` or `on_refused`, once."""
        ...
