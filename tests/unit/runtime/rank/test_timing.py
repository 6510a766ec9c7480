"""Where the time of a step goes, measured on what torch itself does."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset

from shoal.runtime.rank import timing
from shoal.runtime.rank.timing import StepTiming, instrument_torch

SLOW_S = 0.02


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(SLOW_S)
        return index


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, float], int]]:
    """The reports about steps. Each step is reported at once."""
    reports: list[tuple[dict[str, float], int]] = []

    class FakeMetricChannel:
        def send(self, values: dict[str, float], step: int) -> None:
            reports.append((values, step))

    monkeypatch.setattr(timing, "TELL_S", 0.0)
    monkeypatch.setattr(timing, "metric_channel", FakeMetricChannel)
    return reports


def parts(values: dict[str, float]) -> float:
    names = ("input_s", "checkpoint_s", "communication_s", "compute_s", "compute_and_communication_s")
    return sum(values.get(name, 0.0) for name in names)


def test_time_in_a_loader_is_input_and_parts_make_up_the_step(reports: list[Any]) -> None:
    steps = StepTiming(should_report=True, world_size=1, stalled_s=0.0)
    for step, _ in enumerate(DataLoader(Slow(), batch_size=1)):
        steps.lap(step, stalled_s=0.0)
    assert [step for _, step in reports] == [0, 1, 2, 3]
    for values, _ in reports:
        assert values["input_s"] >= SLOW_S
        assert values["communication_s"] == 0.0, "there is nobody to talk to"
        assert parts(values) == pytest.approx(values["step_s"])
        assert values["steps_per_s"] == pytest.approx(1.0 / values["step_s"])


def test_time_for_which_saves_blocked_training_is_reported(reports: list[Any]) -> None:
    steps = StepTiming(should_report=True, world_size=1, stalled_s=5.0)
    time.sleep(SLOW_S)
    steps.lap(7, stalled_s=5.0 + SLOW_S / 2)
    assert reports[0][0]["checkpoint_s"] == pytest.approx(SLOW_S / 2)


def test_without_a_communication_sample_the_rest_is_not_divided(
    reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = StepTiming(should_report=True, world_size=4, stalled_s=0.0)
    monkeypatch.setattr(instrument_torch(), "replicas", [])
    steps.lap(0, stalled_s=0.0)
    assert "compute_and_communication_s" in reports[0][0]
    assert not {"compute_s", "communication_s"} & reports[0][0].keys()


def test_other_ranks_say_nothing(reports: list[Any]) -> None:
    StepTiming(should_report=False, world_size=2, stalled_s=0.0).lap(0, stalled_s=0.0)
    assert reports == []
