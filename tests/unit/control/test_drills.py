"""Drills from the request to the result: which node is asked, how often, and how its answers are judged."""

from __future__ import annotations

import msgspec
import pytest

from shoal.control import drill_watch, drills
from shoal.control.drill_watch import watch_drills
from shoal.control.leases import QUIET_S
from shoal.engines.fake import Act, always
from shoal.model.drill import UNREAD, Drill, DrillKind, DrillResult, Sight, judge
from shoal.model.job import Job
from shoal.wire import DrillAct, Drilled, EndKind, Phase, Progress
from tests.support.drilled_job import a_job, ask, done, failed, look, recovery, say
from tests.support.lab import Lab, now


@pytest.fixture
def lab() -> Lab:
    return Lab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


def test_only_the_node_of_the_rank_is_asked_and_until_it_has_done_it(lab: Lab) -> None:
    job = a_job(lab)
    drill = ask(lab, job)
    assert (drill.node, drill.rank) == ("n2", 1), "the last one, if nobody says which"
    assert say(lab, job, "n1").drill is None
    order = say(lab, job, "n2").drill
    assert order is not None
    assert (order.act, order.rank, order.generation) == (DrillAct.KILL_RANK, 1, 0)
    assert say(lab, job, "n2").drill == order, "an answer may be lost"
    assert say(lab, job, "n2", drilled=done(lab, order)).drill is None


