"""A change that is offered really starts the job, and is really a change."""

from __future__ import annotations

import msgspec
from hypothesis import given

from shoal.scheduler import Candidate, Holding, Planner, Policy, Snapshot
from shoal.scheduler.prediction.changes import MAX_CHANGES_SHOWN, changes_starting_now, resubmitted
from shoal.scheduler.prediction.scenarios import look_ahead
from shoal.scheduler.prediction.sooner import changes_starting_sooner
from tests.property.test_predicted_spans import expect
from tests.property.test_scheduler_plans import NOW, snapshots

POLICY = Policy()


@given(snapshots())
def test_offered_change_starts_the_job_in_a_fresh_planner(
    snapshot: Snapshot,
) -> None:
    for waiting in snapshot.candidates:
        changes = changes_starting_now(snapshot, POLICY, NOW, waiting.attempt_id)
        assert len(changes) <= MAX_CHANGES_SHOWN
        assert len({change.setting for change in changes}) == len(changes)
        assert changes == changes_starting_now(snapshot, POLICY, NOW, waiting.attempt_id)
        for change in changes:
            assert change.request != waiting.request
            changed = resubmitted(waiting, change.request, NOW, 1000)
            assert waiting.attempt_id in _starting(_with(snapshot, changed))
        if changes:
            assert waiting.attempt_id not in _starting(snapshot)


def _with(snapshot: Snapshot, candidate: object) -> Snapshot:
    """Replace the candidate's former version."""
    first = Planner.of(snapshot, POLICY)
    first.plan(NOW)
    facts = first.snapshot()
    others = [
        other for other in facts.candidates if other.attempt_id != getattr(candidate, "attempt_id", None)
    ]
    return msgspec.structs.replace(facts, candidates=(*others, candidate))


def _starting(snapshot: Snapshot) -> set[str]:
    return {start.attempt_id for start in Planner.of(snapshot, POLICY).plan(NOW).starts}


@given(snapshots())
def test_change_offered_to_start_sooner_does_so_in_the_same_future(snapshot: Snapshot) -> None:
    def run_time(work: Candidate | Holding) -> float:
        return expect(work).quantile(0.5, elapsed_s=elapsed_s(work))

    for waiting in snapshot.candidates:
        if waiting.unmet:
            continue
        wanted = (waiting.attempt_id,)
        before = look_ahead(snapshot, POLICY, NOW, wanted, run_time, 1000).starts
        for change in changes_starting_sooner(snapshot, POLICY, NOW, waiting, expect, MAX_CHANGES_SHOWN):
            others = [other for other in snapshot.candidates if other is not waiting]
            resubmission = resubmitted(
                waiting, change.request, NOW, max(other.order for other in snapshot.candidates) + 1
            )
            changed = msgspec.structs.replace(snapshot, candidates=(*others, resubmission))
            after = look_ahead(changed, POLICY, NOW, wanted, run_time, 1000).starts
            assert after[waiting.attempt_id] == change.starts_at
            assert after[waiting.attempt_id] < before[waiting.attempt_id]


def elapsed_s(work: Candidate | Holding) -> float:
    return max(NOW - work.placed_at, 0.0) if isinstance(work, Holding) else 0.0
