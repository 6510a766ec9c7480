"""How a share's end and what follows it are told."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.runtime.ending import recovered
from shoal.wire import Recovery


@pytest.mark.parametrize(
    ("kept", "spares", "lost", "words"),
    [
        (1, 1, 1, "1 step lost: 1 rank lived on, 1 was waiting"),
        (3, 0, 0, "0 steps lost: 3 ranks lived on, 0 were waiting"),
    ],
)
def test_one_is_not_told_as_many(kept: int, spares: int, lost: int, words: str) -> None:
    times: dict[str, Any] = {"failed_at": 0.0, "formed_s": 0.1, "joined_s": 0.2, "stepped_s": 0.25}
    told = Recovery(generation=1, node="n1", kept=kept, spares=spares, steps_lost=lost, first_step=9, **times)
    assert recovered(told) == f"group 1 made its first step 0.25 s after the failure, {words}"
