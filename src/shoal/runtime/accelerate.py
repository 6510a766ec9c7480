"""A tracker for Accelerate: `Accelerator(log_with=ShoalTracker())`, and `accelerator.log(values, step=step)`.

It reports to Shoal what the program logs, and `shoal metrics` shows the curves. Accelerate logs only on the
main process, so in a job of several ranks each rank should also call `tracker.step(step)` once for each step.
Then Shoal finds a rank that hangs, and drills count steps. Outside of a Shoal job it does nothing. As for
every tracker of Accelerate, call `accelerator.init_trackers` first.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate.tracking import GeneralTracker

from shoal.runtime.rank.reporter import TrainingReporter


class ShoalTracker(GeneralTracker):  # type: ignore[misc,unused-ignore]
    """The tracker of one rank."""

    name = "shoal"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self._reporter = TrainingReporter()

    @property
    def tracker(self) -> ShoalTracker:
        """The object that `accelerator.get_tracker("shoal", unwrap=True)` returns."""
        return self

    def step(self, step: int) -> None:
        """Report that `step` steps are complete on this rank."""
        self._reporter.step(step)

    def saved(self, step: int) -> None:
        """Report that a checkpoint of this step was saved. Any rank may call this."""
        self._reporter.saved(step)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Ignore hyperparameters, because the job has them."""

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self._reporter.log(values, step)
        if step is not None and os.environ.get("WORLD_SIZE", "1") == "1":
            self._reporter.step(step)

    def finish(self) -> None:
        self._reporter.end()
