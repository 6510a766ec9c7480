"""A short run of the fairness measurement. Its numbers are not checked here."""

from __future__ import annotations

import pytest

from benchmarks.fairness.__main__ import GREEDY, data_plane, measure

pytestmark = pytest.mark.slow


async def test_every_caller_is_answered_beside_a_greedy_one() -> None:
    with data_plane() as port:
        results = await measure(port, rounds=1, seconds=2.0)
    alone, beside, together = results.values()
    assert alone[0]
    assert alone[1] == 0
    assert beside[0]
    assert beside[1] >= GREEDY
    assert together[0]
