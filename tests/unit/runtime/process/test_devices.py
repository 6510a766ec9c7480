"""What NVML reports of a task's GPUs, and what happens if it reports less."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from shoal.runtime.process.gpu_usage import GpuUsage
from shoal.wire import GpuHandle
from tests.support.runtime.tasks import a_task_spec

GPUS = (GpuHandle(index=0, uuid="GPU-a"), GpuHandle(index=1, uuid="GPU-b"))
WATTS = {"GPU-a": 300_000, "GPU-b": 100_000}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A driver with two GPUs. The second one does not report its memory."""

    def memory(handle: str) -> SimpleNamespace:
        if handle == "GPU-b":
            raise pynvml.NVMLError_NotSupported
        return SimpleNamespace(used=1 << 30)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=50))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", WATTS.__getitem__)
    return monkeypatch


def test_values_of_a_tasks_gpus_are_summed(driver: pytest.MonkeyPatch) -> None:
    devices = GpuUsage(a_task_spec(gpu_ids=(0, 1), gpus=GPUS).resources)
    assert devices.look() == {
        "gpu_utilisation": 0.5,
        "gpu_memory_bytes": float(1 << 30),
        "gpu_power_w": 400.0,
    }


def test_task_without_real_gpus_does_not_load_the_driver(driver: pytest.MonkeyPatch) -> None:
    assert GpuUsage(a_task_spec().resources).look() == {}
    assert GpuUsage(a_task_spec(gpu_ids=(0, 1), gpus=GPUS, are_gpus_simulated=True).resources).look() == {}


def test_machine_without_a_driver_reports_no_values(driver: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    driver.setattr(pynvml, "nvmlInit", refuse)
    assert GpuUsage(a_task_spec(gpu_ids=(0, 1), gpus=GPUS).resources).look() == {}
