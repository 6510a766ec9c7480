"""In which order a share's run does what has one: when the standby goes, and whom that never holds up."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shoal.runtime import listening, shared_memory
from shoal.runtime.board import Request
from shoal.runtime.ending import SUCCEEDED, Ending, Hang
from shoal.runtime.share import TOGETHER_S, ShareRun
from shoal.wire import EndKind


class Run:
    """A run whose parts only write down what is asked of them."""

    def __init__(self) -> None:
        self.parts = MagicMock()
        run: Any = ShareRun.__new__(ShareRun)
        self.run = run
        for name in ("minder", "confinement", "crew", "restarts", "watcher", "meter", "log", "reasons"):
            setattr(run, f"_{name}", getattr(self.parts, name))
        run._running, run._renewer = [], None
        run._server = SimpleNamespace(death=None, should_end=False, look=lambda: None, release=lambda: None)
        run._order = SimpleNamespace(node="node-1")
        run._share = SimpleNamespace(
            home="/nowhere", scratch="/nowhere/scratch", stand_ins="/nowhere/stand-ins"
        )
        run._clock = SimpleNamespace(monotonic=lambda: 0.0)
        run._over_at = 0.0

    def asked(self) -> list[str]:
        return [name for name, _, _ in self.parts.mock_calls if "()" not in name]


def test_standby_gives_way_before_ranks_are_asked_to_save() -> None:
    made = Run()
    made.run._stop(Ending(kind=EndKind.STOPPED, message="preempted", grace_s=30.0))
    assert made.asked()[:2] == ["minder.give_way", "crew.tell"]


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        (EndKind.STOPPED, Request.SAVE),
        (EndKind.TIME_LIMIT, Request.SAVE),
        (EndKind.EXITED, Request.GO),
        (EndKind.FENCED, Request.GO),
    ],
)
def test_ranks_are_told_whether_they_can_save_together(kind: EndKind, request_: Request) -> None:
    made = Run()
    made.run._stop(Ending(kind=kind, grace_s=30.0))
    made.parts.crew.tell.assert_called_once_with(request_)


def test_standby_gives_way_before_the_ranks_wait_for_another_group() -> None:
    made = Run()
    made.run._regroup(Ending(kind=EndKind.EXITED, message="rank 0 exited"), None)
    assert made.asked()[:2] == ["minder.give_way", "restarts.begin"]


def test_ranks_are_killed_before_anything_waits_for_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (shared_memory, listening):
        monkeypatch.setattr(room, "give_back", lambda *_: None)
    made = Run()
    made.run._bury()
    assert made.asked()[:2] == ["confinement.kill", "minder.end"]


def test_share_whose_rank_does_not_die_does_not_run_for_ever() -> None:
    """It stops, where people see it, and says why."""
    made = Run()
    made.run._running = [SimpleNamespace(status=None)]
    made.run._order.grace_s = 30.0
    made.run._driller = MagicMock()
    made.parts.watcher.first_failed = made.parts.reasons.now.return_value = None
    made.parts.restarts.is_wanted = False
    hung = Hang(told="no step for 9 s", rank=3, place="read (data.py:7)")
    made.parts.crew.lookout.hung = made.parts.crew.endless_hang = hung
    end = made.run._follow(MagicMock(), "a rank", made.parts.crew)
    assert (end.kind, end.rank, end.is_hang, end.grace_s) == (EndKind.SIGNALED, 3, True, 30.0)
    told = (
        "rank 3 hung and was killed: no step for 9 s; it stood in read (data.py:7); its process does not die"
    )
    assert end.message == told


STOPPED = Ending(kind=EndKind.STOPPED, message="stopped by SIGTERM", is_unasked=True)


def waited(end: Ending, heard_at: float | None) -> tuple[Ending | None, float]:
    """What explains this end, if SIGTERM comes to us so much later, and for how long that was waited for."""
    made, now = Run(), [0.0]
    made.run._clock = SimpleNamespace(monotonic=lambda: now[0])

    def heard() -> Ending | None:
        return STOPPED if heard_at is not None and now[0] >= heard_at else None

    def turn(timeout_s: float) -> None:
        until = now[0] + timeout_s
        now[0] = until if heard_at is None or heard_at <= now[0] else min(until, heard_at)

    made.parts.reasons.now, made.parts.reasons.signalled, made.parts.watcher.turn = heard, heard, turn
    return made.run._reason_behind(end), now[0]


def ended_by(number: signal.Signals | None = None, code: int | None = None) -> Ending:
    kind = EndKind.EXITED if number is None else EndKind.SIGNALED
    return Ending(kind=kind, message="rank 0", signal=number, exit_code=code, rank=0)


@pytest.mark.parametrize("end", [ended_by(signal.SIGTERM), ended_by(code=143)])
def test_rank_that_died_of_sigterm_is_blamed_only_when_none_has_come_to_us(end: Ending) -> None:
    assert waited(end, 0.0) == (STOPPED, 0.0)
    assert waited(end, 0.3) == (STOPPED, 0.3)
    assert waited(end, None) == (None, TOGETHER_S)


@pytest.mark.parametrize("end", [ended_by(signal.SIGKILL), ended_by(signal.SIGSEGV), ended_by(code=1)])
def test_nobody_waits_before_a_rank_is_begun_anew_that_died_of_anything_else(end: Ending) -> None:
    assert waited(end, 0.0) == (STOPPED, 0.0), "it may have ended so for being told to"
    assert waited(end, 0.3) == (None, 0.0)


@pytest.mark.parametrize(
    ("end", "heard_at", "behind"),
    [
        (Ending(kind=EndKind.OUT_OF_MEMORY, exit_code=143, rank=0), 0.0, None),
        (Ending(kind=EndKind.OUT_OF_MEMORY, signal=signal.SIGKILL, rank=0), 0.0, None),
        (Ending(kind=EndKind.SETUP_FAILED, exit_code=1), 0.0, None),
        (Ending(kind=EndKind.SETUP_FAILED, signal=signal.SIGTERM), 0.3, STOPPED),
    ],
)
def test_signal_explains_neither_memory_that_ran_out_nor_a_setup_that_failed_by_itself(
    end: Ending, heard_at: float, behind: Ending | None
) -> None:
    assert waited(end, heard_at)[0] == behind


def in_hindsight(end: Ending, heard_at: float | None, buried_at: float = 10.0) -> tuple[Ending, float]:
    """What is told of ranks that ended so at 10, and when, by when SIGTERM came and they were buried."""
    made, now, outcomes = Run(), [10.0], list[Ending]()

    def live() -> Ending:
        made.run._over_at = now[0]
        return end

    def signalled(least_s: float) -> Ending | None:
        return STOPPED if heard_at is not None and now[0] - heard_at >= max(least_s, 0.0) else None

    def turn(timeout_s: float) -> None:
        until = now[0] + timeout_s
        now[0] = until if heard_at is None or heard_at <= now[0] else min(until, heard_at)

    made.run._clock = SimpleNamespace(monotonic=lambda: now[0])
    made.parts.reasons.signalled, made.parts.watcher.turn = signalled, turn
    made.run._listen, made.run._live = lambda: None, live
    made.run._bury = lambda: now.__setitem__(0, buried_at)
    made.run._outcome, made.run._report = lambda end: end, outcomes.append
    made.run.run()
    return outcomes[0], now[0]


def test_rank_that_ended_well_has_not_succeeded_if_a_signal_came_before_that_is_told() -> None:
    assert in_hindsight(SUCCEEDED, 9.9) == (STOPPED, 10.0)
    assert in_hindsight(SUCCEEDED, 10.2, buried_at=10.3) == (STOPPED, 10.3)
    assert in_hindsight(SUCCEEDED, None) == (SUCCEEDED, 10.0), "nobody waits"


@pytest.mark.parametrize("end", [ended_by(code=1), ended_by(code=75), ended_by(signal.SIGKILL)])
def test_rank_has_not_failed_if_a_signal_to_all_follows_its_end(end: Ending) -> None:
    assert in_hindsight(end, 10.1) == (STOPPED, 10.1)
    assert in_hindsight(end, None) == (end, 10.0 + TOGETHER_S)
    assert in_hindsight(end, None, buried_at=11.0) == (end, 11.0), "nobody waits twice"
    assert in_hindsight(end, 10.8, buried_at=11.0) == (end, 11.0), "it came too late to be why"


def test_nobody_waits_for_a_signal_that_would_explain_nothing() -> None:
    end = Ending(kind=EndKind.OUT_OF_MEMORY, rank=0)
    assert in_hindsight(end, 10.1) == (end, 10.0)


@pytest.mark.parametrize(("heard_at", "told"), [(5.0, STOPPED), (10.4, STOPPED), (11.0, SUCCEEDED)])
def test_signal_that_comes_while_what_is_left_does_not_die_finds_a_success_as_it_was(
    heard_at: float, told: Ending
) -> None:
    made, now = Run(), [10.0]
    made.run._clock = SimpleNamespace(monotonic=lambda: now[0])
    made.run._running = [SimpleNamespace(status=0)]
    made.run._driller = MagicMock()
    made.parts.watcher.first_failed = None
    assert made.run._follow(MagicMock(), "a rank", made.parts.crew) == SUCCEEDED
    now[0] = 70.0  # the burial took a minute
    made.parts.reasons.signalled = lambda least_s: STOPPED if now[0] - heard_at >= least_s else None
    assert made.run._in_hindsight(SUCCEEDED) == told
