"""What nodes measure: stored with the job, never at the cost of a lease, and removed with its logs."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from shoal.control.commands.renewals import MAX_POINTS, valid_samples
from shoal.control.loops import clean as clean_module
from shoal.control.loops.clean import clean
from shoal.curve import MAX_X, Axis, Point, Samples, single_point
from shoal.errors import StateError, StoreUnavailable
from shoal.model.job import Job
from shoal.store import MetricSeries
from shoal.wire import EndKind, Renewal, RenewalReply, TaskOutcome, TaskPhase
from tests.support.planes.bench import ControlPlaneLab, result_of

LOSS = Samples(name="loss", axis=Axis.STEP, points=(single_point(1, 2.0),), rank=0)


def renewal(lab: ControlPlaneLab, job: Job, *samples: Samples, **fields: Any) -> Renewal:
    attempt = lab.attempt(job)
    return Renewal(
        **{
            "attempt_id": attempt.attempt_id,
            "epoch": attempt.epoch,
            "node": attempt.node_names[0],
            "phase": TaskPhase.RUNNING,
            "metrics": samples,
            **fields,
        }
    )


def end_of(lab: ControlPlaneLab, job: Job) -> TaskOutcome:
    attempt = lab.attempt(job)
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=attempt.node_names[0],
        kind=EndKind.SUCCEEDED,
        ended_at=5.0,
    )


def series(lab: ControlPlaneLab, job: Job) -> list[MetricSeries]:
    return result_of(lab.core.records.store.read(lambda tx: tx.metrics.series(job.job_id)))


def test_metrics_in_a_renewal_are_kept_and_are_no_event() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    events = len(lab.events())
    result_of(lab.plane.renew(renewal(lab, job, LOSS)))
    assert [(curve.name, curve.node) for curve in series(lab, job)] == [("loss", "")]
    assert len(lab.events()) == events


def test_metrics_of_a_stale_attempt_are_refused() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    with pytest.raises(StateError):
        result_of(lab.plane.renew(renewal(lab, job, LOSS, epoch=7)))
    assert series(lab, job) == []


def test_last_metrics_come_with_the_outcome() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    result_of(lab.plane.renew(renewal(lab, job, LOSS, phase=TaskPhase.ENDED, outcome=end_of(lab, job))))
    assert lab.status(job) == "succeeded"
    assert [curve.name for curve in series(lab, job)] == ["loss"]


def test_store_that_takes_no_metrics_is_no_reason_to_doubt_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    result_of(lab.plane.renew(renewal(lab, job, started_at=1.0)))

    async def refuse(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(lab.core.records.store, "write", refuse)
    lab.clock.advance(15)
    assert result_of(lab.plane.renew(renewal(lab, job, LOSS, started_at=1.0))) == RenewalReply()
    assert lab.core.running.leases.silence_s(lab.attempt(job).attempt_id, "n1") == 0


@pytest.mark.parametrize(
    "odd",
    [
        Samples(name="", axis=Axis.STEP, points=LOSS.points, rank=0),
        Samples(name="a\x1b[2J", axis=Axis.STEP, points=LOSS.points, rank=0),
        Samples(name="x" * 101, axis=Axis.STEP, points=LOSS.points, rank=0),
        Samples(name="m", axis=Axis.STEP, points=(Point(-1, 1.0, 1.0, 1.0),), rank=0),
        Samples(name="m", axis=Axis.STEP, points=(Point(MAX_X + 1, 1.0, 1.0, 1.0),), rank=0),
        Samples(name="m", axis=Axis.STEP, points=LOSS.points, rank=-2),
        Samples(name="m", axis=Axis.STEP, points=LOSS.points * (MAX_POINTS + 1), rank=0),
    ],
)
def test_invalid_samples_are_dropped_and_the_rest_is_kept(odd: Samples) -> None:
    assert valid_samples([LOSS, odd]) == [LOSS]


def test_metrics_go_with_the_logs_of_a_job_that_ended_long_ago() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    result_of(lab.plane.renew(renewal(lab, job, LOSS)))
    lab.clock.advance(lab.settings.keep_logs_s + 1)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert series(lab, job) != [], "it runs"
    result_of(lab.plane.renew(renewal(lab, job, phase=TaskPhase.ENDED, outcome=end_of(lab, job))))
    lab.clock.advance(lab.settings.keep_logs_s + 1)
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    assert series(lab, job) == []


def test_metrics_of_all_jobs_are_bounded_and_the_oldest_that_ended_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = ControlPlaneLab()
    running, old, new = (lab.running_job(resources={"cpus": 1}) for _ in range(3))
    for job in (running, old, new):
        lab.clock.advance(10.0)
        result_of(lab.plane.renew(renewal(lab, job, LOSS)))
    for job in (old, new):
        result_of(lab.plane.renew(renewal(lab, job, phase=TaskPhase.ENDED, outcome=end_of(lab, job))))
    rows = result_of(lab.core.records.store.read(lambda tx: tx.metrics.num_rows()))
    monkeypatch.setattr(clean_module, "PAGE", 1)
    for most, left in ((rows, [running, old, new]), (rows - 1, [running, new]), (0, [running])):
        monkeypatch.setattr(clean_module, "MAX_METRIC_ROWS", most)
        anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
        assert [job for job in (running, old, new) if series(lab, job)] == left
