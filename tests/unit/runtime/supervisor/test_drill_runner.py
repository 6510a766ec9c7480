"""What a supervisor reports of a drill: done, or why not."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.clock import SystemClock
from shoal.engines.fake import VirtualClock
from shoal.runtime.supervisor import drills
from shoal.runtime.supervisor.drills import DrillRunner
from shoal.wire import DrillAct, DrillCommand, DrillResult, Progress
from tests.support.runtime.tasks import a_task_spec


class FakeLeaseRenewer:
    """Holds one drill command, and keeps the results reported to it."""

    def __init__(self, act: DrillAct, rendezvous_round: int | None = None) -> None:
        rank = None if act is DrillAct.KILL_RANKS else 1
        self.drill_command = DrillCommand(
            drill_id="drl_1", act=act, rank=rank, rendezvous_round=rendezvous_round
        )
        self.results: list[DrillResult] = []

    def report_drill(self, drill_result: DrillResult, wait_s: float = 0.0) -> None:
        self.results.append(drill_result)

    def go_silent(self, for_s: float) -> None:
        pass


@pytest.mark.parametrize(
    ("act", "has_hit", "refusal", "is_blamed"),
    [
        (DrillAct.KILL_RANK, True, "", True),
        (DrillAct.KILL_RANK, False, "rank 1 does not run on n1", False),
        (DrillAct.KILL_RANKS, False, "", True),
        (DrillAct.CUT_OFF, True, "", False),
        (DrillAct.HANG_RANK, True, "the program reports no steps", False),
        (DrillAct.KILL_NODE, True, "nothing confines it", False),
    ],
)
def test_group_counts_as_harmed_only_if_the_drill_was_done(
    act: DrillAct, has_hit: bool, refusal: str, is_blamed: bool
) -> None:
    renewer: Any = FakeLeaseRenewer(act)
    rank_group: Any = SimpleNamespace(progress=lambda: None, send=lambda *_: has_hit, rendezvous_round=0)
    unused: Any = None
    log: Any = SimpleNamespace(add_message=lambda _: None)
    runner = DrillRunner(a_task_spec(node="n1", nodes=("n1",)).identity, None, renewer, SystemClock(), log)
    runner.check(rank_group, None, unused, unused)
    (result,) = renewer.results
    assert bool(result.refusal) == bool(refusal)
    assert refusal in result.refusal
    assert runner.take_harmed() is is_blamed


def look(renewer: Any, rank_group: Any, *, times: int = 1) -> DrillRunner:
    unused: Any = None
    log: Any = SimpleNamespace(add_message=lambda _: None)
    runner = DrillRunner(a_task_spec(node="n1", nodes=("n1",)).identity, None, renewer, SystemClock(), log)
    for _ in range(times):
        runner.check(rank_group, None, unused, unused)
    return runner


def rank_group_of(rendezvous_round: int) -> tuple[Any, list[object]]:
    """Return a fake rank group, and the list of signals it is sent."""
    sent: list[object] = []

    def send(*arguments: object) -> bool:
        sent.append(arguments)
        return True

    detector = SimpleNamespace(
        pause=lambda: sent.append("looks for no hang"),
        resume=lambda: sent.append("looks again"),
        expect_hang=lambda: sent.append("knows who hangs"),
    )
    rank_group = SimpleNamespace(
        progress=lambda: None, send=send, rendezvous_round=rendezvous_round, hang_detector=detector
    )
    return rank_group, sent


@pytest.mark.parametrize("act", [DrillAct.KILL_RANK, DrillAct.HANG_RANK, DrillAct.CUT_OFF])
def test_command_for_an_ended_group_harms_no_rank_and_is_reported_as_refused(act: DrillAct) -> None:
    renewer = FakeLeaseRenewer(act, rendezvous_round=2)
    rank_group, sent = rank_group_of(3)
    assert look(renewer, rank_group, times=2).take_harmed() is False
    (result,) = renewer.results
    assert result.refusal == "group 2 had ended before n1 heard of it; group 3 runs now"
    assert sent == []


def test_late_second_command_of_a_drill_is_not_reported_as_refused() -> None:
    renewer = FakeLeaseRenewer(DrillAct.KILL_RANKS, rendezvous_round=2)
    rank_group, sent = rank_group_of(3)
    look(renewer, rank_group, times=2)
    assert (renewer.results, sent) == ([], [])


def test_command_for_a_future_group_waits_for_it() -> None:
    renewer = FakeLeaseRenewer(DrillAct.KILL_RANK, rendezvous_round=3)
    rank_group, sent = rank_group_of(2)
    runner = look(renewer, rank_group)
    assert (renewer.results, sent) == ([], [])
    rank_group.rendezvous_round = 3
    unused: Any = None
    runner.check(rank_group, None, unused, unused)
    assert ([result.refusal for result in renewer.results], len(sent)) == ([""], 1)


def test_hang_detector_is_told_of_a_hang_by_a_drill() -> None:
    renewer = FakeLeaseRenewer(DrillAct.HANG_RANK, rendezvous_round=0)
    rank_group, sent = rank_group_of(0)
    rank_group.progress = lambda: Progress(rendezvous_round=0, step=9, at=0.0, step_s=0.1)
    look(renewer, rank_group)
    assert sent == [(signal.SIGSTOP, 1), "knows who hangs"]


class DamageDrill:
    """A supervisor in the drill that damages a checkpoint, with a fake process that ends on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renewer = FakeLeaseRenewer(DrillAct.CORRUPT, rendezvous_round=0)
        self.rank_group, self.sent = rank_group_of(0)
        self.clock = VirtualClock()
        self.process: Any = SimpleNamespace(status=None, output_tail="64 bytes")
        self.launcher: Any = SimpleNamespace(
            start_function=lambda *_, **__: (1, ()), start_failure=lambda: None
        )
        self.watcher: Any = SimpleNamespace(add=lambda *_: None, has_closed_output=lambda _: True)
        monkeypatch.setattr(drills, "Process", lambda *_, **__: self.process)
        log: Any = SimpleNamespace(add_message=lambda _: None)
        renewer: Any = self.renewer
        task_spec = a_task_spec(node="n1", nodes=("n1",), checkpoint_dir="/saved")
        self._runner = DrillRunner(
            task_spec.identity, task_spec.folders.checkpoint_dir, renewer, self.clock, log
        )

    def look(self) -> list[object]:
        """Return what the ranks and the hang detector are sent now."""
        self.sent.clear()
        self._runner.check(self.rank_group, None, self.launcher, self.watcher)
        return list(self.sent)


STOPPED = ["looks for no hang", (signal.SIGSTOP,)]
GO_ON = [(signal.SIGCONT,), "looks again"]


def test_hang_detector_pauses_while_ranks_are_stopped_for_the_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drill = DamageDrill(monkeypatch)
    assert (drill.look(), drill.look()) == (STOPPED, [])
    drill.process.status = 1
    assert (drill.look(), drill.look()) == (GO_ON, [])
    assert [result.refusal for result in drill.renewer.results] == ["64 bytes"]


def test_stopped_ranks_continue_in_time_if_they_are_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    drill = DamageDrill(monkeypatch)
    drill.look()
    drill.process.status = 0
    assert drill.look() == []
    drill.clock.advance(1.0)
    assert drill.look() == GO_ON


def test_stopped_ranks_of_a_later_group_continue_when_the_damage_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drill = DamageDrill(monkeypatch)
    drill.look()
    drill.rank_group.rendezvous_round = 1
    assert drill.look() == [], "the ranks would save beside the damage"
    drill.process.status = 0
    assert drill.look() == GO_ON
    assert [(result.act, result.refusal) for result in drill.renewer.results] == [(DrillAct.CORRUPT, "")]
