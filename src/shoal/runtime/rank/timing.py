"""Where the time of a step goes: input, checkpoints, communication, the rest. Measured without slowing it.

Input is the time spent in torch's DataLoader, checkpoints the time that saves held the training thread up.
Communication is what DDP itself samples (the first ten steps and every hundredth): the part of the reduction
of gradients that the backward pass did not hide. Where nobody measures it, as in FSDP, the rest stays whole.
"""

from __future__ import annotations

import functools
import time
from typing import Any
from weakref import WeakSet

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shoal.runtime.metrics import voice

TELL_S = 1.0
NANO = 1e9


class Watched:
    """What is seen of torch's own classes, in this process."""

    def __init__(self) -> None:
        self.input_s = 0.0
        self.replicas: WeakSet[DistributedDataParallel] = WeakSet()


_watched = Watched()


@functools.cache
def watch() -> Watched:
    """Begin to see loaders and replicas, once for each process. Costs two readings of the clock a batch."""
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


class Timing:
    """The steps of one rank in one group, told about once a second."""

    def __init__(self, *, is_told: bool, world_size: int, stalled_s: float) -> None:
        self._watched = watch()
        self._is_told = is_told
        self._world_size = world_size
        self._begin(time.perf_counter(), stalled_s)

    def lap(self, step: int, stalled_s: float) -> None:
        """This step is complete. `stalled_s`: how long saves have held this process up, in all."""
        self._num_steps += 1
        now = time.perf_counter()
        if now < self._began + TELL_S:
            return
        if self._is_told:
            voice().say(self._parts(now, stalled_s), step)
        self._begin(now, stalled_s)

    def _begin(self, now: float, stalled_s: float) -> None:
        self._began, self._num_steps = now, 0
        self._input_s, self._stalled_s = self._watched.input_s, stalled_s

    def _parts(self, now: float, stalled_s: float) -> dict[str, float]:
        """Seconds of a step, on average since they were last told."""
        count = self._num_steps
        total = (now - self._began) / count
        known = {
            "input_s": (self._watched.input_s - self._input_s) / count,
            "checkpoint_s": (stalled_s - self._stalled_s) / count,
        }
        waited_s = 0.0 if self._world_size == 1 else _communication_s(self._watched)
        if waited_s is not None:
            known["communication_s"] = waited_s
        rest = "compute_s" if waited_s is not None else "compute_and_communication_s"
        parts = {**known, rest: max(0.0, total - sum(known.values()))}
        return {"steps_per_s": 1.0 / total, "step_s": total, **parts}


def _communication_s(watched: Watched) -> float | None:
    """What the newest sample of a replica says; None: there is no replica, or it has no sample yet."""
    replica: Any
    for replica in list(watched.replicas):
        told: dict[str, int] = replica._get_ddp_logging_data()  # noqa: SLF001 - documented under this name
        if "backward_comm_time" in told:
            hidden = told.get("backward_compute_comm_overlap_time", 0)
            return max(0.0, (told["backward_comm_time"] - hidden) / NANO)
    return None
