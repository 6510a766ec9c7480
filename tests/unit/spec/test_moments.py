"""Moments as people write them."""

from __future__ import annotations

import pytest

from shoal.spec.quantity import parse_moment

NOW = 1_800_000_000.0
"""2027-01-15 08:00 UTC."""
HOUR = 3600.0


@pytest.mark.parametrize(
    ("written", "after_s"),
    [
        ("now", 0.0),
        ("2h", 2 * HOUR),
        (90, 90.0),
        ("08:01", 60.0),
        ("14:00", 6 * HOUR),
        ("08:00", 24 * HOUR),
        ("07:59", 24 * HOUR - 60.0),
        ("2027-01-15T09:00", HOUR),
        ("2027-01-15 09:00:30", HOUR + 30.0),
        ("2027-01-15T09:00Z", HOUR),
        ("2027-01-15T09:00+02:00", -HOUR),
        ("2027-01-16T08:00", 24 * HOUR),
    ],
)
def test_moment_is_read_as_it_is_meant(written: object, after_s: float) -> None:
    assert parse_moment(written, NOW) == NOW + after_s


@pytest.mark.parametrize(
    "written", ["", "soon", "25:00", "14:60", "2027-02-30T08:00", "2027-01-15", None, True]
)
def test_text_that_is_no_moment_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_moment(written, NOW)
