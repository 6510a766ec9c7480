"""Drills of programs that report no step: their ranks' signs of life decide whether they run again."""

from __future__ import annotations

import msgspec
import pytest

from shoal.engines.fake import Act, always
from shoal.model.drill import LEAST_WATCH_S, DrillKind
from shoal.wire import EndKind, Phase
from tests.support.drilled_job import a_job, ask, done, failed, kill, look, recovery, run_again, say
from tests.support.lab import Lab


@pytest.fixture
def lab() -> Lab:
    return Lab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


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
