"""Drills of programs that report no step: their ranks' signs of life decide whether they run again."""

from __future__ import annotations

import msgspec
import pytest

from shoal.engines.fake import Act, always
from shoal.model.drill import LEAST_WATCH_S, DrillKind
from shoal.wire import EndKind, TaskPhase
from tests.support.planes.bench import ControlPlaneLab
from tests.support.planes.drilled_job import (
    completed_drill,
    drilled_job,
    kill_rank,
    newest_result,
    rank_failure,
    recovery,
    renew_lease,
    report_ranks_again,
    start_drill,
)


@pytest.fixture
def lab() -> ControlPlaneLab:
    return ControlPlaneLab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


def test_job_without_steps_is_judged_by_its_ranks(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill, step=None, step_s=None)
    renew_lease(lab, job, "n2", drill_result=drilled, failure=rank_failure(lab, job))
    report_ranks_again(lab, job, drilled)
    assert newest_result(lab, 6.0) is None, "they may fail yet"
    result = newest_result(lab, LEAST_WATCH_S)
    assert result is not None
    assert (result.outcome, result.tells_steps, result.steps_lost) == ("recovered", False, None)
    assert (result.stepped_s, result.sign, result.watched_s) == (0.25, "output", LEAST_WATCH_S)
    assert result.noticed_s == 0.25, "before its ranks ran again, whenever the control plane looked"


@pytest.mark.parametrize(
    ("printed_s", "worked_s", "ran_s", "sign"),
    [(0.25, 0.1, 0.25, "output"), (None, 0.1, 0.1, "cpu"), (None, None, 0.05, "start")],
)
def test_ranks_run_again_when_they_print_or_use_cpu(
    lab: ControlPlaneLab, printed_s: float | None, worked_s: float | None, ran_s: float, sign: str
) -> None:
    """Not if they have been watched for long enough."""
    job = drilled_job(lab)
    drilled = kill_rank(lab, job, window_s=20.0)
    report_ranks_again(lab, job, drilled, printed_s=printed_s, worked_s=worked_s)
    result = newest_result(lab, 21.0)
    assert result is not None
    assert (result.stepped_s, result.sign, result.watched_s) == (ran_s, sign, 20.0)


def test_drill_waits_for_every_node_to_run_again(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    drilled = kill_rank(lab, job)
    report_ranks_again(lab, job, drilled, nodes=("n1",))
    assert newest_result(lab, 60.0) is None
    report_ranks_again(lab, job, drilled, nodes=("n2",))
    result = newest_result(lab, 60.0)
    assert result is not None
    assert result.outcome == "recovered"


def test_ranks_that_fail_again_and_again_are_in_a_crash_loop(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    drilled = kill_rank(lab, job)
    for rendezvous_round in (1, 2):
        report_ranks_again(lab, job, drilled, rendezvous_round=rendezvous_round)
        assert newest_result(lab, 7.0) is None
        message = (
            'Traceback (most recent call last):\n  File "/w/train.py", line 3, in load\nOSError: no file'
        )
        broken = msgspec.structs.replace(
            rank_failure(lab, job),
            kind=EndKind.EXITED,
            signal=None,
            message=f"rank 1 exited with code 1\n{message}",
        )
        renew_lease(lab, job, "n2", rendezvous_round=rendezvous_round, drill_result=drilled, failure=broken)
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.num_ended) == ("crash loop", 2)
    assert result.because == (
        "its ranks failed 2 more times: rank 1 exited with code 1: OSError: no file (/w/train.py:3)"
    )


def test_ranks_that_failed_once_more_and_then_run_have_recovered(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    drilled = kill_rank(lab, job)
    report_ranks_again(lab, job, drilled)
    renew_lease(lab, job, "n2", rendezvous_round=1, drill_result=drilled, failure=rank_failure(lab, job))
    lab.clock.advance(3.0)
    report_ranks_again(lab, job, drilled, rendezvous_round=2)
    result = newest_result(lab, LEAST_WATCH_S + 1.0)
    assert result is not None
    assert (result.outcome, result.num_ended, result.watched_s) == ("recovered", 1, LEAST_WATCH_S)


def test_job_that_failed_for_good_after_a_restart_was_in_a_crash_loop(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab, retry={"max": 1})
    drilled = kill_rank(lab, job)
    report_ranks_again(lab, job, drilled)
    for node in ("n1", "n2"):
        ended = msgspec.structs.replace(rank_failure(lab, job, node), message="rank 1 exited with code 3")
        renew_lease(
            lab, job, node, rendezvous_round=1, phase=TaskPhase.ENDED, outcome=ended, drill_result=drilled
        )
    assert lab.status(job) == "failed"
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.num_ended) == ("crash loop", 1)
    assert "its ranks failed once more: " in result.because


def test_steps_that_are_made_between_failures_do_not_hide_a_crash_loop(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab, retry={"max": 9})
    start_drill(lab, job, window_s=30.0)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill)
    renew_lease(lab, job, "n2", drill_result=drilled, failure=rank_failure(lab, job))
    for rendezvous_round in (1, 2):
        for node in ("n1", "n2"):
            report = msgspec.structs.replace(recovery(lab, node, 100), rendezvous_round=rendezvous_round)
            renew_lease(
                lab, job, node, rendezvous_round=rendezvous_round, recovery=report, drill_result=drilled
            )
        assert newest_result(lab, 2.0) is None
        renew_lease(
            lab,
            job,
            "n2",
            rendezvous_round=rendezvous_round,
            drill_result=drilled,
            failure=rank_failure(lab, job),
        )
    result = newest_result(lab)
    assert result is not None
    assert (result.outcome, result.num_ended) == ("crash loop", 2)


def test_partitioned_job_without_steps_has_no_known_lost_step(
    lab: ControlPlaneLab,
) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, DrillKind.PARTITION, for_s=1.0)
    renew_lease(
        lab,
        job,
        "n2",
        drill_result=completed_drill(lab, renew_lease(lab, job, "n2").drill, step=None, step_s=None),
    )
    result = newest_result(lab, 6.0)
    assert result is not None
    assert (result.outcome, result.tells_steps, result.steps_lost) == ("unharmed", False, None)


def test_job_without_steps_has_no_missed_step(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, within_s=30.0)
    renew_lease(
        lab,
        job,
        "n2",
        drill_result=completed_drill(lab, renew_lease(lab, job, "n2").drill, step=None, step_s=None),
    )
    result = newest_result(lab, 31.0)
    assert result is not None
    attempt = "attempt 1 is running, rendezvous round 0"
    assert result.because == f"its ranks did not run again within 30 s; {attempt}"
