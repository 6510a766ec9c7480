"""What a supervisor says of a drill: done, or why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.clock import SystemClock
from shoal.runtime.drills import Driller
from shoal.wire import DrillAct, Drilled, DrillOrder
from tests.support.shares import an_order


class Renewer:
    """Has one order, and keeps what it is told."""

    def __init__(self, act: DrillAct) -> None:
        self.drill = DrillOrder(drill_id="drl_1", act=act, rank=None if act is DrillAct.KILL_RANKS else 1)
        self.told: list[Drilled] = []

    def tell_drilled(self, drilled: Drilled, wait_s: float = 0.0) -> None:
        self.told.append(drilled)

    def cut_off(self, for_s: float) -> None:
        pass


@pytest.mark.parametrize(
    ("act", "has_hit", "refusal", "is_blamed"),
    [
        (DrillAct.KILL_RANK, True, "", True),
        (DrillAct.KILL_RANK, False, "rank 1 does not run on n1", False),
        (DrillAct.KILL_RANKS, False, "", True),
        (DrillAct.CUT_OFF, True, "", False),
        (DrillAct.HANG_RANK, True, "the program has told of no step", False),
        (DrillAct.KILL_NODE, True, "nothing confines it", False),
    ],
)
def test_only_what_was_done_is_blamed(act: DrillAct, has_hit: bool, refusal: str, is_blamed: bool) -> None:
    renewer: Any = Renewer(act)
    crew: Any = SimpleNamespace(progress=lambda: None, send=lambda *_: has_hit)
    unused: Any = None
    log: Any = SimpleNamespace(say=lambda _: None)
    driller = Driller(an_order(node="n1", nodes=("n1",)), renewer, SystemClock(), log)
    driller.look(crew, None, unused, unused)
    (told,) = renewer.told
    assert bool(told.refusal) == bool(refusal)
    assert refusal in told.refusal
    assert driller.take_blame() is is_blamed
