"""How busy a share's GPUs are, as NVML tells: utilisation, memory, power. Nothing where it cannot tell.

Imported late, by the thread that measures: no start waits for the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pynvml

from shoal.wire import Order

MILLI = 1000.0


class Devices:
    """The GPUs of one share, by their UUID or their number; fewer where some cannot be found."""

    def __init__(self, order: Order) -> None:
        self._handles: list[object] = []
        if not order.gpu_ids or order.are_gpus_simulated:
            return
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for gpu in order.gpus:
                with contextlib.suppress(pynvml.NVMLError):
                    self._handles.append(
                        pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                        if gpu.uuid
                        else pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                    )

    def look(self) -> dict[str, float]:
        """Of all of them together: the mean utilisation from 0 to 1, bytes in use, watts."""
        busy = self._each(lambda one: pynvml.nvmlDeviceGetUtilizationRates(one).gpu / 100.0)
        used = self._each(lambda one: float(pynvml.nvmlDeviceGetMemoryInfo(one).used))
        watts = self._each(lambda one: pynvml.nvmlDeviceGetPowerUsage(one) / MILLI)
        found: dict[str, float] = {}
        if busy:
            found["gpu_utilisation"] = sum(busy) / len(busy)
        if used:
            found["gpu_memory_bytes"] = sum(used)
        if watts:
            found["gpu_power_w"] = sum(watts)
        return found

    def _each(self, read: Callable[[object], float]) -> list[float]:
        """What each tells; a slice of a GPU, say, has no power of its own."""
        found = []
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                found.append(read(handle))
        return found
