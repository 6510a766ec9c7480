"""Arrays that are recorded and stopped in batches: cut off at any point, repeated, and beside
other changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.control.commands import arrays
from shoal.control.commands.arrays import finish_arrays
from shoal.control.commands.submit import SubmitResult
from shoal.errors import LimitReached
from shoal.ids import id_factory
from shoal.model.job import Job, JobOutcome
from shoal.spec import parse_job
from shoal.store import JobFilter, Tx
from tests.support.planes.bench import ANA, SPEC, USER, ControlPlaneLab, result_of

NUM = 23


class Killed(Exception):
    """The control plane is killed, right after a commit or right before one."""


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_STOPPED", 5)
    monkeypatch.setattr(arrays, "MAX_RECORDED", 5)


def die_at(lab: ControlPlaneLab, when: str, number: int) -> None:
    """Kill it at the write with that number, counted from now."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        lab.store.meanwhile(when, count)

    lab.store.meanwhile(when, count)


def elements(lab: ControlPlaneLab) -> list[Job]:
    def find(tx: Tx) -> list[Job]:
        return sorted((job for job, _ in tx.jobs.page(JobFilter(), None, 1000)), key=lambda job: job.number)

    return lab.read(find)


def submit(lab: ControlPlaneLab, key: str | None = "k", **fields: Any) -> SubmitResult:
    return lab.submit_all(key=key, array={"indices": list(range(10, 10 + NUM))}, **fields)


def is_done(lab: ControlPlaneLab) -> bool:
    return lab.read(lambda tx: tx.array_work.all()) == []


def test_all_elements_are_recorded_when_the_submission_is_answered() -> None:
    lab = ControlPlaneLab()
    result = submit(lab)
    recorded = elements(lab)
    assert result.count == NUM
    assert [job.number for job in recorded] == list(range(1, NUM + 1))
    assert [job.array.index for job in recorded if job.array] == list(range(10, 10 + NUM))
    assert [job.job_id for job in recorded] == sorted(job.job_id for job in recorded)
    assert len(lab.events("job.submitted")) == NUM
    assert [("spec" in event.data) for event in lab.events("job.submitted")] == [True] + [False] * (NUM - 1)
    assert is_done(lab)


@pytest.mark.parametrize("when", ["before write", "after write"])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("goes_on", ["by itself", "repeated"])
def test_submission_that_is_cut_off_is_finished_and_answers_the_same(
    when: str, number: int, goes_on: str
) -> None:
    lab = ControlPlaneLab()
    die_at(lab, when, number)
    with pytest.raises(Killed):
        submit(lab)
    lab.store.meanwhile(when, lambda: None)
    lab.restart()
    is_accepted = (when, number) != ("before write", 1)
    if goes_on == "by itself":
        result_of(finish_arrays(lab.core.records, lab.core.link.engine, lab.core.sealing))
        assert len(elements(lab)) == (NUM if is_accepted else 0)
    result = submit(lab)
    assert (result.count, result.was_repeated) == (NUM, is_accepted)
    recorded = elements(lab)
    assert [job.number for job in recorded] == list(range(1, NUM + 1))
    assert [job.array.index for job in recorded if job.array] == list(range(10, 10 + NUM))
    assert [job.job_id for job in result.jobs] == [job.job_id for job in recorded]
    assert lab.read(lambda tx: tx.jobs.count_open("lab")) == NUM
    assert is_done(lab)


def test_array_that_is_finished_after_a_clock_was_set_back_has_each_number_once_and_in_order() -> None:
    lab = ControlPlaneLab()
    die_at(lab, "after write", 2)
    with pytest.raises(Killed):
        submit(lab)
    lab.new_id = id_factory(lambda: 0.0)
    lab.restart()
    result_of(finish_arrays(lab.core.records, lab.core.link.engine, lab.core.sealing))
    recorded = elements(lab)
    assert [job.job_id for job in recorded] != sorted(job.job_id for job in recorded)
    assert [job.number for job in recorded] == list(range(1, NUM + 1))
    assert [job.array.index for job in recorded if job.array] == list(range(10, 10 + NUM))
    answered = submit(lab)
    assert [job.number for job in answered.jobs] == list(range(1, NUM + 1))
    lab.heal()
    lab.place()
    started = [job.number for job in elements(lab) if lab.status(job) == "starting"]
    assert started == list(range(1, len(started) + 1))
    assert 0 < len(started) < NUM
    stopped = result_of(lab.plane.stop_array(ANA, answered.array_id or "", key="s"))
    assert [job.number for job in stopped.jobs] == list(range(1, NUM + 1))
    assert {job.outcome is not None or lab.status(job) == "stopping" for job in elements(lab)} == {True}


