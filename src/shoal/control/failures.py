"""How the newest group of ranks failed on each node of an attempt, and which of these failures is the cause.

When a rank is killed, the ranks of other nodes exit because they lose their peer, and their supervisors may
report first. So a failure that looks like a program that gives up waits briefly for word of the other nodes.
In memory: a supervisor repeats its report until it is answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import anyio

from shoal.model.attempt import Attempt
from shoal.model.blame import order_of_blame
from shoal.wire import NodeOutcome

OTHERS_S = 1.0
"""A supervisor hears of the death of its rank within milliseconds, and reports it at once."""

Group = tuple[str, int]
"""The id of an attempt, and the generation of its ranks."""


class Failures:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self._known: dict[Group, dict[str, NodeOutcome]] = {}
        self._news: dict[Group, anyio.Event] = {}

    def note(self, failure: NodeOutcome, generation: int) -> None:
        """A supervisor reports how this group failed on its node. A repeated report changes nothing."""
        group = (failure.attempt_id, generation)
        self._known.setdefault(group, {})[failure.node] = failure
        if (event := self._news.pop(group, None)) is not None:
            event.set()

    def cause(self, attempt: Attempt, failure: NodeOutcome) -> NodeOutcome:
        """The likeliest cause of this group's failures, `failure` among them."""
        known = self._known.get((attempt.attempt_id, attempt.generation), {})
        return min((failure, *known.values()), key=order_of_blame)

    async def hear_others(self, attempt: Attempt, failure: NodeOutcome) -> None:
        """Return once every node has reported, or one of them a better cause, or `OTHERS_S` have passed."""
        group = (attempt.attempt_id, attempt.generation)
        with contextlib.suppress(TimeoutError), anyio.fail_after(OTHERS_S):
            while self.cause(attempt, failure).gives_up and not self._is_complete(attempt):
                await self._news.setdefault(group, anyio.Event()).wait()

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts that hold nothing any more."""
        kept = set(attempt_ids)
        self._known = {group: known for group, known in self._known.items() if group[0] in kept}
        self._news = {group: event for group, event in self._news.items() if group[0] in kept}

    def _is_complete(self, attempt: Attempt) -> bool:
        known = self._known.get((attempt.attempt_id, attempt.generation), {})
        return known.keys() >= set(attempt.nodes_left)
