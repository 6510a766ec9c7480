"""A callback for the Trainer of Transformers: `Trainer(..., callbacks=[ShoalCallback()])`.

It tells Shoal of every step, of what the Trainer logs, and of its checkpoints: `shoal metrics` has the
curves, a rank that hangs is found, and drills count steps. Outside of a Shoal job it does nothing.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from shoal.runtime.reporter import Reporter


class ShoalCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Every rank has its own, as the Trainer has it."""

    def __init__(self) -> None:
        self._reporter = Reporter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.goes_on()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.step(state.global_step)
        if control.should_evaluate or control.should_save:
            self._reporter.pauses()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._reporter.pauses()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if state.is_world_process_zero:
            self._reporter.log(logs or {}, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.is_world_process_zero:
            self._reporter.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._reporter.end()
