"""A callback for the Trainer of Lightning: `Trainer(..., callbacks=[ShoalCallback()])`.

It tells Shoal of every optimizer step, of what the module logs, and of its checkpoints: `shoal metrics` has
the curves, a rank that hangs is found, and drills count steps. Outside of a Shoal job it does nothing.
Works with `lightning` and with `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from shoal.runtime.reporter import Reporter

if TYPE_CHECKING:
    Callback: Any = object
else:
    # A program that says `pytorch_lightning` may have `lightning` installed as well: they share no class.
    _is_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    _names = ("pytorch_lightning", "lightning.pytorch")
    try:
        Callback = importlib.import_module(_names[not _is_old]).Callback
    except ModuleNotFoundError:
        Callback = importlib.import_module(_names[_is_old]).Callback


class ShoalCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Every rank has its own, as the Trainer has it."""

    def __init__(self) -> None:
        self._reporter = Reporter()
        self._told_step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._reporter.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any, **more: Any) -> None:
        step = trainer.global_step
        self._reporter.step(step)
        every = max(1, trainer.log_every_n_steps)
        if trainer.is_global_zero and step // every > self._told_step // every:
            self._told_step = step
            self._reporter.log(trainer.logged_metrics, step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._reporter.pauses()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._reporter.log(trainer.logged_metrics, trainer.global_step)
        if not trainer.sanity_checking:
            self._reporter.goes_on()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if trainer.is_global_zero:
            self._reporter.saved(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._reporter.end()
