"""A callback for the Trainer of Lightning: `Trainer(..., callbacks=[ShoalCallback()])`.

It reports every optimizer step, the logged values and the checkpoints to Shoal. So `shoal metrics` shows the
curves, Shoal finds a rank that hangs, and drills count steps. Outside of a Shoal job it does nothing. It
works with `lightning` and with `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from shoal.runtime.rank.reporter import TrainingReporter

if TYPE_CHECKING:
    Callback: Any = object
else:
    # A program that imports `pytorch_lightning` may have `lightning` installed as well. They share no class.
    _is_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    _names = ("pytorch_lightning", "lightning.pytorch")
    try:
        Callback = importlib.import_module(_names[not _is_old]).Callback
    except ModuleNotFoundError:
        Callback = importlib.import_module(_names[_is_old]).Callback


class ShoalCallback(Callback):  # type: ignore[misc,unused-ignore]
    """The callback of one rank's Trainer."""

    def __init__(self) -> None:
        self._reporter = TrainingReporter()
        self._logged_step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._reporter.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any, **more: Any) -> None:
        step = trainer.global_step
        self._reporter.step(step)
        every = max(1, trainer.log_every_n_steps)
        if trainer.is_global_zero and step // every > self._logged_step // every:
            self._logged_step = step
            self._reporter.log(trainer.logged_metrics, step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._reporter.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._reporter.log(trainer.logged_metrics, trainer.global_step)
        if not trainer.sanity_checking:
            self._reporter.resume()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if trainer.is_global_zero:
            self._reporter.saved(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._reporter.end()
