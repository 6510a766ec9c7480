"""Measure where the time of a step goes: input, checkpoints, communication, the rest. Does not slow the step.

Input is the time in torch's DataLoader. Checkpoints is the time for which saves blocked the training thread.
Communication is DDP's own sample (of the first ten steps and every hundredth): the part of the gradient
reduction that the backward pass did not hide. If there is no such sample, as with FSDP, the rest is not
divided.
"""

from __future__ import annotations

import functools
import time
from typing import Any
from weakref import WeakSet

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shoal.runtime.metrics import metric_channel

TELL_S = 1.0
NANO = 1e9


class StepCounters:
    """Counters of torch's own classes in this process."""

    def __init__(self) -> None:
        self.input_s = 0.0
        self.replicas: WeakSet[DistributedDataParallel] = WeakSet()


_watched = StepCounters()


@functools.cache
def instrument_torch() -> StepCounters:
    """Instrument loaders and replicas, once per process. Costs two readings of the clock for each batch."""
    loaders: Any = _BaseDataLoaderIter
    replicas: Any = DistributedDataParallel
    fetch, make = loaders.__next__, replicas.__init__

    @functools.wraps(fetch)
    def timed(self: Any) -> Any:
        began = time.perf_counter()
        try:
            return fetch(self)
        finally:
            _watched.input_s += time.perf_counter() - began

    @functools.wraps(make)
    def noted(self: DistributedDataParallel, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        _watched.replicas.add(self)

    loaders.__next__, replicas.__init__ = timed, noted
    return _watched


class StepTiming:
    """The step times of one rank in one round, reported about once a second."""

    def __init__(self, *, should_report: bool, world_size: int, stalled_s: float) -> None:
        self._watched = instrument_torch()
        self._is_told = should_report
        self._world_size = world_size
        self._begin(time.perf_counter(), stalled_s)

    def lap(self, step: int, stalled_s: float) -> None:
        """Note that this step is complete. `stalled_s`: how long saves have blocked this process in total."""
        self._num_steps += 1
        now = time.perf_counter()
        if now < self._began + TELL_S:
            return
        if self._is_told:
            metric_channel().send(self._parts(now, stalled_s), step)
        self._begin(now, stalled_s)

    def _begin(self, now: float, stalled_s: float) -> None:
        self._began, self._num_steps = now, 0
        self._input_s, self._stalled_s = self._watched.input_s, stalled_s

    def _parts(self, now: float, stalled_s: float) -> dict[str, float]:
        """Return the average seconds of a step since the last report, by part."""
        count = self._num_steps
        total = (now - self._began) / count
        measured = {
            "input_s": (self._watched.input_s - self._input_s) / count,
            "checkpoint_s": (stalled_s - self._stalled_s) / count,
        }
        waited_s = 0.0 if self._world_size == 1 else _communication_s(self._watched)
        if waited_s is not None:
            measured["communication_s"] = waited_s
        rest = "compute_s" if waited_s is not None else "compute_and_communication_s"
        parts = {**measured, rest: max(0.0, total - sum(measured.values()))}
        return {"steps_per_s": 1.0 / total, "step_s": total, **parts}


def _communication_s(counters: StepCounters) -> float | None:
    """Return the newest sample of a DDP replica. None: there is no replica, or it has no sample yet."""
    replica: Any
    for replica in list(counters.replicas):
        logged: dict[str, int] = replica._get_ddp_logging_data()  # noqa: SLF001 - documented under this name
        if "backward_comm_time" in logged:
            hidden = logged.get("backward_compute_comm_overlap_time", 0)
            return max(0.0, (logged["backward_comm_time"] - hidden) / NANO)
    return None
