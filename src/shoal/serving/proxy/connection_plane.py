"""What a caller's connection needs of the data plane that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shoal.serving.admission.accounts import HeldBytes
from shoal.serving.admission.routes import ServiceRoutes
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.upstream import ConnectionSeeker

if TYPE_CHECKING:
    from shoal.serving.proxy.downstream import Downstream


class ConnectionPlane(Protocol):
    """The process that serves, and what its connections share."""

    routes: ServiceRoutes
    is_draining: bool
    version: int
    clients: set[Downstream]
    held: HeldBytes

    @property
    def health(self) -> ProxyRefusal | None:
        """Why load balancers in front should prefer another data plane, or None."""
        ...

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None: ...

    def new_id(self) -> bytes: ...

    def count_refusal(self, refused: ProxyRefusal) -> None:
        """Count a refusal for the metrics."""
        ...

    def count_guess(self, peer: str, refused: ProxyRefusal) -> ProxyRefusal: ...

    def add_stranger(self, client: Downstream) -> None:
        """Count a new connection as a stranger's until a request names its caller."""
        ...

    def assign_caller(self, client: Downstream, caller: str) -> bool:
        """Count the connection for the caller, or for its address if `caller` is empty (at a public service).
        Return False if this caller, or all callers together, have too many connections; the connection then
        stays counted as before.
        """
        ...

    def begin(self, client: Downstream) -> None:
        """Mark a caller's connection as busy, until `wait`."""
        ...

    def wait(self, client: Downstream) -> None: ...

    def remove_client(self, client: Downstream) -> None:
        """Forget a closed connection."""
        ...
