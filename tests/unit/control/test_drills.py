"""Drills from asking to their result: who is asked to do what, how often, and what is made of the answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.control import drill_watch, drills
from shoal.control.drill_watch import watch_drills
from shoal.control.drills import AskedDrill, history
from shoal.control.leases import QUIET_S
from shoal.engines.fake import Act, always
from shoal.errors import SpecError, StateError
from shoal.model.attempt import Replacement
from shoal.model.drill import LEAST_WATCH_S, UNREAD, Drill, DrillKind, DrillResult, Sight, judge
from shoal.model.job import Job, ReplicaPlace
from shoal.store import EventFilter
from shoal.wire import (
    DrillAct,
    Drilled,
    DrillOrder,
    EndKind,
    NodeOutcome,
    Phase,
    Probe,
    Progress,
    Recovery,
    Renewal,
    RenewalAnswer,
    Signs,
)
from tests.support.lab import ANA, Lab, now

SPEC: dict[str, Any] = {"resources": {"nodes": 2, "cpus": 1}, "retry": {"max": 3}, "checkpoint": {}}


@pytest.fixture
def lab() -> Lab:
    return Lab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


def a_job(lab: Lab, **fields: Any) -> Job:
    """Running on n1 and n2."""
    job = lab.running(**{**SPEC, **fields})
    for node in lab.attempt(job).node_names:
        say(lab, job, node, started_at=1.0)
    assert lab.status(job) == "running"
    return job


def say(lab: Lab, job: Job, node: str = "n1", **fields: Any) -> RenewalAnswer:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return now(lab.plane.renew(Renewal(**{"phase": Phase.RUNNING, **values, **fields})))


def ask(lab: Lab, job: Job | None, kind: DrillKind = DrillKind.KILL_RANK, **fields: Any) -> Drill:
    asked = AskedDrill(kind=kind, job_id=job.job_id if job else "", **{"window_s": 5.0, **fields})
    return now(lab.plane.start_drill(ANA, asked))


def done(lab: Lab, order: DrillOrder | None, **fields: Any) -> Drilled:
    assert order is not None
    values: dict[str, Any] = {"at": lab.clock.now(), "step": 100, "step_s": 0.1}
    return Drilled(drill_id=order.drill_id, act=order.act, **{**values, **fields})


def look(lab: Lab, after_s: float = 0.0) -> DrillResult | None:
    """What is known of the newest drill after so long, with time for the last question."""
    lab.clock.advance(after_s)
    now(watch_drills(lab.core))
    lab.clock.advance(1.0)
    now(watch_drills(lab.core))
    wanted = EventFilter(kinds_prefix="drill.")
    return now(lab.store.read(lambda tx: history(tx, tx.events.latest(12, wanted))))[-1].result


def failed(lab: Lab, job: Job, node: str = "n2") -> NodeOutcome:
    attempt = lab.attempt(job)
    return NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.SIGNALED,
        ended_at=lab.clock.now(),
        signal=9,
        message="rank 1 was killed",
    )


def recovery(lab: Lab, node: str, first_step: int) -> Recovery:
    values: dict[str, Any] = {"kept": 1, "spares": 0, "formed_s": 0.1, "joined_s": 0.2, "stepped_s": 0.5}
    at = lab.clock.now()
    return Recovery(generation=1, node=node, failed_at=at, first_step=first_step, **values)


def kill(lab: Lab, job: Job, **asked: Any) -> Drilled:
    """A rank of a program that tells of no step."""
    ask(lab, job, **asked)
    drilled = done(lab, say(lab, job, "n2").drill, step=None, step_s=None)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    return drilled


def run_again(
    lab: Lab,
    job: Job,
    drilled: Drilled,
    *,
    nodes: tuple[str, ...] = ("n1", "n2"),
    generation: int = 1,
    printed_s: float | None = 0.25,
    worked_s: float | None = 0.1,
) -> None:
    """Each node says that its ranks run in this group, and since when."""
    at = lab.clock.now()
    signs = Signs(
        generation=generation,
        started_at=at + 0.05,
        printed_at=None if printed_s is None else at + printed_s,
        worked_at=None if worked_s is None else at + worked_s,
    )
    for node in nodes:
        say(lab, job, node, generation=generation, drilled=drilled, signs=signs)


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


def test_hang_of_a_program_that_tells_of_no_step_is_refused_before_anything_is_done(lab: Lab) -> None:
    job = a_job(lab)
    lab.clock.advance(drills.SETTLED_S + 1)
    with pytest.raises(StateError, match="so nobody could tell that a rank hangs; nothing was done"):
        ask(lab, job, DrillKind.HANG, is_forced=True)
    say(lab, job, "n2", progress=Progress(generation=0, step=3, at=lab.clock.now()))
    assert ask(lab, job, DrillKind.HANG).kind is DrillKind.HANG


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


def test_job_that_tells_of_no_step_is_judged_by_its_ranks_and_said_to_be(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    drilled = done(lab, say(lab, job, "n2").drill, step=None, step_s=None)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    run_again(lab, job, drilled)
    assert look(lab, 6.0) is None, "they may fail yet"
    result = look(lab, LEAST_WATCH_S)
    assert result is not None
    assert (result.outcome, result.tells_steps, result.steps_lost) == ("recovered", False, None)
    assert (result.stepped_s, result.sign, result.watched_s) == (0.25, "output", LEAST_WATCH_S)
    assert result.noticed_s == 0.25, "before its ranks ran again, whenever the control plane looked"


@pytest.mark.parametrize(
    ("printed_s", "worked_s", "ran_s", "sign"),
    [(0.25, 0.1, 0.25, "output"), (None, 0.1, 0.1, "cpu"), (None, None, 0.05, "start")],
)
def test_ranks_run_again_when_they_print_else_when_they_use_a_processor(
    lab: Lab, printed_s: float | None, worked_s: float | None, ran_s: float, sign: str
) -> None:
    """Not when they have been watched for long enough."""
    job = a_job(lab)
    drilled = kill(lab, job, window_s=20.0)
    run_again(lab, job, drilled, printed_s=printed_s, worked_s=worked_s)
    result = look(lab, 21.0)
    assert result is not None
    assert (result.stepped_s, result.sign, result.watched_s) == (ran_s, sign, 20.0)


def test_ranks_of_one_node_that_have_not_run_again_are_waited_for(lab: Lab) -> None:
    job = a_job(lab)
    drilled = kill(lab, job)
    run_again(lab, job, drilled, nodes=("n1",))
    assert look(lab, 60.0) is None
    run_again(lab, job, drilled, nodes=("n2",))
    result = look(lab, 60.0)
    assert result is not None
    assert result.outcome == "recovered"


def test_ranks_that_fail_again_and_again_are_in_a_crash_loop(lab: Lab) -> None:
    job = a_job(lab)
    drilled = kill(lab, job)
    for generation in (1, 2):
        run_again(lab, job, drilled, generation=generation)
        assert look(lab, 7.0) is None
        words = 'Traceback (most recent call last):\n  File "/w/train.py", line 3, in load\nOSError: no file'
        broken = msgspec.structs.replace(
            failed(lab, job), kind=EndKind.EXITED, signal=None, message=f"rank 1 exited with code 1\n{words}"
        )
        say(lab, job, "n2", generation=generation, drilled=drilled, failure=broken)
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.num_ended) == ("crash loop", 2)
    assert result.because == (
        "its ranks failed 2 more times: rank 1 exited with code 1: OSError: no file (/w/train.py:3)"
    )


def test_ranks_that_failed_once_more_and_then_run_have_recovered(lab: Lab) -> None:
    job = a_job(lab)
    drilled = kill(lab, job)
    run_again(lab, job, drilled)
    say(lab, job, "n2", generation=1, drilled=drilled, failure=failed(lab, job))
    lab.clock.advance(3.0)
    run_again(lab, job, drilled, generation=2)
    result = look(lab, LEAST_WATCH_S + 1.0)
    assert result is not None
    assert (result.outcome, result.num_ended, result.watched_s) == ("recovered", 1, LEAST_WATCH_S)


def test_job_that_failed_for_good_after_it_had_begun_again_was_in_a_crash_loop(lab: Lab) -> None:
    job = a_job(lab, retry={"max": 1})
    drilled = kill(lab, job)
    run_again(lab, job, drilled)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(failed(lab, job, node), message="rank 1 exited with code 3")
        say(lab, job, node, generation=1, phase=Phase.ENDED, outcome=ended, drilled=drilled)
    assert lab.status(job) == "failed"
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.num_ended) == ("crash loop", 1)
    assert "its ranks failed once more: " in result.because


def test_steps_that_are_made_between_failures_do_not_hide_a_crash_loop(lab: Lab) -> None:
    job = a_job(lab, retry={"max": 9})
    ask(lab, job, window_s=30.0)
    drilled = done(lab, say(lab, job, "n2").drill)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    for generation in (1, 2):
        for node in ("n1", "n2"):
            told = msgspec.structs.replace(recovery(lab, node, 100), generation=generation)
            say(lab, job, node, generation=generation, recovery=told, drilled=drilled)
        assert look(lab, 2.0) is None
        say(lab, job, "n2", generation=generation, drilled=drilled, failure=failed(lab, job))
    result = look(lab)
    assert result is not None
    assert (result.outcome, result.num_ended) == ("crash loop", 2)


def test_job_that_tells_of_no_step_and_is_cut_off_has_lost_none_that_anybody_knows(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, DrillKind.PARTITION, for_s=1.0)
    say(lab, job, "n2", drilled=done(lab, say(lab, job, "n2").drill, step=None, step_s=None))
    result = look(lab, 6.0)
    assert result is not None
    assert (result.outcome, result.tells_steps, result.steps_lost) == ("unharmed", False, None)


def test_job_that_tells_of_no_step_is_not_said_to_have_missed_one(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, within_s=30.0)
    say(lab, job, "n2", drilled=done(lab, say(lab, job, "n2").drill, step=None, step_s=None))
    result = look(lab, 31.0)
    assert result is not None
    assert result.because == "its ranks did not run again within 30 s; attempt 1 is running, group 0"


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


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"retry": {"max": 0}}, DrillKind.KILL_RANK, "has no `retry`: it would end as failed"),
        ({"checkpoint": None}, DrillKind.KILL_NODE, "it may begin from the start again"),
        ({"checkpoint": None}, DrillKind.CORRUPT_CHECKPOINT, "there is none to damage"),
        ({"fence": "60s"}, DrillKind.PARTITION, "after 60 s without an answer"),
    ],
)
def test_what_would_be_the_end_of_a_job_is_refused(
    lab: Lab, fields: dict[str, Any], kind: DrillKind, words: str
) -> None:
    job = a_job(lab, **fields)
    with pytest.raises(StateError, match=words):
        ask(lab, job, kind, for_s=60.0)
    assert ask(lab, job, kind, for_s=60.0, is_forced=True).kind is kind


@pytest.mark.parametrize(
    ("kind", "words", "hint"),
    [
        (DrillKind.KILL_RANK, "it would end, and another take its place", "`--force` does it"),
        (DrillKind.KILL_NODE, "it would end, and another take its place", "`--force` does it"),
        (
            DrillKind.CORRUPT_CHECKPOINT,
            "it keeps no checkpoints to damage",
            "`shoal drill kill-rank lab/1 --force`",
        ),
    ],
)
def test_what_would_be_the_end_of_a_replica_is_refused_with_what_fits_one(
    lab: Lab, kind: DrillKind, words: str, hint: str
) -> None:
    place = ReplicaPlace(service_id="svc_1", service="chat", release=1, slot=1, probe=Probe())
    job = msgspec.structs.replace(a_job(lab), replica=place)
    with pytest.raises(StateError, match=f"a replica of service chat: {words}") as wrong:
        drills._check_survives(job, lab.attempt(job), AskedDrill(kind=kind, job_id=job.job_id))
    assert str(wrong.value.hint).startswith(hint)


def test_lost_shares_use_up_no_retry(lab: Lab) -> None:
    job = a_job(lab, retry={"max": 1})
    lost = (Replacement(generation=1, at=1.0, lost=failed(lab, job), node="n2"),)
    attempt = msgspec.structs.replace(lab.attempt(job), generation=1, replacements=lost)
    asked = AskedDrill(kind=DrillKind.KILL_RANK, job_id=job.job_id)
    drills._check_survives(job, attempt, asked)
    with pytest.raises(StateError, match="has no retry left"):
        drills._check_survives(job, msgspec.structs.replace(attempt, generation=2), asked)


@pytest.mark.parametrize(
    ("retry", "generation", "message", "hint"),
    [
        ({"max": 0}, 0, "has no `retry`", "`retry: {max: 3}`"),
        ({"max": 3}, 3, "has no retry left of the 3 it had", "`retry: {max: 6}`"),
        ({"max": 1000}, 1000, "has no retry left of the 1000 it had", "`retry: {max: 1000}`"),
        (
            {"max": 2, "on": ["exit"]},
            0,
            "has no `retry` on `signal`",
            "`retry: {max: 5, on: [exit, signal]}`",
        ),
    ],
)
def test_job_without_a_retry_left_is_told_how_many_it_needs(
    lab: Lab, retry: dict[str, Any], generation: int, message: str, hint: str
) -> None:
    job = a_job(lab, retry=retry)
    attempt = msgspec.structs.replace(lab.attempt(job), generation=generation)
    with pytest.raises(StateError) as refused:
        drills._check_survives(job, attempt, AskedDrill(kind=DrillKind.KILL_RANK, job_id=job.job_id))
    assert message in refused.value.message
    assert (refused.value.hint or "").startswith(f"submit it with {hint};")


@pytest.mark.parametrize(
    ("asked", "hint"), [({"rank": 9}, "--rank 1, the last"), ({"node": "n9x"}, "--node n2")]
)
def test_aim_at_what_the_job_has_not_is_refused_with_what_to_type(
    lab: Lab, asked: dict[str, Any], hint: str
) -> None:
    with pytest.raises(SpecError) as refused:
        ask(lab, a_job(lab), **asked)
    assert refused.value.hint == hint


def test_one_fault_at_a_time(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    with pytest.raises(StateError, match="is under way"):
        ask(lab, job, DrillKind.HANG)


def test_one_fault_at_a_time_is_decided_by_the_log(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, within_s=30.0)
    lab.core.drills.open.clear()
    for other, kind in ((job, DrillKind.KILL_RANK), (None, DrillKind.KILL_CONTROL)):
        with pytest.raises(StateError, match="is under way"):
            ask(lab, other, kind)
    lab.clock.advance(200.0)
    assert ask(lab, job).kind is DrillKind.KILL_RANK, "one that nobody follows does not last for ever"


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


@pytest.mark.parametrize(
    "fields",
    [{"rank": 2}, {"kind": DrillKind.KILL_NODE, "node": "n3"}, {"kind": DrillKind.KILL_RANK, "rank": 9}],
)
def test_a_drill_of_what_is_not_there_is_refused(lab: Lab, fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        ask(lab, a_job(lab), **fields)


def test_a_job_that_does_not_run_cannot_be_drilled(lab: Lab) -> None:
    job = lab.running(**SPEC)
    with pytest.raises(StateError, match="is starting; a drill needs one that runs"):
        ask(lab, job)


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
