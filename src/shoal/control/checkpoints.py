"""When running attempts last saved their work, as their supervisors say. In memory: after a restart they say
it again with their next renewals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.scheduler import Planner

STEP_S = 10.0
"""Less than that is the network's jitter and not another checkpoint."""


class Checkpoints:
    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._at: dict[str, float] = {}
        self.fresh: dict[str, float] = {}
        """Heard of since the last decision that stopped somebody; recorded with the next."""
        self.has_recorded = False
        """Whether any decision was written down with them. Before the first, `fresh` is all that is known,
        whatever a control plane before this one had heard and written down.
        """

    def heard(self, attempt_id: str, at: float) -> None:
        """One of its nodes has seen its work saved then. A gang's last checkpoint is the newest seen."""
        known = self._at.get(attempt_id)
        if (known is None or at > known + STEP_S) and self._planner.save(attempt_id, at):
            self._at[attempt_id] = self.fresh[attempt_id] = at

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget everything about attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._at = {one: at for one, at in self._at.items() if one in kept}
        self.fresh = {one: at for one, at in self.fresh.items() if self._planner.holds(one)}

    def recorded(self, told: Mapping[str, float]) -> None:
        """A decision was written down with those."""
        self.has_recorded = True
        self.fresh = {one: at for one, at in self.fresh.items() if told.get(one) != at}
