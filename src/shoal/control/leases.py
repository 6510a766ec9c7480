"""Signs of life, in memory, on the monotonic clock.

Nothing here is stored: a restarted control plane counts silence from its own start, which can only
make it wait longer. So a heartbeat costs no write, and a jump of the wall clock moves no fence.

Changed on the event loop alone. What is only asked changes nothing, so that a transaction may ask, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        self._spoke: dict[tuple[str, str, int], float] = {}
        """The same, of those who said so themselves: what a cluster says holds off a fence, and no more."""
        self._speaking = Counter[tuple[str, str, int]]()
        """Those who say something just now, and were not answered yet."""
        self._followed: dict[tuple[str, str, int], float] = {}
        """Since when we have cared about the shares that may run: see `follow`."""
        self._sent: dict[str, float] = {}
        self._running_since: dict[str, float] = {}
        self._troubles: dict[tuple[str, str], str] = {}
        """By attempt that has not begun and node, or none where all of it could not be handed over."""
        self._waits: dict[tuple[str, str], str] = {}
        """Those of them that wait in the cluster's own queue."""

    def follow(self, attempts: Sequence[Attempt]) -> None:
        """Count the silence of their shares, from now where nobody was heard from; forget all others."""
        now, kept = self._clock.monotonic(), {attempt.attempt_id for attempt in attempts}
        shares = [
            (own.attempt_id, node, own.incarnation(node)) for own in attempts for node in own.nodes_left
        ]
        self._followed = {share: self._followed.get(share, now) for share in shares}
        self._heard = {key: at for key, at in self._heard.items() if key[0] in kept}
        self._spoke = {key: at for key, at in self._spoke.items() if key[0] in kept}
        self._sent = {k: at for k, at in self._sent.items() if k in kept}
        self._troubles = {key: told for key, told in self._troubles.items() if key[0] in kept}
        self._waits = {key: told for key, told in self._waits.items() if key[0] in kept}
        self._running_since = {k: at for k, at in self._running_since.items() if k in kept}

    def heard(
        self,
        attempt_id: str,
        node: str,
        incarnation: int = 0,
        *,
        ago_s: float = 0.0,
        is_hearsay: bool = False,
    ) -> None:
        """A supervisor renewed, or its engine saw it alive, so many seconds ago; `is_hearsay`: its cluster
        says that it is there, or waits, and nobody there did.
        """
        at, share = self._clock.monotonic() - ago_s, (attempt_id, node, incarnation)
        self._heard[share] = max(at, self._heard.get(share, at))
        if not is_hearsay:
            self._spoke[share] = max(at, self._spoke.get(share, at))
            self._waits.pop((attempt_id, node), None)

    @contextmanager
    def speaking(self, attempt_id: str, node: str, incarnation: int = 0) -> Iterator[None]:
        """Somebody there speaks, and may be told to go on: no fence passes until that is decided, and noted
        (`heard`) within the block. What is decided by a read may be older than an end that is just being
        recorded: see `is_overdue`.
        """
        share = (attempt_id, node, incarnation)
        self._speaking[share] += 1
        try:
            yield
        finally:
            self._speaking[share] -= 1
            if not self._speaking[share]:
                del self._speaking[share]

    def is_overdue(self, attempt_id: str, node: str, incarnation: int = 0) -> bool:
        """Wordless for so long that its end may be being recorded now: by a fence, whichever it has, or by an
        operator's word. Who speaks then is answered by a write: that comes before the end, which then is
        none, or after it.
        """
        return self._unspoken_s((attempt_id, node, incarnation)) > QUIET_S

    def knows(self, attempt_id: str, node: str, incarnation: int = 0) -> bool:
        """Whether there was a sign of life."""
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

    def troubles(self, attempt_id: str, *, has_whole: bool = True) -> tuple[str, ...]:
        """Why it has not begun: each thing once, with the nodes of which it was said; `has_whole`: also what
        was said of all of it.
        """
        nodes: dict[str, list[str]] = {}
        for (own, node), told in sorted(self._troubles.items()):
            if own == attempt_id and (node or has_whole):
                nodes.setdefault(told, []).extend([node] if node else [])
        return tuple(f"{listed(names)}: {told}" if names else told for told, names in nodes.items())

    def is_unheard_of(self, attempt: Attempt, *, is_being_handed_over: bool) -> bool:
        """Nothing of it could be handed over, or it just is being, and its engine has said nothing of it."""
        own = attempt.attempt_id
        has_share = any((own, node) in self._troubles for node in attempt.node_names)
        return (is_being_handed_over or (own, "") in self._troubles) and not has_share

    def waits(self, attempt_id: str) -> tuple[str, ...]:
        """What the cluster says of those of its shares that wait in its own queue, each thing once."""
        return tuple(dict.fromkeys(told for key, told in sorted(self._waits.items()) if key[0] == attempt_id))

    def silence_s(self, attempt_id: str, node: str, incarnation: int = 0) -> float:
        """Seconds since the last sign of life, or since it is followed if there was none."""
        now, share = self._clock.monotonic(), (attempt_id, node, incarnation)
        return now - self._heard.get(share, self._followed.get(share, now))

    def share_silence_s(self, attempt: Attempt, node: str) -> float:
        """The silence of the node's present share of it."""
        return self.silence_s(attempt.attempt_id, node, attempt.incarnation(node))

    def silent_nodes(self, attempt: Attempt, for_s: float) -> tuple[str, ...]:
        """The nodes that may still run something of it and were not heard from for longer than that."""
        return tuple(node for node in attempt.nodes_left if self.share_silence_s(attempt, node) > for_s)

    def wordless_s(self, attempt: Attempt, node: str) -> float:
        """Seconds since somebody there spoke for himself, or since it is followed if nobody did. What waits
        in the cluster's own queue, and never spoke, is nobody; who speaks just now does not wait.
        """
        share = attempt.attempt_id, node, attempt.incarnation(node)
        return 0.0 if share in self._speaking else self._unspoken_s(share)

    def _unspoken_s(self, share: tuple[str, str, int]) -> float:
        now = self._clock.monotonic()
        is_nobody = share not in self._spoke and share[:2] in self._waits
        return inf if is_nobody else now - self._spoke.get(share, self._followed.get(share, now))

    def fenced_nodes(self, attempt: Attempt, fence_s: float) -> tuple[str, ...]:
        """Those silent, and sent nothing, for so long that what ever ran there of it has certainly been
        stopped by its supervisor; never one whose supervisor died before what it had started, or may have,
        nor one who speaks just now.
        """
        limit = fence_s + FENCE_MARGIN_S
        silent = self.silent_nodes(attempt, limit) if self._unsent_s(attempt) > limit else ()
        return tuple(node for node in silent if self.is_still_fenced(attempt, node, fence_s))

    def is_still_fenced(self, attempt: Attempt, node: str, fence_s: float) -> bool:
        """Of one that was among `fenced_nodes`: whether nobody there has spoken since. What others of its
        attempt were sent meanwhile changes nothing, unless nobody has seen its own share begin.
        """
        own, limit = (attempt.attempt_id, node, attempt.incarnation(node)), fence_s + FENCE_MARGIN_S
        if node in attempt.nodes_to_start and self._unsent_s(attempt) <= limit:
            return False
        is_silent = self.silence_s(*own) > limit and own not in self._speaking
        return is_silent and node not in attempt.orphaned_nodes

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
