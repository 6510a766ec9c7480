"""Intervals hold as often as they claim, however bad the predictions are."""

from __future__ import annotations

import pytest

from shoal.scheduler.prediction.calibration import NUM_ENOUGH, TICK_S, Calibration
from shoal.scheduler.prediction.scenarios import StartSpan

SPAN = StartSpan(600.0, 1200.0, 2400.0)


def test_uncalibrated_interval_is_wider_than_the_scenarios() -> None:
    interval = Calibration().interval(SPAN)
    assert interval == pytest.approx((600 - TICK_S, 2460 * 1.8 - 60 + TICK_S))


def test_interval_of_a_start_now_begins_now() -> None:
    assert Calibration().interval(StartSpan(0.0, 0.0, 0.0)).low_s == 0.0


def test_starts_later_than_predicted_widen_the_interval() -> None:
    calibration = Calibration()
    for _ in range(NUM_ENOUGH):
        calibration.note(SPAN, calibration.interval(SPAN), 9940.0)
    assert calibration.interval(SPAN).high_s == pytest.approx(9940.0 + TICK_S)


def test_starts_earlier_than_predicted_narrow_the_interval() -> None:
    calibration = Calibration()
    for _ in range(NUM_ENOUGH):
        calibration.note(SPAN, calibration.interval(SPAN), 600.0)
    assert calibration.interval(SPAN) == pytest.approx((600.0 - TICK_S, 600.0 + TICK_S))


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_nine_of_ten_starts_fall_inside_once_it_has_learned(factor: float) -> None:
    """Waits are spread evenly over a factor of 100 around the prediction times a factor."""
    calibration, inside = Calibration(), []
    for number in range(4000):
        waited_s = 1200.0 * factor * 10 ** (2 * (number * 0.618034 % 1.0) - 1)
        interval = calibration.interval(SPAN)
        inside.append(interval.low_s <= waited_s <= interval.high_s)
        calibration.note(SPAN, interval, waited_s)
    assert sum(inside[500:]) / len(inside[500:]) == pytest.approx(0.9, abs=0.01)
