"""Priority classes are bands of numbers."""

from __future__ import annotations

import pytest

from shoal.scheduler.facts.policy import DEFAULT_CLASSES, PriorityClass, class_value, priority_class


@pytest.mark.parametrize(
    "priority, name",
    [
        (-1000, "idle"),
        (-1, "idle"),
        (0, "batch"),
        (49, "batch"),
        (50, "production"),
        (80, "interactive"),
        (1000, "interactive"),
    ],
)
def test_every_number_is_in_the_band_of_one_class(priority: int, name: str) -> None:
    assert priority_class(priority).name == name


def test_a_job_without_a_priority_is_preemptible_and_preempts_none() -> None:
    silent = priority_class(0)
    assert (silent.can_preempt, silent.is_preemptible) == (False, True)


def test_the_order_of_configured_classes_does_not_matter() -> None:
    listed = (PriorityClass(name="high", value=9), PriorityClass(name="low", value=-9))
    assert [priority_class(number, listed).name for number in (-10, 8, 9)] == ["low", "low", "high"]


def test_an_unknown_class_name_has_no_value() -> None:
    assert class_value("production", DEFAULT_CLASSES) == 50
    assert class_value("vip", DEFAULT_CLASSES) is None
