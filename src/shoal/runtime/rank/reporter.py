"""The common part of the callbacks for other libraries: report steps, metrics and saves to the supervisor.

Outside of a Shoal job it does nothing. Every rank may call every method. Metrics come from the first rank.
Steps appear on the board, so that the supervisor can tell a hang from a pause and drills can count steps.
Needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal.runtime.metrics import MAX_VALUES, is_metric_name, metric_channel
from shoal.runtime.rank.membership import RankMembership


class TrainingReporter:
    """The reporter of one process. Not thread-safe."""

    def __init__(self) -> None:
        self._member: RankMembership | None = None
        self._step = -1

    def begin(self) -> None:
        """Report that training begins, or begins again in the same process."""
        if self._member is None:
            member = RankMembership()
            if not member.has_supervisor:
                return
            member.bind()
            member.wait_for_round()
            member.mark_joined()
            self._member = member
        else:
            self._member.resume_steps()

    def step(self, step: int) -> None:
        """Report that `step` steps are complete. The same number twice is reported once."""
        if step == self._step:
            return
        self._step = metric_channel().step = step
        if self._member is None:
            self.begin()
        if self._member is not None:
            self._member.record_step(step)

    def log(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Log the numbers among these values. Libraries log text and tables, too, which are skipped."""
        numbers = {
            name: number for name, value in values.items() if (number := _number(name, value)) is not None
        }
        kept = dict(list(numbers.items())[:MAX_VALUES])
        if kept:
            metric_channel().send(kept, step)

    def saved(self, step: int) -> None:
        """Report that the first rank has saved a checkpoint of this step."""
        if os.environ.get("RANK", "0") == "0":
            metric_channel().send({"checkpoint_step": float(step)}, step)

    def pause(self) -> None:
        """Report a pause without steps, in which the model is evaluated or saved."""
        if self._member is not None:
            self._member.mark_done()

    def resume(self) -> None:
        """Report that steps follow again."""
        if self._member is not None:
            self._member.resume_steps()

    def end(self) -> None:
        """Report that training is over. Later work is no step, however long it takes."""
        if self._member is not None:
            self._member.mark_done()


def _number(name: object, value: object) -> float | None:
    """Return the value as a metric, or None if it is no number. Reading a tensor waits for its device."""
    if not is_metric_name(name) or isinstance(value, str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