def test_recovery_is_measured_from_when_it_was_done(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    drilled = done(lab, say(lab, job, "n2").drill)
    say(lab, job, "n2", drilled=drilled)
    lab.clock.advance(0.25)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    for node in ("n1", "n2"):
        say(lab, job, node, generation=1, recovery=recovery(lab, node, first_step=100), drilled=drilled)
    assert look(lab) is None, "the window is not over"
    progress = Progress(generation=1, step=140, at=lab.clock.now() + 5.0, step_s=0.1)
    say(lab, job, "n1", generation=1, progress=progress)
    result = look(lab, 5.0)
    assert result is not None
    assert (result.outcome, result.noticed_s, result.stepped_s) == ("recovered", 0.25, 0.75)
    assert (result.steps_lost, result.window_s, result.step_s) == (1, 6.25, 0.1)
    assert result.goodput == pytest.approx(4.0 / 6.25, abs=1e-3)


def test_recovery_of_a_job_that_ended_well_in_the_window_is_told(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    drilled = done(lab, say(lab, job, "n2").drill)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    for node in ("n1", "n2"):
        say(lab, job, node, generation=1, recovery=recovery(lab, node, first_step=100), drilled=drilled)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(failed(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        say(lab, job, node, generation=1, phase=Phase.ENDED, outcome=ended)
    result = look(lab, 1.0)
    assert result is not None
    assert (result.outcome, result.because, result.stepped_s, result.steps_lost) == ("recovered", "", 0.5, 1)


@pytest.mark.parametrize(("before_s", "after_s"), [(0.4, 0.1), (0.1, 0.4), (None, 0.1), (0.1, None)])
def test_goodput_is_measured_against_the_faster_pace_so_that_a_slow_start_flatters_nobody(
    lab: Lab, before_s: float | None, after_s: float | None
) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.PARTITION, for_s=1.0)
    drilled = done(lab, say(lab, job, "n2").drill, step_s=before_s)
    lab.clock.advance(10.0)
    progress = Progress(generation=0, step=150, at=lab.clock.now(), step_s=after_s)
    say(lab, job, "n2", drilled=drilled, progress=progress)
    result = look(lab)
    assert result is not None
    assert (result.goodput, result.window_s, result.step_s) == (0.5, 10.0, 0.1)


def test_job_that_stands_still_in_the_window_does_not_look_good(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.PARTITION, for_s=1.0, window_s=20.0)
    drilled = done(lab, say(lab, job, "n2").drill)
    lab.clock.advance(2.0)
    last = Progress(generation=0, step=120, at=lab.clock.now(), step_s=0.1)
    say(lab, job, "n2", drilled=drilled, progress=last)
    assert look(lab, 18.0) is None, "it may have yet to say how far it is"
    result = look(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.goodput, result.window_s) == (0.1, 20.0)


def test_step_under_way_at_the_end_of_the_window_is_neither_counted_nor_charged(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.PARTITION, for_s=1.0, window_s=20.0)
    drilled = done(lab, say(lab, job, "n2").drill, step_s=8.0)
    lab.clock.advance(16.0)
    last = Progress(generation=0, step=102, at=lab.clock.now(), step_s=8.0)
    say(lab, job, "n2", drilled=drilled, progress=last)
    look(lab, 4.0)
    result = look(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.goodput, result.window_s) == (1.0, 16.0)


def test_hang_of_a_program_that_has_just_begun_is_left_to_its_supervisor(lab: Lab) -> None:
    job = a_job(lab)
    assert ask(lab, job, DrillKind.HANG).kind is DrillKind.HANG


def test_hang_is_not_refused_by_a_control_plane_that_has_heard_nothing_yet(lab: Lab) -> None:
    job = a_job(lab)
    lab.clock.advance(drills.SETTLED_S + 1)
    lab.restart()
    assert ask(lab, job, DrillKind.HANG).kind is DrillKind.HANG


def test_a_job_that_does_not_go_on_in_time_has_not_recovered(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, within_s=30.0)
    say(lab, job, "n2", drilled=done(lab, say(lab, job, "n2").drill))
    assert look(lab, 10.0) is None
    result = look(lab, 30.0)
    assert result is not None
    assert result.outcome == "not recovered"
    assert "no step within 30 s; attempt 1 is running, group 0" in result.because


def test_a_supervisor_that_is_not_reached_has_done_nothing(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, within_s=30.0)
    result = look(lab, 31.0)
    assert result is not None
    assert (result.outcome, result.because) == (
        "not done",
        "the supervisor on n2 was not reached within 30 s",
    )
    assert say(lab, job, "n2").drill is None, "and will not do it later"


def test_nothing_was_done_to_a_job_that_ended_before(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(failed(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        say(lab, job, node, phase=Phase.ENDED, outcome=ended)
    assert lab.status(job) == "succeeded"
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.because) == (
        "not done",
        "the job was over (succeeded) before anything was done to it",
    )


def test_every_rank_is_killed_only_after_the_checkpoint_was_damaged(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.CORRUPT_CHECKPOINT)
    assert say(lab, job, "n2").drill is None
    first = say(lab, job, "n1").drill
    assert first is not None
    assert first.act is DrillAct.CORRUPT
    second = say(lab, job, "n1", drilled=done(lab, first, told="64 bytes")).drill
    other = say(lab, job, "n2").drill
    assert second is not None
    assert other is not None
    assert (second.act, other.act, other.rank) == (DrillAct.KILL_RANKS, DrillAct.KILL_RANKS, None)


def damaged(lab: Lab, job: Job) -> Drilled:
    """The checkpoint is, and nobody has heard of it."""
    ask(lab, job, DrillKind.CORRUPT_CHECKPOINT, within_s=30.0)
    return done(lab, say(lab, job, "n1").drill, told="64 bytes were changed")


def test_damage_before_which_ranks_began_anew_was_done_though_they_are_not_killed(lab: Lab) -> None:
    job = a_job(lab)
    told = damaged(lab, job)
    say(lab, job, "n1", failure=failed(lab, job, "n1"))
    for node in ("n1", "n2"):
        again = recovery(lab, node, first_step=91)
        answer = say(lab, job, node, generation=1, drilled=told if node == "n1" else None, recovery=again)
        assert answer.drill is None, "those who follow are not harmed"
    result = look(lab, 40.0)
    assert result is not None
    assert (result.outcome, result.steps_lost) == ("recovered", 10)
    assert (result.because, result.told) == (UNREAD, "64 bytes were changed")


def test_damage_to_a_job_that_ended_before_its_ranks_were_killed_was_done(lab: Lab) -> None:
    job = a_job(lab)
    told = damaged(lab, job)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(failed(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        drilled = told if node == "n1" else None
        say(lab, job, node, phase=Phase.ENDED, outcome=ended, drilled=drilled)
    result = look(lab)
    assert result is not None
    assert result.outcome == "recovered"


def test_damage_without_a_killed_rank_is_said_to_be_there(lab: Lab) -> None:
    job = a_job(lab)
    say(lab, job, "n1", drilled=damaged(lab, job))
    result = look(lab, 40.0)
    assert result is not None
    assert result.outcome == "not done"
    assert "but the newest checkpoint is damaged" in result.because
    assert result.told == "64 bytes were changed"


def test_what_a_node_refuses_to_do_is_the_result(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.CORRUPT_CHECKPOINT)
    order = say(lab, job, "n1").drill
    say(lab, job, "n1", drilled=done(lab, order, refusal="there is no checkpoint"))
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.because) == ("not done", "there is no checkpoint")


def test_a_node_that_was_cut_off_and_trained_on_is_unharmed(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.PARTITION, for_s=10.0)
    order = say(lab, job, "n2").drill
    assert order is not None
    assert (order.act, order.for_s) == (DrillAct.CUT_OFF, 10.0)
    drilled = done(lab, order)
    lab.clock.advance(10.0)
    progress = Progress(generation=0, step=200, at=lab.clock.now(), step_s=0.1)
    say(lab, job, "n2", drilled=drilled, progress=progress)
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.steps_lost, result.goodput) == ("unharmed", 0, 1.0)


def test_a_drill_goes_on_after_the_control_plane_was_started_again(lab: Lab) -> None:
    job = a_job(lab)
    drill = ask(lab, job, within_s=30.0)
    lab.restart()
    assert look(lab) is None
    order = say(lab, job, "n2").drill
    assert order is not None
    assert order.drill_id == drill.drill_id


def test_a_damaged_checkpoint_is_judged_by_a_control_plane_that_heard_of_the_kills_alone(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.CORRUPT_CHECKPOINT, within_s=30.0)
    killing = say(lab, job, "n1", drilled=done(lab, say(lab, job, "n1").drill)).drill
    lab.restart()
    look(lab)
    assert say(lab, job, "n1", drilled=done(lab, killing)).drill is None, "not damaged twice"
    other = say(lab, job, "n2").drill
    assert other is not None
    assert other.act is DrillAct.KILL_RANKS
    result = look(lab, 40.0)
    assert result is not None
    assert result.outcome == "not recovered"


def test_a_drill_that_cannot_be_judged_keeps_no_other_from_its_end(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = a_job(lab), a_job(lab)
    bad = ask(lab, first, within_s=30.0)
    ask(lab, second, within_s=30.0)

    def fail_one(drill: Drill, sight: Sight, at: float) -> DrillResult | None:
        if drill.drill_id == bad.drill_id:
            raise ValueError("cannot be judged")
        return judge(drill, sight, at)

    monkeypatch.setattr(drill_watch, "judge", fail_one)
    lab.clock.advance(31.0)
    with pytest.raises(ValueError, match="cannot be judged"):
        now(watch_drills(lab.core))
    assert list(lab.core.drills.open) == [bad.drill_id]


def test_ranks_that_follow_those_that_were_killed_are_not_killed_again(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    drilled = done(lab, say(lab, job, "n2").drill)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    lab.restart()
    look(lab)
    assert say(lab, job, "n2", generation=1).drill is None, "also by one that does not know that it did it"


def test_every_rank_of_the_group_is_killed_though_the_next_one_is_asked_for(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.CORRUPT_CHECKPOINT)
    killing = say(lab, job, "n1", drilled=done(lab, say(lab, job, "n1").drill)).drill
    say(lab, job, "n1", drilled=done(lab, killing), failure=failed(lab, job, "n1"))
    answer = say(lab, job, "n2")
    assert answer.drill is not None
    assert (answer.generation, answer.drill.act) == (1, DrillAct.KILL_RANKS)
    assert say(lab, job, "n2", generation=1).drill is None


def test_a_killed_control_plane_is_judged_by_the_one_that_follows_it(lab: Lab) -> None:
    job = a_job(lab)
    say(lab, job, "n1", progress=Progress(generation=0, step=10, at=lab.clock.now(), step_s=1.0))
    ask(lab, None, DrillKind.KILL_CONTROL)
    lab.clock.advance(2.0)
    lab.restart()
    assert look(lab, 4.0) is None, "nobody has found it yet"
    for node in ("n1", "n2"):
        at = lab.clock.now()
        say(lab, job, node, progress=Progress(generation=0, step=17, at=at, step_s=1.0))
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.steps_lost, result.goodput) == ("recovered", 0, 1.0)
    assert result.noticed_s == 6.0


def test_who_was_silent_before_the_control_plane_was_killed_is_not_waited_for(lab: Lab) -> None:
    silent, heard = a_job(lab), a_job(lab)
    lab.clock.advance(QUIET_S + 1.0)
    say(lab, silent, "n1")
    for node in ("n1", "n2"):
        say(lab, heard, node)
    drill = ask(lab, None, DrillKind.KILL_CONTROL)
    assert set(drill.running) == {lab.attempt(heard).attempt_id}, "nothing is heard from the other's n2"
    lab.clock.advance(2.0)
    lab.restart()
    for node in ("n1", "n2"):
        say(lab, heard, node)
    result = look(lab, 6.0) or look(lab, drill_watch.LATE_S)
    assert result is not None
    assert result.outcome == "recovered"
    assert result.told.startswith("1 attempt was found again")


def test_a_job_that_stood_still_since_the_control_plane_was_killed_counts_as_standing_still(lab: Lab) -> None:
    job = a_job(lab)
    before = Progress(generation=0, step=10, at=lab.clock.now(), step_s=1.0)
    say(lab, job, "n1", progress=before)
    ask(lab, None, DrillKind.KILL_CONTROL)
    lab.clock.advance(2.0)
    lab.restart()
    assert look(lab, 4.0) is None
    for node in ("n1", "n2"):
        say(lab, job, node, progress=before)
    assert look(lab) is None, "it may have yet to say how far it is"
    result = look(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.outcome, result.steps_lost, result.goodput) == ("recovered", 0, 0.0)
    assert result.window_s is not None
    assert result.window_s >= 6.0


def after_a_killed_control_plane(lab: Lab) -> Job:
    """A job that made two steps in the second after, with twenty to go until the window ends."""
    job = a_job(lab)
    before = Progress(generation=0, step=10, at=lab.clock.now(), step_s=0.5)
    say(lab, job, "n1", progress=before)
    ask(lab, None, DrillKind.KILL_CONTROL, window_s=20.0)
    lab.clock.advance(1.0)
    lab.restart()
    after = Progress(generation=0, step=12, at=lab.clock.now(), step_s=0.5)
    assert look(lab) is None
    for node in ("n1", "n2"):
        say(lab, job, node, progress=after)
    return job


def test_a_job_that_stood_still_later_in_the_window_counts_for_all_of_it(lab: Lab) -> None:
    after_a_killed_control_plane(lab)
    look(lab, 20.0)
    result = look(lab, drill_watch.LATE_S)
    assert result is not None
    assert (result.goodput, result.window_s) == (0.05, 20.0)


def test_a_job_that_came_to_its_end_in_the_window_counts_up_to_its_last_step(lab: Lab) -> None:
    job = after_a_killed_control_plane(lab)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(failed(lab, job, node), kind=EndKind.SUCCEEDED, signal=None)
        say(lab, job, node, phase=Phase.ENDED, outcome=ended)
    result = look(lab, 20.0)
    assert result is not None
    assert (result.goodput, result.window_s) == (1.0, 1.0)


def test_drills_under_way_are_found_behind_many_that_are_over(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drills, "MAX_FOUND", 2)
    job = a_job(lab)
    for _ in range(2):
        ask(lab, job, within_s=30.0)
        assert look(lab, 31.0) is not None
    newest = ask(lab, job)
    assert [one.drill_id for one in now(lab.store.read(drills.unfinished))] == [newest.drill_id]


def test_drill_that_came_too_late_for_its_group_was_not_done(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    order = say(lab, job, "n2").drill
    say(lab, job, "n1", failure=failed(lab, job, "n1"))
    late = "group 0 had ended before n2 heard of it; group 1 runs now"
    say(lab, job, "n2", generation=1, drilled=done(lab, order, refusal=late))
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.because) == ("not done", late)
