"""What is said about a start: times, a promise, or that nobody can say."""

from __future__ import annotations

import msgspec
import pytest

from shoal.model.job import DependencyKind
from shoal.model.people import Devices
from shoal.scheduler import Basis, Candidate, Outlook, Promise, UnmetDependency
from shoal.scheduler.calibration import COVERAGE, Calibration
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.outlook import handed_on, outlooks
from shoal.scheduler.predict import Span
from tests.support.clusters import NOW, job, nodes, request, snapshot


def told(
    waiting: Candidate,
    span: Span | None = None,
    promised_at: float | None = None,
    calibration: Calibration | None = None,
    others: tuple[Candidate, ...] = (),
    projects: tuple[ProjectView, ...] = (),
) -> Outlook:
    promise = Promise(attempt_id="att-1", job_id="job-1", at=promised_at, nodes=("node-01",))
    spans = {} if span is None else {"att-1": span}
    promises = [] if promised_at is None else [promise]
    facts = msgspec.structs.replace(snapshot(nodes(1), (waiting, *others)), projects=projects)
    found = outlooks(facts, NOW, ["att-1"], spans, promises, calibration or Calibration())
    return found["att-1"]


WAITING = job(1, request(gpus=8))


def test_scenarios_give_an_interval_with_its_coverage() -> None:
    said = told(WAITING, Span(1020.0, 3600.0, 3600.0))
    assert said.sentence.startswith("starts between 08:16 UTC and 09:49 UTC, about 09:00 UTC (")
    assert (said.basis, said.coverage, said.likely) == (Basis.SCENARIOS, COVERAGE, NOW + 3600)


def test_start_that_may_be_now_has_only_an_end() -> None:
    said = told(WAITING, Span(0.0, 0.0, 540.0))
    assert said.sentence.startswith("starts by 08:18 UTC, about 08:00 UTC (")
    assert said.earliest == NOW


def test_interval_says_how_many_starts_it_goes_by_and_that_it_is_a_guess_where_they_are_few() -> None:
    calibration, span = Calibration(), Span(0.0, 0.0, 540.0)
    none = told(WAITING, span, calibration=calibration)
    assert none.sentence.endswith("(a guess from starts elsewhere, none here yet; 90 % sure from 40 on)")
    for _ in range(39):
        calibration.note(span, calibration.interval(span), 60.0)
    few = told(WAITING, span, calibration=calibration)
    calibration.note(span, calibration.interval(span), 60.0)
    enough = told(WAITING, span, calibration=calibration)
    assert few.sentence.endswith("(a guess from 39 starts; 90 % sure from 40 on)")
    assert enough.sentence.endswith("(90 % sure, from 40 starts)")
    assert (few.num_starts, enough.num_starts) == (39, 40)
    assert few.coverage == enough.coverage == COVERAGE


def test_start_that_nobody_can_tell_is_not_said_to_be_when_a_cluster_gets_the_job() -> None:
    unknown = told(WAITING)
    assert (unknown.basis, handed_on(unknown, "Slurm")) == (Basis.NOTHING, unknown)
    known = handed_on(told(WAITING, Span(0.0, 0.0, 540.0)), "Slurm")
    assert "; that is when Shoal hands it to Slurm, which starts it when " in known.sentence


def test_cluster_that_is_too_large_to_look_ahead_in_says_so() -> None:
    many = tuple(job(number, request()) for number in range(1, 18_001))
    (said,) = outlooks(snapshot(nodes(1), many), NOW, ["att-1"], {}, [], Calibration()).values()
    assert said.basis is Basis.NOTHING
    assert said.sentence == (
        "nobody looked ahead: 18,001 nodes, running and waiting jobs are too many to play futures of"
    )


def test_nobody_is_told_of_a_start_later_than_they_are_promised() -> None:
    said = told(WAITING, Span(1020.0, 3600.0, 3600.0), promised_at=NOW + 4800)
    assert said.latest == said.promised_at == NOW + 4800
    assert said.is_firm
    assert said.sentence.endswith(
        "; 09:20 UTC at the latest, by the time limits of what runs, unless a new job goes first"
    )


LIMITED = (ProjectView(name="vision", limit=Devices(gpus=16)),)


@pytest.mark.parametrize(
    "who,other,projects",
    [
        ("another project, whose share or quota may count", job(2, request(), project="speech"), ()),
        ("a higher priority that its array holds back", job(2, request(), priority=1), ()),
        ("one that is due before it", job(2, request(), submitted_at=NOW - 90, due_at=NOW + 60), ()),
        ("one that may use up the limit of both", job(2, request(), priority=-1), LIMITED),
    ],
)
def test_start_that_somebody_who_waits_may_put_off_is_not_called_the_latest(
    who: str, other: Candidate, projects: tuple[ProjectView, ...]
) -> None:
    span = Span(1020.0, 3600.0, 3600.0)
    said = told(WAITING, span, NOW + 4800, others=(other,), projects=projects)
    assert said.latest is not None
    assert said.promised_at is not None
    assert said.latest > said.promised_at, who
    assert not said.is_firm
    assert said.sentence.endswith(
        "; 09:20 UTC by the time limits of what runs, unless a job goes first that waits now or comes"
    )
    alone = told(WAITING, None, NOW + 4800, others=(other,), projects=projects)
    assert (alone.basis, alone.latest) == (Basis.PROMISE, None)
    assert "at the latest" not in alone.sentence


def test_later_and_lesser_jobs_do_not_put_off_a_promised_start() -> None:
    others = (job(2, request()), job(3, request(), priority=-1, project="speech"))
    assert told(WAITING, promised_at=NOW + 4800, others=others).is_firm


def test_queue_that_is_too_long_to_play_leaves_the_promise() -> None:
    said = told(WAITING, promised_at=NOW + 4800)
    assert (said.basis, said.earliest, said.latest) == (Basis.PROMISE, NOW, NOW + 4800)
    assert said.coverage is None
    assert "by 09:20 UTC at the latest" in said.sentence
    assert "too long to say more" in said.sentence


def test_nobody_can_say_when_a_job_starts_that_waits_for_others_or_is_far_back() -> None:
    unmet = (UnmetDependency(label="vision/3 prepare", on=DependencyKind.SUCCEEDED),)
    after = told(job(1, request(), unmet=unmet), Span(0.0, 0.0, 0.0))
    far = told(WAITING)
    assert {after.basis, far.basis} == {Basis.NOTHING}
    assert after.latest is far.latest is None
    assert "waits for other jobs" in after.sentence
