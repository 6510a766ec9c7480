"""What a supervisor says of a drill: done, or why not."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.clock import SystemClock
from shoal.engines.fake import VirtualClock
from shoal.runtime import drills
from shoal.runtime.drills import Driller
from shoal.wire import DrillAct, Drilled, DrillOrder, Progress
from tests.support.shares import an_order


class Renewer:
    """Has one order, and keeps what it is told."""

    def __init__(self, act: DrillAct, generation: int | None = None) -> None:
        rank = None if act is DrillAct.KILL_RANKS else 1
        self.drill = DrillOrder(drill_id="drl_1", act=act, rank=rank, generation=generation)
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
    crew: Any = SimpleNamespace(progress=lambda: None, send=lambda *_: has_hit, generation=0)
    unused: Any = None
    log: Any = SimpleNamespace(say=lambda _: None)
    driller = Driller(an_order(node="n1", nodes=("n1",)), renewer, SystemClock(), log)
    driller.look(crew, None, unused, unused)
    (told,) = renewer.told
    assert bool(told.refusal) == bool(refusal)
    assert refusal in told.refusal
    assert driller.take_blame() is is_blamed


def look(renewer: Any, crew: Any, *, times: int = 1) -> Driller:
    unused: Any = None
    log: Any = SimpleNamespace(say=lambda _: None)
    driller = Driller(an_order(node="n1", nodes=("n1",)), renewer, SystemClock(), log)
    for _ in range(times):
        driller.look(crew, None, unused, unused)
    return driller


def crew_of(generation: int) -> tuple[Any, list[object]]:
    """And the signals it is sent."""
    sent: list[object] = []

    def send(*told: object) -> bool:
        sent.append(told)
        return True

    lookout = SimpleNamespace(
        pause=lambda: sent.append("looks for no hang"),
        go_on=lambda: sent.append("looks again"),
        forewarn=lambda: sent.append("knows who hangs"),
    )
    crew = SimpleNamespace(progress=lambda: None, send=send, generation=generation, lookout=lookout)
    return crew, sent


@pytest.mark.parametrize("act", [DrillAct.KILL_RANK, DrillAct.HANG_RANK, DrillAct.CUT_OFF])
def test_order_for_a_group_that_has_ended_harms_nobody_and_is_told_as_not_done(act: DrillAct) -> None:
    renewer = Renewer(act, generation=2)
    crew, sent = crew_of(3)
    assert look(renewer, crew, times=2).take_blame() is False
    (told,) = renewer.told
    assert told.refusal == "group 2 had ended before n1 heard of it; group 3 runs now"
    assert sent == []


def test_node_that_is_late_for_the_second_part_of_a_drill_undoes_nothing_of_it() -> None:
    renewer = Renewer(DrillAct.KILL_RANKS, generation=2)
    crew, sent = crew_of(3)
    look(renewer, crew, times=2)
    assert (renewer.told, sent) == ([], [])


def test_order_for_a_group_that_is_yet_to_begin_waits_for_it() -> None:
    renewer = Renewer(DrillAct.KILL_RANK, generation=3)
    crew, sent = crew_of(2)
    driller = look(renewer, crew)
    assert (renewer.told, sent) == ([], [])
    crew.generation = 3
    unused: Any = None
    driller.look(crew, None, unused, unused)
    assert ([told.refusal for told in renewer.told], len(sent)) == ([""], 1)


def test_whoever_looks_for_hangs_knows_of_one_that_is_a_drill() -> None:
    renewer = Renewer(DrillAct.HANG_RANK, generation=0)
    crew, sent = crew_of(0)
    crew.progress = lambda: Progress(generation=0, step=9, at=0.0, step_s=0.1)
    look(renewer, crew)
    assert sent == [(signal.SIGSTOP, 1), "knows who hangs"]


class Damaging:
    """A supervisor's part in the drill that damages, with a process that ends when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renewer = Renewer(DrillAct.CORRUPT, generation=0)
        self.crew, self.sent = crew_of(0)
        self.clock = VirtualClock()
        self.process: Any = SimpleNamespace(status=None, last_words="64 bytes")
        self.launcher: Any = SimpleNamespace(start_function=lambda *_, **__: (1, ()), failure=lambda: None)
        self.watcher: Any = SimpleNamespace(add=lambda *_: None, is_silent=lambda _: True)
        monkeypatch.setattr(drills, "Process", lambda *_, **__: self.process)
        log: Any = SimpleNamespace(say=lambda _: None)
        renewer: Any = self.renewer
        order = an_order(node="n1", nodes=("n1",), checkpoint_dir="/saved")
        self._driller = Driller(order, renewer, self.clock, log)

    def look(self) -> list[object]:
        """What the ranks and the one who looks for hangs are told now."""
        self.sent.clear()
        self._driller.look(self.crew, None, self.launcher, self.watcher)
        return list(self.sent)


STOPPED = ["looks for no hang", (signal.SIGSTOP,)]
GO_ON = [(signal.SIGCONT,), "looks again"]


def test_ranks_that_stand_still_for_the_damage_are_not_looked_at_until_they_move_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drill = Damaging(monkeypatch)
    assert (drill.look(), drill.look()) == (STOPPED, [])
    drill.process.status = 1
    assert (drill.look(), drill.look()) == (GO_ON, [])
    assert [told.refusal for told in drill.renewer.told] == ["64 bytes"]


def test_ranks_that_are_never_killed_after_the_damage_go_on_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drill = Damaging(monkeypatch)
    drill.look()
    drill.process.status = 0
    assert drill.look() == []
    drill.clock.advance(1.0)
    assert drill.look() == GO_ON


def test_stopped_ranks_of_a_group_that_follows_go_on_as_soon_as_the_damage_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drill = Damaging(monkeypatch)
    drill.look()
    drill.crew.generation = 1
    assert drill.look() == [], "they would save beside the damage"
    drill.process.status = 0
    assert drill.look() == GO_ON
    assert [(told.act, told.refusal) for told in drill.renewer.told] == [(DrillAct.CORRUPT, "")]
