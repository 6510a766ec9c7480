"""Which process groups running jobs have formed, as their supervisors say with every message."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.model.attempt import Attempt
from shoal.wire import Renewal, World


class WorldBook:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], World] = {}

    def heard(self, renewal: Renewal) -> None:
        """Note what a supervisor says; ranks that began again have formed no group yet."""
        share = (renewal.attempt_id, renewal.node)
        if renewal.world is None:
            self._heard.pop(share, None)
        else:
            self._heard[share] = renewal.world

    def of(self, attempt: Attempt) -> World | None:
        """The group of the whole attempt; of nodes that say different things, the one that misses most."""
        ended = {one.node: one.world for one in attempt.outcomes}
        told = (ended.get(node, self._heard.get((attempt.attempt_id, node))) for node in attempt.node_names)
        worlds = [one for one in told if one is not None]
        return min(worlds, key=lambda one: (one.is_whole, one.size), default=None)

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more: their outcomes have it."""
        kept = set(attempt_ids)
        self._heard = {share: one for share, one in self._heard.items() if share[0] in kept}
