"""What an outlook says about a start: times, a promise, or that the start cannot be predicted."""

from __future__ import annotations

import msgspec
import pytest

from shoal.model.job import DependencyKind
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, Outlook, OutlookBasis, Promise, UnmetDependency
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.prediction.calibration import COVERAGE, Calibration
from shoal.scheduler.prediction.outlook import outlooks, with_cluster_queue
from shoal.scheduler.prediction.scenarios import StartSpan
from tests.support.clusters import NOW, candidate, nodes, request, snapshot


def outlook_of(
    waiting: Candidate,
    span: StartSpan | None = None,
    promised_at: float | None = None,
    calibration: Calibration | None = None,
    others: tuple[Candidate, ...] = (),
    projects: tuple[ProjectInfo, ...] = (),
) -> Outlook:
    promise = Promise(attempt_id="att-1", job_id="job-1", at=promised_at, nodes=("node-01",))
    spans = {} if span is None else {"att-1": span}
    promises = [] if promised_at is None else [promise]
    facts = msgspec.structs.replace(snapshot(nodes(1), (waiting, *others)), projects=projects)
    outlook = outlooks(facts, NOW, ["att-1"], spans, promises, calibration or Calibration())
    return outlook["att-1"]


WAITING = candidate(1, request(gpus=8))


def test_scenarios_give_an_interval_with_its_coverage() -> None:
    outlook = outlook_of(WAITING, StartSpan(1020.0, 3600.0, 3600.0))
    assert outlook.sentence.startswith("starts between 08:16 UTC and 09:49 UTC, about 09:00 UTC (")
    assert (outlook.basis, outlook.coverage, outlook.likely) == (OutlookBasis.SCENARIOS, COVERAGE, NOW + 3600)


def test_outlook_of_a_start_that_may_be_now_has_only_an_end() -> None:
    outlook = outlook_of(WAITING, StartSpan(0.0, 0.0, 540.0))
    assert outlook.sentence.startswith("starts by 08:18 UTC, about 08:00 UTC (")
    assert outlook.earliest == NOW


def test_interval_states_its_number_of_starts_and_is_a_guess_if_these_are_few() -> None:
    calibration, span = Calibration(), StartSpan(0.0, 0.0, 540.0)
    none = outlook_of(WAITING, span, calibration=calibration)
    assert none.sentence.endswith("(a guess from starts elsewhere, none here yet; 90 % sure from 40 on)")
    for _ in range(39):
        calibration.note(span, calibration.interval(span), 60.0)
    few = outlook_of(WAITING, span, calibration=calibration)
    calibration.note(span, calibration.interval(span), 60.0)
    enough = outlook_of(WAITING, span, calibration=calibration)
    assert few.sentence.endswith("(a guess from 39 starts; 90 % sure from 40 on)")
    assert enough.sentence.endswith("(90 % sure, from 40 starts)")
    assert (few.num_starts, enough.num_starts) == (39, 40)
    assert few.coverage == enough.coverage == COVERAGE


def test_unknown_start_is_not_shown_as_the_hand_over_to_the_cluster() -> None:
    unknown = outlook_of(WAITING)
    assert (unknown.basis, with_cluster_queue(unknown, "Slurm")) == (OutlookBasis.NOTHING, unknown)
    handed_over = with_cluster_queue(outlook_of(WAITING, StartSpan(0.0, 0.0, 540.0)), "Slurm")
    assert "; that is when Shoal hands it to Slurm, which starts it when " in handed_over.sentence


def test_outlook_of_a_cluster_too_large_to_simulate_says_so() -> None:
    many = tuple(candidate(number, request()) for number in range(1, 18_001))
    (outlook,) = outlooks(snapshot(nodes(1), many), NOW, ["att-1"], {}, [], Calibration()).values()
    assert outlook.basis is OutlookBasis.NOTHING
    assert outlook.sentence == (
        "its start was not predicted: 18,001 nodes, running and waiting jobs are too many to simulate"
    )


def test_outlook_is_never_later_than_a_firm_promise() -> None:
    outlook = outlook_of(WAITING, StartSpan(1020.0, 3600.0, 3600.0), promised_at=NOW + 4800)
    assert outlook.latest == outlook.promised_at == NOW + 4800
    assert outlook.is_firm
    assert outlook.sentence.endswith(
        "; 09:20 UTC at the latest, by the time limits of what runs, unless a new job goes first"
    )


LIMITED = (ProjectInfo(name="vision", limit=DeviceAmounts(gpus=16)),)


@pytest.mark.parametrize(
    "why,other,projects",
    [
        ("another project, whose share or quota may count", candidate(2, request(), project="speech"), ()),
        ("a higher priority that its array holds back", candidate(2, request(), priority=1), ()),
        ("one that is due before it", candidate(2, request(), submitted_at=NOW - 90, due_at=NOW + 60), ()),
        ("one that may use up the limit of both", candidate(2, request(), priority=-1), LIMITED),
    ],
)
def test_start_that_a_waiting_job_may_delay_is_not_called_the_latest(
    why: str, other: Candidate, projects: tuple[ProjectInfo, ...]
) -> None:
    span = StartSpan(1020.0, 3600.0, 3600.0)
    outlook = outlook_of(WAITING, span, NOW + 4800, others=(other,), projects=projects)
    assert outlook.latest is not None
    assert outlook.promised_at is not None
    assert outlook.latest > outlook.promised_at, why
    assert not outlook.is_firm
    assert outlook.sentence.endswith(
        "; 09:20 UTC by the time limits of what runs, unless a job goes first that waits now or comes"
    )
    alone = outlook_of(WAITING, None, NOW + 4800, others=(other,), projects=projects)
    assert (alone.basis, alone.latest) == (OutlookBasis.PROMISE, None)
    assert "at the latest" not in alone.sentence


def test_later_and_lower_priority_jobs_do_not_delay_a_promised_start() -> None:
    others = (candidate(2, request()), candidate(3, request(), priority=-1, project="speech"))
    assert outlook_of(WAITING, promised_at=NOW + 4800, others=others).is_firm


def test_queue_that_is_too_long_to_simulate_leaves_the_promise() -> None:
    outlook = outlook_of(WAITING, promised_at=NOW + 4800)
    assert (outlook.basis, outlook.earliest, outlook.latest) == (OutlookBasis.PROMISE, NOW, NOW + 4800)
    assert outlook.coverage is None
    assert "by 09:20 UTC at the latest" in outlook.sentence
    assert "too long to say more" in outlook.sentence


def test_start_is_unpredictable_for_a_dependent_job_or_one_far_back() -> None:
    unmet = (UnmetDependency(label="vision/3 prepare", on=DependencyKind.SUCCEEDED),)
    after = outlook_of(candidate(1, request(), unmet=unmet), StartSpan(0.0, 0.0, 0.0))
    far = outlook_of(WAITING)
    assert {after.basis, far.basis} == {OutlookBasis.NOTHING}
    assert after.latest is far.latest is None
    assert "waits for other jobs" in after.sentence
