"""A change that is told starts the job when it is made, and is one."""

from __future__ import annotations

import msgspec
from hypothesis import given

from shoal.scheduler import Planner, Policy, Snapshot
from shoal.scheduler.changes import MOST_TOLD, changes
from shoal.scheduler.rehearsal import Rehearsal
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
            again = Rehearsal(snapshot, POLICY, NOW).resubmitted(waiting, change.request)
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
