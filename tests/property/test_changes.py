"""A change that is told starts the job when it is made, and is one."""

from __future__ import annotations

import msgspec
from hypothesis import given

from shoal.scheduler import Candidate, Holding, Planner, Policy, Snapshot
from shoal.scheduler.ahead import look_ahead
from shoal.scheduler.changes import MOST_TOLD, changes
from shoal.scheduler.rehearsal import resubmitted
from shoal.scheduler.sooner import sooner
from tests.property.test_predict import expect
from tests.property.test_scheduler_plans import NOW, snapshots

POLICY = Policy()


@given(snapshots())
def test_change_that_is_told_starts_the_job_in_a_planner_that_never_saw_the_rehearsal(
    snapshot: Snapshot,
) -> None:
    for waiting in snapshot.candidates:
        found = changes(snapshot, POLICY, NOW, waiting.attempt_id)
        assert len(found) <= MOST_TOLD
        assert len({change.setting for change in found}) == len(found)
        assert found == changes(snapshot, POLICY, NOW, waiting.attempt_id)
        for change in found:
            assert change.request != waiting.request
            again = resubmitted(waiting, change.request, NOW, 1000)
            assert waiting.attempt_id in _starting(_with(snapshot, again))
        if found:
            assert waiting.attempt_id not in _starting(snapshot)


def _with(snapshot: Snapshot, candidate: object) -> Snapshot:
    """What it was does not wait any more."""
    first = Planner.of(snapshot, POLICY)
    first.plan(NOW)
    facts = first.snapshot()
    others = [one for one in facts.candidates if one.attempt_id != getattr(candidate, "attempt_id", None)]
    return msgspec.structs.replace(facts, candidates=(*others, candidate))


def _starting(snapshot: Snapshot) -> set[str]:
    return {start.attempt_id for start in Planner.of(snapshot, POLICY).plan(NOW).starts}


@given(snapshots())
def test_change_that_is_told_to_start_the_job_sooner_does_so_in_the_same_future(snapshot: Snapshot) -> None:
    def run_time(work: Candidate | Holding) -> float:
        return expect(work).quantile(0.5, elapsed_s=elapsed_s(work))

    for waiting in snapshot.candidates:
        if waiting.unmet:
            continue
        wanted = (waiting.attempt_id,)
        before = look_ahead(snapshot, POLICY, NOW, wanted, run_time, 1000).starts
        for change in sooner(snapshot, POLICY, NOW, waiting, expect, MOST_TOLD):
            others = [one for one in snapshot.candidates if one is not waiting]
            again = resubmitted(
                waiting, change.request, NOW, max(one.order for one in snapshot.candidates) + 1
            )
            changed = msgspec.structs.replace(snapshot, candidates=(*others, again))
            after = look_ahead(changed, POLICY, NOW, wanted, run_time, 1000).starts
            assert after[waiting.attempt_id] == change.starts_at
            assert after[waiting.attempt_id] < before[waiting.attempt_id]


def elapsed_s(work: Candidate | Holding) -> float:
    return max(NOW - work.placed_at, 0.0) if isinstance(work, Holding) else 0.0
