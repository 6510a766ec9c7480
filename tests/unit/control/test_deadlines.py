"""A deadline from submission to explanation."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from tests.support.planes.bench import ControlPlaneLab

HOUR = 3600.0


@pytest.fixture
def lab() -> ControlPlaneLab:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    return lab


def test_deadline_counts_from_the_submission(lab: ControlPlaneLab) -> None:
    job = lab.submit(deadline="6h", time_limit="2h")
    assert job.deadline_at == job.submitted_at + 6 * HOUR
    [event] = lab.events("job.submitted")
    assert event.data["deadline_at"] == job.deadline_at


def test_job_that_could_not_end_in_time_is_refused_with_a_valid_limit(lab: ControlPlaneLab) -> None:
    with pytest.raises(
        SpecError, match="may run 6h by its `time_limit`; its `deadline` is 2 h from now"
    ) as no:
        lab.submit(deadline="2h", time_limit="6h")
    assert no.value.hint == "set `time_limit: 2h` or less, or a later `deadline`"
    with pytest.raises(SpecError, match="has passed"):
        lab.submit(deadline="2001-01-01T00:00")
    assert lab.submit(deadline="2h", time_limit="2h").deadline_at is not None


def test_job_with_a_deadline_becomes_due_in_time_and_says_when_it_must_start(lab: ControlPlaneLab) -> None:
    lab.running_job(resources={"gpus": 4})
    waits = lab.submit(deadline="3h", time_limit="1h", resources={"gpus": 4})
    lab.place()
    [candidate] = lab.core.planning.planner.snapshot().candidates
    assert candidate.due_at == float(int(waits.submitted_at + HOUR))
    explanation = lab.core.planning.planner.explain(candidate.attempt_id, lab.clock.now())
    assert explanation is not None
    assert explanation.facts["can_be_met"] is True
    assert explanation.facts["start_by"] == waits.submitted_at + 2 * HOUR


def test_job_past_its_deadline_is_still_started(lab: ControlPlaneLab) -> None:
    busy = lab.running_job(resources={"gpus": 4})
    waits = lab.submit(deadline="3h", resources={"gpus": 4})
    lab.clock.advance(4 * HOUR)
    lab.stop(busy)
    lab.run_loops()
    lab.run_loops()
    assert lab.status(waits) == "running"
