"""The measurement of fairness runs, in short: what it measures is its own affair."""

from __future__ import annotations

import pytest

from benchmarks.fairness.__main__ import GREEDY, data_plane, measure

pytestmark = pytest.mark.slow


async def test_everybody_is_answered_beside_a_greedy_caller() -> None:
    with data_plane() as port:
        found = await measure(port, rounds=1, seconds=2.0)
    alone, beside, together = found.values()
    assert alone[0]
    assert alone[1] == 0
    assert beside[0]
    assert beside[1] >= GREEDY
    assert together[0]
