"""One request's place in a replica."""

from __future__ import annotations

from shoal.serving.admission.accounts import CallerAccount
from shoal.serving.balance.replica import LiveReplica


class Slot:
    """Counted for the replica, its release and the caller, from its making until `release`."""

    __slots__ = ("_account", "prefill_tokens", "replica")

    def __init__(self, replica: LiveReplica, account: CallerAccount) -> None:
        self.replica = replica
        self._account = account
        self.prefill_tokens = 0
        """Prompt tokens that count as the replica's work until the reply begins."""
        replica.outstanding += 1
        replica.tally.in_flight += 1
        account.bound += 1

    def end_prefill(self) -> None:
        self.replica.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def release(self) -> None:
        """Give the place back. Call it once."""
        replica = self.replica
        replica.outstanding -= 1
        replica.tally.in_flight -= 1
        self._account.bound -= 1
        if self.prefill_tokens:
            self.end_prefill()
