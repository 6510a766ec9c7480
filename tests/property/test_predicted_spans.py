"""Spans are ordered, never in the past, and the same whenever they are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduler import Candidate, Holding, Policy, Snapshot
from shoal.scheduler.prediction.calibration import Calibration
from shoal.scheduler.prediction.forecast import RunTimeSpread
from shoal.scheduler.prediction.outlook import outlooks
from shoal.scheduler.prediction.scenarios import StartSpan, predict
from tests.property.test_scheduler_plans import NOW, snapshots

LENGTHS = (5.0, 60.0, 600.0, 4000.0)


def expect(work: Candidate | Holding) -> RunTimeSpread:
    limit_s = work.time_limit_s if isinstance(work, Holding) else work.request.time_limit_s
    return RunTimeSpread(expected_s=600.0, limit_s=limit_s, runs=LENGTHS)


def foresee(snapshot: Snapshot) -> dict[str, StartSpan]:
    wanted = [candidate.attempt_id for candidate in snapshot.candidates]
    return predict(snapshot, Policy(), NOW, wanted, expect)


@given(snapshots())
def test_span_is_in_order_and_not_in_the_past(snapshot: Snapshot) -> None:
    spans = foresee(snapshot)
    assert all(0.0 <= span.low_s <= span.middle_s <= span.high_s for span in spans.values())
    assert spans == foresee(snapshot)


@given(snapshots(), st.lists(st.floats(0.0, 1e6), max_size=60))
def test_interval_is_ordered_whatever_calibration_learned(snapshot: Snapshot, waits: list[float]) -> None:
    calibration = Calibration()
    for waited_s in waits:
        span = StartSpan(waited_s / 3, waited_s / 2, 700.0 + waited_s / 2)
        calibration.note(span, calibration.interval(span), waited_s)
    wanted = [candidate.attempt_id for candidate in snapshot.candidates]
    by_attempt = outlooks(snapshot, NOW, wanted, foresee(snapshot), (), calibration)
    assert set(by_attempt) == set(wanted)
    for outlook in by_attempt.values():
        if outlook.earliest is not None and outlook.likely is not None and outlook.latest is not None:
            assert NOW <= outlook.earliest <= outlook.likely <= outlook.latest
