"""Who gives way to one job while a search for them goes on: by what right, and whether that is enough.

Every right depends on what projects hold, so whoever is taken counts as gone for the next question. Where a
ceiling is in the way, its own project's or one above it, so many below it stop that it allows the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from shoal.scheduler.devices import Amount, held_by
from shoal.scheduler.policy import Policy
from shoal.scheduler.rights import ground
from shoal.scheduler.snapshot import Candidate, Holding
from shoal.scheduler.stakes import Side
from shoal.scheduler.tree import Device, Refusal, Tree
from shoal.scheduler.types import Ground


class Giving:
    def __init__(self, head: Candidate, asked: Amount, tree: Tree, policy: Policy) -> None:
        self.asked = asked
        self.grounds: dict[str, Ground] = {}
        """By attempt, why it may be asked."""
        self._head = head
        self._tree = tree
        self._policy = policy
        self._given: dict[str, Holding] = {}
        self._refusal = tree.refusal(head.project, asked)
        """The ceiling that was in the way before anybody gave way."""

    def choices(self, sides: Iterable[Side]) -> list[list[Side]]:
        """Who may be asked as things are: where a ceiling is in the way, at first those below it alone."""
        may = [side for side in sides if self._ground(side.priority, side.project) is not None]
        if self._refusal is None:
            return [may]
        below = [side for side in may if self._counts(side.project, self._refusal)]
        return [below, may] if below else []

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards the tree is as it was, and `grounds` tell what was found."""
        try:
            yield
        finally:
            self.undo()

    def take(self, victims: Sequence[Holding]) -> bool:
        """They stop, if all of them may be asked to, the smallest first."""
        taken: list[Holding] = []
        for one in sorted(victims, key=lambda one: (held_by(one.allocation), one.attempt_id)):
            found = self._ground(one.priority, one.project)
            if found is None:
                for back in taken:
                    self._go_on(back)
                return False
            self.grounds[one.attempt_id] = found
            self._given[one.attempt_id] = one
            self._tree.give(one.project, held_by(one.allocation))
            taken.append(one)
        return True

    def spare(self, one: Holding) -> bool:
        """It goes on after all, if what is asked for is allowed beside it."""
        self._go_on(one)
        if self._tree.refusal(self._head.project, self.asked) is None:
            return True
        self._given[one.attempt_id] = one
        self._tree.give(one.project, held_by(one.allocation))
        return False

    def lacking(self, cheapest: Iterator[Holding]) -> list[Holding] | None:
        """Who has to stop besides, so that what is asked for is allowed; they do. None: it never is."""
        stop: list[Holding] = []
        for one in cheapest:
            refusal = self._tree.refusal(self._head.project, self.asked)
            if refusal is None:
                return stop
            if self._helps(one, refusal) and self.take([one]):
                stop.append(one)
        is_allowed = self._tree.refusal(self._head.project, self.asked) is None
        return stop if is_allowed else None

    def undo(self) -> None:
        for one in list(self._given.values()):
            self._go_on(one)

    def _go_on(self, one: Holding) -> None:
        del self._given[one.attempt_id]
        self._tree.take(one.project, held_by(one.allocation))

    def _ground(self, priority: int, project: str) -> Ground | None:
        return ground(self._head, self.asked, priority, project, self._tree, self._policy)

    def _helps(self, one: Holding, refusal: Refusal) -> bool:
        held = held_by(one.allocation)
        gives = held.milligpus if refusal.device is Device.GPUS else held.millicpus
        return gives > 0 and self._counts(one.project, refusal)

    def _counts(self, project: str, refusal: Refusal) -> bool:
        """Whether what the project holds counts against that ceiling."""
        return any(view.name == refusal.by for view in self._tree.line(project))
