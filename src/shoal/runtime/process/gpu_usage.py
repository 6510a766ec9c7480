"""How busy a task's GPUs are according to NVML: utilisation, memory and power. Values that NVML lacks are
left out.

Imported late, by the thread that measures, so that no start waits for the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pynvml

from shoal.wire import TaskResources

MILLI = 1000.0


class GpuUsage:
    """The GPUs of one task, by UUID or number. GPUs that cannot be found are left out."""

    def __init__(self, resources: TaskResources) -> None:
        self._handles: list[object] = []
        if not resources.has_real_gpus:
            return
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            for gpu in resources.gpus:
                with contextlib.suppress(pynvml.NVMLError):
                    self._handles.append(
                        pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                        if gpu.uuid
                        else pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
                    )

    def look(self) -> dict[str, float]:
        """Return values for all GPUs together: the mean utilisation from 0 to 1, bytes in use, watts."""
        busy = self._each(lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)
        used = self._each(lambda handle: float(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
        watts = self._each(lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / MILLI)
        values: dict[str, float] = {}
        if busy:
            values["gpu_utilisation"] = sum(busy) / len(busy)
        if used:
            values["gpu_memory_bytes"] = sum(used)
        if watts:
            values["gpu_power_w"] = sum(watts)
        return values

    def _each(self, read: Callable[[object], float]) -> list[float]:
        """Return the values that GPUs give. For example, a slice of a GPU has no power of its own."""
        values = []
        for handle in self._handles:
            with contextlib.suppress(pynvml.NVMLError):
                values.append(read(handle))
        return values
