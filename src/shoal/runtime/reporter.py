"""What the callbacks for other libraries have in common: tell the supervisor of steps, metrics and saves.

Outside of a Shoal job all of it does nothing. Every rank may call all of it; metrics are taken from the first
rank. Steps are shown on the board, so that the supervisor can tell a hang from a pause, and drills can count
steps. Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal.runtime.metrics import MAX_VALUES, is_metric_name, voice
from shoal.runtime.rank.member import Member


class Reporter:
    """One for each process. Used from one thread."""

    def __init__(self) -> None:
        self._member: Member | None = None
        self._step = -1

    def begin(self) -> None:
        """Training begins, or begins again in the same process."""
        if self._member is None:
            member = Member()
            if not member.has_supervisor:
                return
            member.stays()
            member.next()
            member.joined()
            self._member = member
        else:
            self._member.goes_on()

    def step(self, step: int) -> None:
        """So many steps are complete. The same number twice is told once."""
        if step == self._step:
            return
        self._step = voice().step = step
        if self._member is None:
            self.begin()
        if self._member is not None:
            self._member.at_step(step)

    def log(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Note the numbers among these values. Others are left out: libraries log text and tables, too."""
        found = {
            name: number for name, value in values.items() if (number := _number(name, value)) is not None
        }
        told = dict(list(found.items())[:MAX_VALUES])
        if told:
            voice().say(told, step)

    def saved(self, step: int) -> None:
        """The first rank has saved a checkpoint of this step."""
        if os.environ.get("RANK", "0") == "0":
            voice().say({"checkpoint_step": float(step)}, step)

    def pauses(self) -> None:
        """No step is made for a while: the model is evaluated, or saved."""
        if self._member is not None:
            self._member.is_done()

    def goes_on(self) -> None:
        """Steps follow."""
        if self._member is not None:
            self._member.goes_on()

    def end(self) -> None:
        """Training is over. What the program does from here on is no step, however long it takes."""
        if self._member is not None:
            self._member.is_done()


def _number(name: object, value: object) -> float | None:
    """The value as a metric; None: it is none. Reading a tensor waits for its device."""
    if not is_metric_name(name) or isinstance(value, str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
