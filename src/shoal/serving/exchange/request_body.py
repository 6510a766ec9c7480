"""The request's body: held until there is a replica, then sent, then kept while it may be sent again.

Bytes count as held by the process from `hold` to `drop`, each exactly once.
"""

from __future__ import annotations

from shoal.serving.admission.accounts import HeldBytes


class RequestBody:
    """`length` is what the head says, or `CHUNKED`. The bytes here are framed as they came."""

    __slots__ = (
        "_held",
        "_num_counted",
        "_pieces",
        "is_replica_stalled",
        "is_whole",
        "kept",
        "length",
        "num_bytes",
    )

    def __init__(self, length: int, held: HeldBytes) -> None:
        self.length = length
        self.num_bytes = 0
        """Bytes that came before a replica was there to take them."""
        self.is_whole = False
        """All of it has come from the caller."""
        self.is_replica_stalled = False
        """The replica does not read it, so the time limit is the replica's while the caller still sends."""
        self.kept: bytes | None = None
        """The whole body as it was sent, while the request may be sent again."""
        self._pieces: list[bytes] = []
        self._held = held
        self._num_counted = 0

    @property
    def is_callers_turn(self) -> bool:
        """Whether the caller has more to send and the replica reads it: a wait is not the replica's fault."""
        return not (self.is_whole or self.is_replica_stalled)

    @property
    def is_held(self) -> bool:
        """Whether bytes wait for a replica."""
        return bool(self._pieces)

    def hold(self, data: bytes) -> bool:
        """Hold a piece until `take`. Return False, and hold nothing, if the process holds too much."""
        held, num_bytes = self._held, len(data)
        if held.bytes + num_bytes > held.max_bytes:
            return False
        held.bytes += num_bytes
        self._num_counted += num_bytes
        self._pieces.append(data)
        self.num_bytes += num_bytes
        return True

    def joined(self) -> bytes:
        """Return what is held."""
        return b"".join(self._pieces) if self._pieces else b""

    def take(self) -> bytes:
        """Return what is held, to be sent. A whole body is kept; of others nothing is."""
        body = self.joined()
        self._pieces = []
        if self.is_whole:
            self.kept = body
        elif self._num_counted:
            self._release()
        return body

    def hold_kept(self) -> None:
        """Hold the kept body again, to be sent another time."""
        self._pieces = [self.kept] if self.kept else []

    def drop(self) -> None:
        """Let go of all bytes, because the request is not sent again. May be repeated."""
        self._pieces = []
        self.kept = None
        if self._num_counted:
            self._release()

    def _release(self) -> None:
        self._held.bytes -= self._num_counted
        self._num_counted = 0
