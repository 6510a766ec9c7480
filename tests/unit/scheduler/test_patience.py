"""How long the first of a queue lets others pass where nobody knows when it could start."""

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


def test_a_least_patience_that_was_asked_for_is_kept_whatever_the_most_is() -> None:
    assert Policy(patience_s=inf).patience_of(10.0) == inf
