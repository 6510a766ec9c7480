"""What NVML tells of a share's GPUs, and what happens where it tells less."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from shoal.runtime.devices import Devices
from shoal.wire import GpuHandle
from tests.support.shares import an_order

GPUS = (GpuHandle(index=0, uuid="GPU-a"), GpuHandle(index=1, uuid="GPU-b"))
WATTS = {"GPU-a": 300_000, "GPU-b": 100_000}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A driver with two GPUs of which the second cannot tell its memory."""

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


def test_gpus_of_a_share_are_told_together(driver: pytest.MonkeyPatch) -> None:
    devices = Devices(an_order(gpu_ids=(0, 1), gpus=GPUS))
    assert devices.look() == {
        "gpu_utilisation": 0.5,
        "gpu_memory_bytes": float(1 << 30),
        "gpu_power_w": 400.0,
    }


def test_share_without_gpus_or_with_simulated_ones_asks_nobody(driver: pytest.MonkeyPatch) -> None:
    assert Devices(an_order()).look() == {}
    assert Devices(an_order(gpu_ids=(0, 1), gpus=GPUS, are_gpus_simulated=True)).look() == {}


def test_machine_without_a_driver_has_nothing_to_tell(driver: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    driver.setattr(pynvml, "nvmlInit", refuse)
    assert Devices(an_order(gpu_ids=(0, 1), gpus=GPUS)).look() == {}
