"""Priority classes are bands of numbers."""

from __future__ import annotations

import pytest

from shoal.scheduler.classes import CLASSES, PriorityClass, class_of, value_of


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
    assert class_of(priority).name == name


def test_a_job_that_says_nothing_gives_way_and_makes_nobody_else_do_so() -> None:
    silent = class_of(0)
    assert (silent.can_preempt, silent.is_preemptible) == (False, True)


def test_the_order_in_which_an_operator_lists_classes_says_nothing() -> None:
    listed = (PriorityClass(name="high", value=9), PriorityClass(name="low", value=-9))
    assert [class_of(number, listed).name for number in (-10, 8, 9)] == ["low", "low", "high"]


def test_a_name_that_is_no_class_has_no_value() -> None:
    assert value_of("production", CLASSES) == 50
    assert value_of("vip", CLASSES) is None
