"""Spans are in order, never in the past, and the same whenever they are asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduler import Candidate, Holding, Policy, Snapshot
from shoal.scheduler.calibration import Calibration
from shoal.scheduler.expectation import Spread
from shoal.scheduler.outlook import outlooks
from shoal.scheduler.predict import Span, predict
from tests.property.test_scheduler_plans import NOW, snapshots

LENGTHS = (5.0, 60.0, 600.0, 4000.0)


def expect(work: Candidate | Holding) -> Spread:
    limit_s = work.time_limit_s if isinstance(work, Holding) else work.request.time_limit_s
    return Spread(expected_s=600.0, limit_s=limit_s, runs=LENGTHS)


def foresee(snapshot: Snapshot) -> dict[str, Span]:
    wanted = [one.attempt_id for one in snapshot.candidates]
    return predict(snapshot, Policy(), NOW, wanted, expect)


@given(snapshots())
def test_span_is_in_order_and_not_in_the_past(snapshot: Snapshot) -> None:
    found = foresee(snapshot)
    assert all(0.0 <= span.low_s <= span.middle_s <= span.high_s for span in found.values())
    assert found == foresee(snapshot)


@given(snapshots(), st.lists(st.floats(0.0, 1e6), max_size=60))
def test_interval_is_in_order_whatever_was_learned(snapshot: Snapshot, waits: list[float]) -> None:
    calibration = Calibration()
    for waited_s in waits:
        span = Span(waited_s / 3, waited_s / 2, 700.0 + waited_s / 2)
        calibration.note(span, calibration.interval(span), waited_s)
    wanted = [one.attempt_id for one in snapshot.candidates]
    told = outlooks(snapshot, NOW, wanted, foresee(snapshot), (), calibration)
    assert set(told) == set(wanted)
    for said in told.values():
        if said.earliest is not None and said.likely is not None and said.latest is not None:
            assert NOW <= said.earliest <= said.likely <= said.latest