def test_elements_that_come_later_have_their_secrets_and_the_array_keeps_none() -> None:
    lab = ControlPlaneLab()
    spec = parse_job({**SPEC, "array": NUM, "secrets": ["TOKEN"]})
    secrets = {"TOKEN": "t0ps3cret"}
    result = result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, secrets=secrets))
    assert result.array_id is not None
    array_id = result.array_id
    ids = [job.job_id for job in elements(lab)]
    sealed = lab.read(lambda tx: [tx.secrets.get(job_id) for job_id in ids])
    assert len(sealed) == NUM
    assert None not in sealed
    assert lab.read(lambda tx: tx.secrets.get(array_id)) is None


def test_a_job_after_an_array_that_is_half_recorded_waits_for_all_of_it() -> None:
    lab = ControlPlaneLab()
    die_at(lab, "after write", 2)
    with pytest.raises(Killed):
        submit(lab, name="many")
    lab.restart()
    assert len(elements(lab)) < NUM
    job = lab.submit(after=["many"])
    assert len(job.after) == NUM


@pytest.mark.parametrize("when", ["before write", "after write"])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("goes_on", ["by itself", "repeated"])
def test_stop_that_is_cut_off_is_finished_and_answers_the_same(when: str, number: int, goes_on: str) -> None:
    lab = ControlPlaneLab()
    array_id = submit(lab).array_id
    assert array_id is not None
    die_at(lab, when, number)
    with pytest.raises(Killed):
        result_of(lab.plane.stop_array(ANA, array_id, key="s"))
    lab.store.meanwhile(when, lambda: None)
    lab.restart()
    is_asked = (when, number) != ("before write", 1)
    if goes_on == "by itself":
        result_of(finish_arrays(lab.core.records, lab.core.link.engine, lab.core.sealing))
        ended = [job for job in elements(lab) if job.outcome is JobOutcome.CANCELLED]
        assert len(ended) == (NUM if is_asked else 0)
    stopped = result_of(lab.plane.stop_array(ANA, array_id, key="s"))
    assert stopped.count == NUM
    assert [job.number for job in stopped.jobs] == list(range(1, NUM + 1))
    assert {job.outcome for job in elements(lab)} == {JobOutcome.CANCELLED}
    assert {job.because for job in elements(lab)} == {"stopped by ana"}
    assert len(lab.events("array.stop_asked")) == 1
    assert is_done(lab)
    assert lab.read(lambda tx: tx.jobs.count_open("lab")) == 0


def test_an_element_that_is_tried_again_behind_a_stop_stays_open() -> None:
    lab = ControlPlaneLab()
    result = submit(lab)
    assert result.array_id is not None
    die_at(lab, "after write", 3)
    with pytest.raises(Killed):
        result_of(lab.plane.stop_array(ANA, result.array_id, key="s"))
    lab.restart()
    result_of(lab.plane.retry_job(ANA, result.jobs[0].job_id))
    result_of(finish_arrays(lab.core.records, lab.core.link.engine, lab.core.sealing))
    assert [job.outcome for job in elements(lab)] == [None] + [JobOutcome.CANCELLED] * (NUM - 1)


@pytest.mark.parametrize("verb", ["submit", "stop"])
def test_a_job_of_another_user_is_accepted_between_two_batches(verb: str) -> None:
    lab = ControlPlaneLab()
    counts: list[tuple[int, int]] = []
    array_id = submit(lab).array_id if verb == "stop" else None
    assert verb == "submit" or array_id is not None

    def come_in() -> None:
        """Run after the request is recorded and some of it is done."""
        lab.submit(name="other")
        open_now = sum(job.is_open for job in elements(lab))
        counts.append((len(elements(lab)), open_now))

    after_second(lab, come_in)
    if array_id is not None:
        result_of(lab.plane.stop_array(ANA, array_id))
        assert counts == [(NUM + 1, NUM + 1 - 5)]
    else:
        submit(lab)
        assert counts == [(5 + 5 + 1, 5 + 5 + 1)]


def after_second(lab: ControlPlaneLab, do: Callable[[], None]) -> None:
    lab.store.meanwhile("after write", lambda: lab.store.meanwhile("after write", do))


def test_daily_limit_of_a_project_starts_again_the_next_day() -> None:
    lab = ControlPlaneLab(max_jobs_per_day=30)
    submit(lab)
    with pytest.raises(LimitReached, match=r"has submitted 23 jobs today .* limit of 30 a day") as refused:
        submit(lab, key="other")
    assert refused.value.facts["submitted_today"] == NUM
    assert refused.value.hint is not None
    assert "--max-jobs-per-day" in refused.value.hint
    lab.restart()  # counted on disk
    assert submit(lab).was_repeated  # costs nothing
    for _ in range(7):
        lab.stop(lab.submit())
    with pytest.raises(LimitReached):
        result_of(lab.plane.retry_job(ANA, elements(lab)[-1].job_id))
    lab.clock.advance(86_400)
    result_of(lab.plane.retry_job(ANA, elements(lab)[-1].job_id))
    submit(lab, key="tomorrow")
