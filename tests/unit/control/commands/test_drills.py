"""Drills from the request to the result: which node is asked, how often, and how its reports are judged."""

from __future__ import annotations

import msgspec
import pytest

from shoal.control.commands import drills
from shoal.control.loops import drill_watch
from shoal.control.loops.drill_watch import watch_drills
from shoal.control.memory.leases import QUIET_S
from shoal.engines.fake import Act, always
from shoal.model.drill import UNREAD, Drill, DrillEvidence, DrillKind, DrillReport, judge_drill
from shoal.model.job import Job
from shoal.wire import DrillAct, DrillResult, EndKind, Progress, TaskPhase
from tests.support.planes.bench import ControlPlaneLab, result_of
from tests.support.planes.drilled_job import (
    completed_drill,
    drilled_job,
    newest_result,
    rank_failure,
    recovery,
    renew_lease,
    start_drill,
)


@pytest.fixture
def lab() -> ControlPlaneLab:
    return ControlPlaneLab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


def test_only_the_node_of_the_rank_is_asked_until_it_reports_the_act(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    drill = start_drill(lab, job)
    assert (drill.node, drill.rank) == ("n2", 1), "the last one by default"
    assert renew_lease(lab, job, "n1").drill is None
    command = renew_lease(lab, job, "n2").drill
    assert command is not None
    assert (command.act, command.rank, command.rendezvous_round) == (DrillAct.KILL_RANK, 1, 0)
    assert renew_lease(lab, job, "n2").drill == command, "an answer may be lost"
    assert renew_lease(lab, job, "n2", drill_result=completed_drill(lab, command)).drill is None


def test_recovery_is_measured_from_when_it_was_done(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill)
    renew_lease(lab, job, "n2", drill_result=drilled)
    lab.clock.advance(0.25)
    renew_lease(lab, job, "n2", drill_result=drilled, failure=rank_failure(lab, job))
    for node in ("n1", "n2"):
        renew_lease(
            lab,
            job,
            node,
            rendezvous_round=1,
            recovery=recovery(lab, node, first_step=100),
            drill_result=drilled,
        )
    assert newest_result(lab) is None, "the window is not over"
    progress = Progress(rendezvous_round=1, step=140, at=lab.clock.now() + 5.0, step_s=0.1)
    renew_lease(lab, job, "n1", rendezvous_round=1, progress=progress)
    result = newest_result(lab, 5.0)
    assert result is not None
    assert (result.outcome, result.noticed_s, result.stepped_s) == ("recovered", 0.25, 0.75)
    assert (result.steps_lost, result.window_s, result.step_s) == (1, 6.25, 0.1)
    assert result.goodput == pytest.approx(4.0 / 6.25, abs=1e-3)


def test_recovery_of_a_job_that_succeeded_within_the_window_is_reported(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill)
    renew_lease(lab, job, "n2", drill_result=drilled, failure=rank_failure(lab, job))
    for node in ("n1", "n2"):
        renew_lease(
            lab,
            job,
            node,
            rendezvous_round=1,
            recovery=recovery(lab, node, first_step=100),
            drill_result=drilled,
        )
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(rank_failure(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        renew_lease(lab, job, node, rendezvous_round=1, phase=TaskPhase.ENDED, outcome=ended)
    result = newest_result(lab, 1.0)
    assert result is not None
    assert (result.outcome, result.because, result.stepped_s, result.steps_lost) == ("recovered", "", 0.5, 1)


@pytest.mark.parametrize(("before_s", "after_s"), [(0.4, 0.1), (0.1, 0.4), (None, 0.1), (0.1, None)])
def test_goodput_is_measured_against_the_faster_pace_so_that_a_slow_start_does_not_raise_it(
    lab: ControlPlaneLab, before_s: float | None, after_s: float | None
) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.PARTITION, for_s=1.0)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill, step_s=before_s)
    lab.clock.advance(10.0)
    progress = Progress(rendezvous_round=0, step=150, at=lab.clock.now(), step_s=after_s)
    renew_lease(lab, job, "n2", drill_result=drilled, progress=progress)
    result = newest_result(lab)
    assert result is not None
    assert (result.goodput, result.window_s, result.step_s) == (0.5, 10.0, 0.1)


def test_job_without_steps_in_the_window_has_low_goodput(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.PARTITION, for_s=1.0, window_s=20.0)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill)
    lab.clock.advance(2.0)
    last = Progress(rendezvous_round=0, step=120, at=lab.clock.now(), step_s=0.1)
    renew_lease(lab, job, "n2", drill_result=drilled, progress=last)
    assert newest_result(lab, 18.0) is None, "it may have yet to say how far it is"
    result = newest_result(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.goodput, result.window_s) == (0.1, 20.0)


