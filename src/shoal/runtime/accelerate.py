"""A tracker for Accelerate: `Accelerator(log_with=ShoalTracker())`, and `accelerator.log(values, step=step)`.

It tells Shoal what the program logs: `shoal metrics` has the curves. Accelerate logs on the main process
alone, so in a job of several ranks each of them also calls `tracker.step(step)`, once for each step: then a
rank that hangs is found, and drills count steps. Outside of a Shoal job it does nothing. As for every tracker
of Accelerate, `accelerator.init_trackers` comes first.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate.tracking import GeneralTracker

from shoal.runtime.reporter import Reporter


class ShoalTracker(GeneralTracker):  # type: ignore[misc,unused-ignore]
    """Every rank has its own."""

    name = "shoal"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self._reporter = Reporter()

    @property
    def tracker(self) -> ShoalTracker:
        """What `accelerator.get_tracker("shoal", unwrap=True)` gives."""
        return self

    def step(self, step: int) -> None:
        """So many steps are complete on this rank."""
        self._reporter.step(step)

    def saved(self, step: int) -> None:
        """A checkpoint of this step was saved. Any rank may say so."""
        self._reporter.saved(step)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters are the job's: nothing is kept of them."""

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self._reporter.log(values, step)
        if step is not None and os.environ.get("WORLD_SIZE", "1") == "1":
            self._reporter.step(step)

    def finish(self) -> None:
        self._reporter.end()
