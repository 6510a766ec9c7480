"""A callback for the Trainer of Transformers: `Trainer(..., callbacks=[ShoalCallback()])`.

It reports every step, the logged values and the checkpoints to Shoal. So `shoal metrics` shows the curves,
Shoal finds a rank that hangs, and drills count steps. Outside of a Shoal job it does nothing.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from shoal.runtime.rank.reporter import TrainingReporter


class ShoalCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """The callback of one rank's Trainer."""

    def __init__(self) -> None:
        self._reporter = TrainingReporter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.step(state.global_step)
        if control.should_evaluate or control.should_save:
            self._reporter.pause()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._reporter.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if state.is_world_process_zero:
            self._reporter.log(logs or {}, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            self._reporter.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.end()
