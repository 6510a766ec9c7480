"""How long the first job of a queue lets others pass if its start time is unknown."""

from __future__ import annotations

from math import inf

import pytest

from shoal.scheduler import Policy


@pytest.mark.parametrize(
    "expected_s, patience_s",
    [(None, 600.0), (10.0, 600.0), (3600.0, 86_400.0), (7 * 86_400.0, 2 * 86_400.0)],
)
def test_patience_follows_what_is_expected_between_two_bounds(
    expected_s: float | None, patience_s: float
) -> None:
    assert Policy().patience_of(expected_s) == patience_s


def test_a_configured_minimum_patience_overrides_the_maximum() -> None:
    assert Policy(patience_s=inf).patience_of(10.0) == inf
