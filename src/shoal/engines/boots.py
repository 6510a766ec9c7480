"""Which start of which machine a cluster tells of, and what proves that there was another since. Pure.

A date proves little: it moves when somebody sets that machine's clock. And a later start of another machine
that has got the same name proves nothing of the one before. What is not known is no evidence.
"""

from __future__ import annotations

import msgspec

MARGIN_S = 600.0
"""Clocks may be set meanwhile: munge alone lets Slurm's be five minutes off."""
JITTER_S = 60.0
"""By how much the date of one start may differ each time it is told: it is now less how long it runs."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """As one kind of cluster tells it each time."""

    machine: str = ""
    """What tells it from others that may have its name; empty: nobody can."""
    boot_id: str = ""
    """The kernel's own, new with every start; empty: nobody tells it, and `at` has to do."""
    at: float | None = None
    """When it was, by the clock that tells it each time, and by no other."""

    def follows(self, before: Boot) -> bool:
        """Whether the same machine was certainly started anew since: nothing outlives that."""
        if not self.machine or self.machine != before.machine:
            return False
        if self.boot_id or before.boot_id:
            return bool(self.boot_id and before.boot_id) and self.boot_id != before.boot_id
        return self.at is not None and before.at is not None and self.at > before.at + MARGIN_S

    def is_on(self, machine: str) -> bool:
        """Whether it may be a start of that machine, as far as anybody can tell."""
        return not self.machine or self.machine == machine

    def is_like(self, other: Boot | None) -> bool:
        """Whether it says the same, but for a date that is never quite the same."""
        if other is None or (self.machine, self.boot_id) != (other.machine, other.boot_id):
            return False
        if self.at is None or other.at is None:
            return self.at is other.at
        return abs(self.at - other.at) < JITTER_S
