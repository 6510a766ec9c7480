"""Runs coroutines by hand, one pause at a time, in an order drawn from the seed.

No event loop: the code under test awaits nothing but `Pause`, so what happens between two pauses is
one instruction as far as crashes and interleavings go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Pause:
    """Somewhere another task may run first, or the process may be killed."""

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


class SimTask:
    def __init__(self, name: str, work: Coroutine[Any, Any, Any], on_end: Callable[[Any], None]) -> None:
        self.name = name
        self.work = work
        self.on_end = on_end
        """Called with the result, or with the exception the task ended by."""
        self.stalled_until = 0
        """The tick before which it does not move."""


class Driver:
    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.tasks: list[SimTask] = []
        self.tick = 0
        """Grows with every turn of the story."""

    def spawn(
        self, name: str, work: Coroutine[Any, Any, Any], on_end: Callable[[Any], None] = lambda _: None
    ) -> None:
        self.tasks.append(SimTask(name, work, on_end))

    def is_running(self, name: str) -> bool:
        return any(task.name == name for task in self.tasks)

    def awake(self) -> list[SimTask]:
        """Those that move now."""
        return [task for task in self.tasks if task.stalled_until <= self.tick]

    def stall(self, ticks: int) -> str | None:
        """Hold one task where it is, as a slow disk or network would, so that much fits in between."""
        if not self.tasks:
            return None
        task = self._dice.choice(self.tasks)
        task.stalled_until = self.tick + ticks
        return task.name

    def step(self) -> None:
        """Let one task, drawn at random from those awake, run to its next pause."""
        task = self._dice.choice(self.awake() or self.tasks)
        try:
            task.work.send(None)
        except StopIteration as end:
            self.tasks.remove(task)
            task.on_end(end.value)
        except Exception as error:  # noqa: BLE001 - whoever spawned it judges how it ended
            self.tasks.remove(task)
            task.on_end(error)

    def drain(self) -> None:
        """Let everything run to its end."""
        while self.tasks:
            self.step()

    def kill(self) -> None:
        """SIGKILL: nothing runs any further. What memory held is thrown away by the caller."""
        for task in self.tasks:
            task.work.close()
        self.tasks.clear()


def run_now(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never pauses."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("this coroutine was not supposed to pause")
