"""Signs of life, in memory, on the monotonic clock.

Nothing here is stored: a restarted control plane counts silence from its own start, which can only
make it wait longer. So a heartbeat costs no write, and a jump of the wall clock moves no fence.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from shoal.clock import Clock
from shoal.model.attempt import Attempt
from shoal.scheduler.words import listed

FENCE_MARGIN_S = 60.0
"""Added to the fence: a supervisor notices its own deadline within one renewal interval."""
QUIET_S = 20.0
"""Silence worth telling people about: four renewals missed."""


class Leases:
    """Who was heard from, and when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, str, int], float] = {}
        """By attempt, node and incarnation: a share is not silent for as long as the one it replaces."""
        self._sent: dict[str, float] = {}
        self._running_since: dict[str, float] = {}
        self._troubles: dict[tuple[str, str], str] = {}
        """By attempt that has not begun and node, or none where all of it could not be handed over."""
        self._waits: dict[tuple[str, str], str] = {}
        """Those of them that wait in the cluster's own queue."""

    def heard(self, attempt_id: str, node: str, incarnation: int = 0) -> None:
        """A supervisor renewed, or its engine saw it alive."""
        self._heard[attempt_id, node, incarnation] = self._clock.monotonic()

    def knows(self, attempt_id: str, node: str, incarnation: int = 0) -> bool:
        """Whether there was a sign of life, or silence was asked about."""
        return (attempt_id, node, incarnation) in self._heard

    def sent(self, attempt_id: str) -> None:
        """It was handed to its engine, perhaps in vain: what starts of it now is silent at first."""
        self._sent[attempt_id] = self._clock.monotonic()

    def trouble(self, attempt_id: str, node: str, told: str | None, *, is_queued: bool = False) -> None:
        """What its engine last said about a share that has not begun (node empty: about the whole); None:
        there is nothing to say any more. `is_queued`: it waits in the cluster's own queue.
        """
        self._waits.pop((attempt_id, node), None)
        if told is not None and is_queued:
            self._waits[attempt_id, node] = told
        if told is None:
            self._troubles.pop((attempt_id, node), None)
        else:
            self._troubles[attempt_id, node] = told

    def troubles(self, attempt_id: str) -> tuple[str, ...]:
        """Why it has not begun: each thing once, with the nodes of which it was said."""
        nodes: dict[str, list[str]] = {}
        for (_, node), told in sorted(item for item in self._troubles.items() if item[0][0] == attempt_id):
            nodes.setdefault(told, []).extend([node] if node else [])
        return tuple(f"{listed(names)}: {told}" if names else told for told, names in nodes.items())

    def refused_whole(self, attempt_id: str) -> str:
        """Why all of it could not be handed over; empty: it could, or its engine has something of it."""
        has_share = any(key[0] == attempt_id and key[1] for key in self._troubles)
        return "" if has_share else self._troubles.get((attempt_id, ""), "")

    def waits(self, attempt_id: str) -> tuple[str, ...]:
        """What the cluster says of those of its shares that wait in its own queue, each thing once."""
        return tuple(dict.fromkeys(told for key, told in sorted(self._waits.items()) if key[0] == attempt_id))

    def silence_s(self, attempt_id: str, node: str, incarnation: int = 0) -> float:
        """Seconds since the last sign of life, counted from when we first cared if there was none."""
        now = self._clock.monotonic()
        return now - self._heard.setdefault((attempt_id, node, incarnation), now)

    def share_silence_s(self, attempt: Attempt, node: str) -> float:
        """The silence of the node's present share of it."""
        return self.silence_s(attempt.attempt_id, node, attempt.incarnation(node))

    def silent_nodes(self, attempt: Attempt, for_s: float) -> tuple[str, ...]:
        """The nodes that may still run something of it and were not heard from for longer than that."""
        return tuple(node for node in attempt.nodes_left if self.share_silence_s(attempt, node) > for_s)

    def speaks(self, attempt: Attempt, node: str) -> bool:
        """Whether somebody there was heard from lately. What waits in the cluster's own queue is nobody."""
        is_waiting = (attempt.attempt_id, node) in self._waits
        return not is_waiting and self.share_silence_s(attempt, node) <= QUIET_S

    def fenced_nodes(self, attempt: Attempt, fence_s: float) -> tuple[str, ...]:
        """Those silent, and sent nothing, for so long that what ever ran there of it has certainly been
        stopped by its supervisor; never one whose supervisor died before what it had started, or may have.
        """
        limit = fence_s + FENCE_MARGIN_S
        silent = self.silent_nodes(attempt, limit) if self._unsent_s(attempt) > limit else ()
        return tuple(node for node in silent if node not in attempt.orphaned_nodes)

    def fence_left_s(self, attempt: Attempt, silent: Iterable[str], fence_s: float) -> float:
        """Until the last of these nodes is fenced, if nobody there says a word: no sooner does a gang end."""
        silences = (self.share_silence_s(attempt, node) for node in silent)
        return fence_s + FENCE_MARGIN_S - min(self._unsent_s(attempt), *silences)

    def _unsent_s(self, attempt: Attempt) -> float:
        return self._clock.monotonic() - self._sent.get(attempt.attempt_id, -inf)

    def ran_for_s(self, attempt_id: str) -> float:
        """Seconds since we first saw it running: at most what it really ran, never more."""
        now = self._clock.monotonic()
        return now - self._running_since.setdefault(attempt_id, now)

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget everything about attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._heard = {key: at for key, at in self._heard.items() if key[0] in kept}
        self._sent = {k: at for k, at in self._sent.items() if k in kept}
        self._troubles = {key: told for key, told in self._troubles.items() if key[0] in kept}
        self._waits = {key: told for key, told in self._waits.items() if key[0] in kept}
        self._running_since = {k: at for k, at in self._running_since.items() if k in kept}
