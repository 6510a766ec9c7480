"""Signals by which commits, engines, loops and commands wake a loop or a stream."""

from __future__ import annotations

import anyio


class Signal:
    """A flag that anything in the loop's thread raises and the waiting loop lowers."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    @property
    def is_raised(self) -> bool:
        """Whether the flag is raised. Any thread may ask."""
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the flag is raised or the time is over, then lower it."""
        with anyio.move_on_after(timeout_s):
            await self._event.wait()
        self._event = anyio.Event()


class CommitNotifier:
    """Tells streams and the planning loop that something was committed."""

    def __init__(self, plan: Signal) -> None:
        self._plan = plan
        self._commit: anyio.Event | None = None
        """Set while a caller waits."""
        self._seq = -1

    def is_new(self, seq: int) -> bool:
        """Whether a commit brought events, judged by its newest event. A commit without events, such as a
        reservation of job numbers, changes nothing that is planned for or followed. Call this once for each
        commit, where it is announced.
        """
        before, self._seq = self._seq, seq
        return seq != before

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the next commit. Any thread may ask.

        A caller that was woken and has not looked sees this commit too, because it lowers its flag before it
        looks.
        """
        return self._commit is not None or not self._plan.is_raised

    def notify(self) -> None:
        """Wake all callers: something new is on disk."""
        if self._commit is not None:
            self._commit.set()
            self._commit = None
        self._plan.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the next commit, or until the time is over."""
        if self._commit is None:
            self._commit = anyio.Event()
        with anyio.move_on_after(timeout_s):
            await self._commit.wait()


class Signals:
    """What wakes the loops and the streams of one control plane before their time."""

    def __init__(self) -> None:
        self.plan = Signal()
        """Set when a loop or a command wants a plan at once."""
        self.watch = Signal()
        """Set when something is a reason to look at running attempts at once."""
        self.heal = Signal()
        """Set when an operator has changed the state of a node."""
        self.commits = CommitNotifier(self.plan)