def test_step_under_way_at_the_end_of_the_window_is_neither_counted_nor_charged(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.PARTITION, for_s=1.0, window_s=20.0)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill, step_s=8.0)
    lab.clock.advance(16.0)
    last = Progress(rendezvous_round=0, step=102, at=lab.clock.now(), step_s=8.0)
    renew_lease(lab, job, "n2", drill_result=drilled, progress=last)
    newest_result(lab, 4.0)
    result = newest_result(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.goodput, result.window_s) == (1.0, 16.0)


def test_hang_of_a_program_that_has_just_begun_is_left_to_its_supervisor(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    assert start_drill(lab, job, DrillKind.HANG).kind is DrillKind.HANG


def test_hang_is_not_refused_before_the_first_renewal(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    lab.clock.advance(drills.SETTLED_S + 1)
    lab.restart()
    assert start_drill(lab, job, DrillKind.HANG).kind is DrillKind.HANG


def test_a_job_that_makes_no_step_in_time_has_not_recovered(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, within_s=30.0)
    renew_lease(lab, job, "n2", drill_result=completed_drill(lab, renew_lease(lab, job, "n2").drill))
    assert newest_result(lab, 10.0) is None
    result = newest_result(lab, 30.0)
    assert result is not None
    assert result.outcome == "not recovered"
    assert "no step within 30 s; attempt 1 is running, rendezvous round 0" in result.because


def test_drill_on_an_unreachable_supervisor_was_not_done(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, within_s=30.0)
    result = newest_result(lab, 31.0)
    assert result is not None
    assert (result.outcome, result.because) == (
        "not done",
        "the supervisor on n2 was not reached within 30 s",
    )
    assert renew_lease(lab, job, "n2").drill is None, "and will not do it later"


def test_drill_on_a_job_that_ended_before_was_not_done(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(rank_failure(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        renew_lease(lab, job, node, phase=TaskPhase.ENDED, outcome=ended)
    assert lab.status(job) == "succeeded"
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.because) == (
        "not done",
        "the job had ended (succeeded) before the drill did anything",
    )


def test_every_rank_is_killed_only_after_the_checkpoint_was_damaged(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.CORRUPT_CHECKPOINT)
    assert renew_lease(lab, job, "n2").drill is None
    first = renew_lease(lab, job, "n1").drill
    assert first is not None
    assert first.act is DrillAct.CORRUPT
    second = renew_lease(lab, job, "n1", drill_result=completed_drill(lab, first, detail="64 bytes")).drill
    other = renew_lease(lab, job, "n2").drill
    assert second is not None
    assert other is not None
    assert (second.act, other.act, other.rank) == (DrillAct.KILL_RANKS, DrillAct.KILL_RANKS, None)


def damaged(lab: ControlPlaneLab, job: Job) -> DrillResult:
    """The checkpoint is damaged, and the control plane has no report of it."""
    start_drill(lab, job, DrillKind.CORRUPT_CHECKPOINT, within_s=30.0)
    return completed_drill(lab, renew_lease(lab, job, "n1").drill, detail="64 bytes were changed")


def test_damage_counts_as_done_if_ranks_restarted_before_the_kill(
    lab: ControlPlaneLab,
) -> None:
    job = drilled_job(lab)
    damage = damaged(lab, job)
    renew_lease(lab, job, "n1", failure=rank_failure(lab, job, "n1"))
    for node in ("n1", "n2"):
        again = recovery(lab, node, first_step=91)
        answer = renew_lease(
            lab, job, node, rendezvous_round=1, drill_result=damage if node == "n1" else None, recovery=again
        )
        assert answer.drill is None, "ranks of the next group are not harmed"
    result = newest_result(lab, 40.0)
    assert result is not None
    assert (result.outcome, result.steps_lost) == ("recovered", 10)
    assert (result.because, result.detail) == (UNREAD, "64 bytes were changed")


def test_damage_counts_as_done_if_the_job_ended_before_the_kill(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    damage = damaged(lab, job)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(rank_failure(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        drilled = damage if node == "n1" else None
        renew_lease(lab, job, node, phase=TaskPhase.ENDED, outcome=ended, drill_result=drilled)
    result = newest_result(lab)
    assert result is not None
    assert result.outcome == "recovered"


def test_damage_without_a_killed_rank_is_reported(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    renew_lease(lab, job, "n1", drill_result=damaged(lab, job))
    result = newest_result(lab, 40.0)
    assert result is not None
    assert result.outcome == "not done"
    assert "but the newest checkpoint is damaged" in result.because
    assert result.detail == "64 bytes were changed"


def test_refusal_of_a_node_is_the_result_of_the_drill(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.CORRUPT_CHECKPOINT)
    command = renew_lease(lab, job, "n1").drill
    renew_lease(lab, job, "n1", drill_result=completed_drill(lab, command, refusal="there is no checkpoint"))
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.because) == ("not done", "there is no checkpoint")


def test_a_node_that_was_cut_off_and_trained_on_is_unharmed(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.PARTITION, for_s=10.0)
    command = renew_lease(lab, job, "n2").drill
    assert command is not None
    assert (command.act, command.for_s) == (DrillAct.CUT_OFF, 10.0)
    drilled = completed_drill(lab, command)
    lab.clock.advance(10.0)
    progress = Progress(rendezvous_round=0, step=200, at=lab.clock.now(), step_s=0.1)
    renew_lease(lab, job, "n2", drill_result=drilled, progress=progress)
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.steps_lost, result.goodput) == ("unharmed", 0, 1.0)


def test_drill_continues_after_a_restart_of_the_control_plane(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    drill = start_drill(lab, job, within_s=30.0)
    lab.restart()
    assert newest_result(lab) is None
    command = renew_lease(lab, job, "n2").drill
    assert command is not None
    assert command.drill_id == drill.drill_id


def test_damaged_checkpoint_is_judged_by_a_control_plane_that_knows_only_the_kills(
    lab: ControlPlaneLab,
) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.CORRUPT_CHECKPOINT, within_s=30.0)
    killing = renew_lease(
        lab, job, "n1", drill_result=completed_drill(lab, renew_lease(lab, job, "n1").drill)
    ).drill
    lab.restart()
    newest_result(lab)
    assert renew_lease(lab, job, "n1", drill_result=completed_drill(lab, killing)).drill is None, (
        "not damaged twice"
    )
    other = renew_lease(lab, job, "n2").drill
    assert other is not None
    assert other.act is DrillAct.KILL_RANKS
    result = newest_result(lab, 40.0)
    assert result is not None
    assert result.outcome == "not recovered"


def test_drill_that_cannot_be_judged_does_not_block_the_others(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = drilled_job(lab), drilled_job(lab)
    bad = start_drill(lab, first, within_s=30.0)
    start_drill(lab, second, within_s=30.0)

    def fail_one(drill: Drill, evidence: DrillEvidence, at: float) -> DrillReport | None:
        if drill.drill_id == bad.drill_id:
            raise ValueError("cannot be judged")
        return judge_drill(drill, evidence, at)

    monkeypatch.setattr(drill_watch, "judge_drill", fail_one)
    lab.clock.advance(31.0)
    with pytest.raises(ValueError, match="cannot be judged"):
        result_of(watch_drills(lab.core.records, lab.core.running))
    assert list(lab.core.running.drills.by_id) == [bad.drill_id]


def test_ranks_started_after_the_kill_are_not_killed_again(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill)
    renew_lease(lab, job, "n2", drill_result=drilled, failure=rank_failure(lab, job))
    lab.restart()
    newest_result(lab)
    assert renew_lease(lab, job, "n2", rendezvous_round=1).drill is None, (
        "also by one that does not know that it did it"
    )


def test_every_rank_of_the_group_is_killed_although_the_next_group_is_asked_for(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.CORRUPT_CHECKPOINT)
    killing = renew_lease(
        lab, job, "n1", drill_result=completed_drill(lab, renew_lease(lab, job, "n1").drill)
    ).drill
    renew_lease(
        lab, job, "n1", drill_result=completed_drill(lab, killing), failure=rank_failure(lab, job, "n1")
    )
    answer = renew_lease(lab, job, "n2")
    assert answer.drill is not None
    assert (answer.rendezvous_round, answer.drill.act) == (1, DrillAct.KILL_RANKS)
    assert renew_lease(lab, job, "n2", rendezvous_round=1).drill is None


def test_a_killed_control_plane_is_judged_by_the_one_that_follows_it(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    renew_lease(
        lab, job, "n1", progress=Progress(rendezvous_round=0, step=10, at=lab.clock.now(), step_s=1.0)
    )
    start_drill(lab, None, DrillKind.KILL_CONTROL)
    lab.clock.advance(2.0)
    lab.restart()
    assert newest_result(lab, 4.0) is None, "no supervisor has found it"
    for node in ("n1", "n2"):
        at = lab.clock.now()
        renew_lease(lab, job, node, progress=Progress(rendezvous_round=0, step=17, at=at, step_s=1.0))
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.steps_lost, result.goodput) == ("recovered", 0, 1.0)
    assert result.noticed_s == 6.0


def test_job_silent_before_the_control_plane_was_killed_is_not_waited_for(lab: ControlPlaneLab) -> None:
    silent, audible = drilled_job(lab), drilled_job(lab)
    lab.clock.advance(QUIET_S + 1.0)
    renew_lease(lab, silent, "n1")
    for node in ("n1", "n2"):
        renew_lease(lab, audible, node)
    drill = start_drill(lab, None, DrillKind.KILL_CONTROL)
    assert set(drill.running) == {lab.attempt(audible).attempt_id}, "nothing is heard from the other's n2"
    lab.clock.advance(2.0)
    lab.restart()
    for node in ("n1", "n2"):
        renew_lease(lab, audible, node)
    result = newest_result(lab, 6.0) or newest_result(lab, drill_watch.LATE_S)
    assert result is not None
    assert result.outcome == "recovered"
    assert result.detail.startswith("1 attempt was found again")


def test_job_without_steps_since_the_control_plane_was_killed_counts_as_standing_still(
    lab: ControlPlaneLab,
) -> None:
    job = drilled_job(lab)
    before = Progress(rendezvous_round=0, step=10, at=lab.clock.now(), step_s=1.0)
    renew_lease(lab, job, "n1", progress=before)
    start_drill(lab, None, DrillKind.KILL_CONTROL)
    lab.clock.advance(2.0)
    lab.restart()
    assert newest_result(lab, 4.0) is None
    for node in ("n1", "n2"):
        renew_lease(lab, job, node, progress=before)
    assert newest_result(lab) is None, "it may have yet to say how far it is"
    result = newest_result(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.outcome, result.steps_lost, result.goodput) == ("recovered", 0, 0.0)
    assert result.window_s is not None
    assert result.window_s >= 6.0


def after_a_killed_control_plane(lab: ControlPlaneLab) -> Job:
    """A job that made two steps in the second after the kill, with twenty seconds to go until the window
    ends.
    """
    job = drilled_job(lab)
    before = Progress(rendezvous_round=0, step=10, at=lab.clock.now(), step_s=0.5)
    renew_lease(lab, job, "n1", progress=before)
    start_drill(lab, None, DrillKind.KILL_CONTROL, window_s=20.0)
    lab.clock.advance(1.0)
    lab.restart()
    after = Progress(rendezvous_round=0, step=12, at=lab.clock.now(), step_s=0.5)
    assert newest_result(lab) is None
    for node in ("n1", "n2"):
        renew_lease(lab, job, node, progress=after)
    return job


def test_a_job_that_stood_still_later_in_the_window_counts_for_all_of_it(lab: ControlPlaneLab) -> None:
    after_a_killed_control_plane(lab)
    newest_result(lab, 20.0)
    result = newest_result(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.goodput, result.window_s) == (0.05, 20.0)


def test_a_job_that_came_to_its_end_in_the_window_counts_up_to_its_last_step(lab: ControlPlaneLab) -> None:
    job = after_a_killed_control_plane(lab)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(rank_failure(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        renew_lease(lab, job, node, phase=TaskPhase.ENDED, outcome=ended)
    result = newest_result(lab, 20.0)
    assert result is not None
    assert (result.goodput, result.window_s) == (1.0, 1.0)


def test_open_drills_are_found_behind_many_finished_ones(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drills, "MAX_FOUND", 2)
    job = drilled_job(lab)
    for _ in range(2):
        start_drill(lab, job, within_s=30.0)
        assert newest_result(lab, 31.0) is not None
    newest = start_drill(lab, job)
    assert [drill.drill_id for drill in result_of(lab.store.read(drills.unfinished_drills))] == [
        newest.drill_id
    ]


def test_drill_that_came_too_late_for_its_group_was_not_done(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    command = renew_lease(lab, job, "n2").drill
    renew_lease(lab, job, "n1", failure=rank_failure(lab, job, "n1"))
    late = "group 0 had ended before n2 heard of it; group 1 runs now"
    renew_lease(lab, job, "n2", rendezvous_round=1, drill_result=completed_drill(lab, command, refusal=late))
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.because) == ("not done", late)
