"""Outlooks come from the planner's own facts, and every start calibrates the next."""

from __future__ import annotations

import anyio
import pytest

from shoal.control.actor import Actor
from shoal.control.commands.explain import learn_from_newest, predict_start_with_changes, predict_starts
from shoal.control.memory.start_predictions import MAX_ASKING, MAX_EACH
from shoal.errors import LimitReached
from shoal.scheduler import Outlook, OutlookBasis
from shoal.scheduler.prediction import sooner as sooner_module
from tests.support.planes.bench import ANA, ControlPlaneLab

WHOLE = {"cpus": 8}


@pytest.fixture
def full() -> ControlPlaneLab:
    """One node, all of it taken for at most an hour, so every new job waits."""
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(resources=WHOLE, time_limit="1h")
    return lab


def waiting(lab: ControlPlaneLab, **spec: object) -> str:
    job = lab.submit(**spec)
    lab.place()
    return lab.attempt(job).attempt_id


def around(lab: ControlPlaneLab, attempt_id: str) -> Outlook:
    outlook = anyio.run(
        predict_start_with_changes,
        lab.core.records.clock,
        lab.core.planning,
        lab.core.link.engine,
        ANA,
        attempt_id,
    )
    assert outlook is not None
    return outlook


def test_waiting_job_has_an_interval_within_its_promise(full: ControlPlaneLab) -> None:
    attempt_id = waiting(full, resources=WHOLE)
    now = full.clock.now()
    outlook = around(full, attempt_id)
    assert outlook.basis is OutlookBasis.SCENARIOS
    assert outlook.earliest is not None
    assert outlook.likely is not None
    assert outlook.latest is not None
    assert outlook.promised_at is not None
    with_grace_s = 3600.0 + 30.0
    assert (
        now
        <= outlook.earliest
        <= outlook.likely
        <= outlook.latest
        <= outlook.promised_at
        <= now + with_grace_s
    )


def test_outlook_of_a_gang_names_changes_that_would_start_it_now() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    lab.running_job(resources=WHOLE)
    attempt_id = waiting(lab, resources={**WHOLE, "nodes": 3})
    assert [change.setting for change in around(lab, attempt_id).changes] == ["nodes: 2..3", "nodes: 2"]


def test_outlook_says_handed_over_and_not_started_if_the_cluster_has_its_own_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = ControlPlaneLab(num_nodes=3)
    monkeypatch.setattr(lab.engine, "own_queue", "Slurm", raising=False)
    lab.running_job(resources=WHOLE, time_limit="1h")
    outlook = around(lab, waiting(lab, resources={**WHOLE, "nodes": 3}))
    assert [change.sentence for change in outlook.changes] == [
        "`nodes: 2..3` would have it handed to Slurm now (on 2 nodes)",
        "`nodes: 2` would have it handed to Slurm now",
    ]
    assert outlook.sentence.startswith("starts between ")
    then = "that is when Shoal hands it to Slurm, which starts it when the jobs of others there let it"
    assert outlook.sentence.endswith(f"; {then}")


def test_job_that_runs_or_does_not_exist_has_no_outlook(full: ControlPlaneLab) -> None:
    (held,) = full.core.planning.planner.snapshot().holdings
    assert (
        anyio.run(
            predict_start_with_changes,
            full.core.records.clock,
            full.core.planning,
            full.core.link.engine,
            ANA,
            held.attempt_id,
        )
        is None
    )
    assert (
        anyio.run(
            predict_starts,
            full.core.records.clock,
            full.core.planning,
            full.core.link.engine,
            ANA,
            ["nobody"],
        )
        == {}
    )


def test_start_of_a_predicted_job_calibrates_once() -> None:
    """The first prediction counts: a minute passes before the next question."""
    lab, learned = ControlPlaneLab(num_nodes=1), []
    first = lab.running_job(resources=WHOLE, time_limit="1h")
    attempt_id = waiting(lab, resources=WHOLE)
    lab.core.planning.predictions.calibration.note = lambda *noted: learned.append(noted)  # type: ignore[method-assign]
    around(lab, attempt_id)
    lab.clock.advance(60.0)
    around(lab, attempt_id)
    lab.stop(first)
    while lab.core.planning.planner.waiting:
        lab.clock.advance(1.0)
        lab.run_loops()
    assert attempt_id not in lab.core.planning.predictions
    assert [waited_s >= 60.0 for _, _, waited_s in learned] == [True]


def test_some_waiting_jobs_are_predicted_without_a_question(full: ControlPlaneLab) -> None:
    attempt_ids = [waiting(full, resources=WHOLE) for _ in range(3)]
    anyio.run(learn_from_newest, full.core.records.clock, full.core.planning, full.core.link.engine)
    assert all(attempt_id in full.core.planning.predictions for attempt_id in attempt_ids)


def test_too_many_questions_at_once_are_refused(full: ControlPlaneLab) -> None:
    """One question is being answered and a limited number may wait for it. Once they are answered, others may
    ask again.
    """
    attempt_id = waiting(full, resources=WHOLE)
    answered, refused = list[Outlook | None](), list[LimitReached]()

    async def ask(number: int) -> None:
        actor = Actor(kind="user", id=f"usr_{number}", name=f"user{number}")
        try:
            answered.append(
                await predict_start_with_changes(
                    full.core.records.clock, full.core.planning, full.core.link.engine, actor, attempt_id
                )
            )
        except LimitReached as busy:
            refused.append(busy)

    async def all_at_once() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(MAX_ASKING + 4):
                tasks.start_soon(ask, number)
        await ask(0)

    anyio.run(all_at_once)
    assert (len(answered), len(refused)) == (MAX_ASKING + 2, 3)
    assert refused[0].message == "8 questions about starts wait to be answered; this one is too many"
    assert refused[0].hint == "ask again in a few seconds"


def test_questions_of_one_person_leave_room_for_others(full: ControlPlaneLab) -> None:
    attempt_id = waiting(full, resources=WHOLE)
    answered, refused = list[str](), list[LimitReached]()
    ben = Actor(kind="user", id="usr_ben", name="ben")

    async def ask(actor: Actor) -> None:
        try:
            await predict_start_with_changes(
                full.core.records.clock, full.core.planning, full.core.link.engine, actor, attempt_id
            )
            answered.append(actor.name)
        except LimitReached as busy:
            refused.append(busy)

    async def all_at_once() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_ASKING + 4):
                tasks.start_soon(ask, ANA)
            tasks.start_soon(ask, ben)
        await ask(ANA)

    anyio.run(all_at_once)
    assert sorted(answered) == ["ana"] * (MAX_EACH + 1) + ["ben"]
    assert refused[0].message == "3 of your questions about starts wait to be answered; this one is too many"
    assert full.core.planning.predictions.is_idle


def test_no_job_is_predicted_unasked_while_a_question_is_answered(full: ControlPlaneLab) -> None:
    attempt_id = waiting(full, resources=WHOLE)

    async def ask_and_learn() -> None:
        async with full.core.planning.predictions.one_at_a_time("usr_ana"):
            with anyio.fail_after(1):
                await learn_from_newest(full.core.records.clock, full.core.planning, full.core.link.engine)

    anyio.run(ask_and_learn)
    assert attempt_id not in full.core.planning.predictions


@pytest.mark.parametrize(
    "limit,reason",
    [("MOST_FACTS", "no changes were tried: "), ("MOST_WORK", "only changes that would start it now were ")],
)
def test_search_for_changes_stops_at_its_limit_and_says_so(
    limit: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = ControlPlaneLab(num_nodes=3)
    lab.running_job(resources=WHOLE)
    attempt_id = waiting(lab, resources={**WHOLE, "nodes": 3})
    monkeypatch.setattr(sooner_module, limit, 1)
    outlook = around(lab, attempt_id)
    assert bool(outlook.changes) == (limit == "MOST_WORK")
    assert outlook.not_looked is not None
    assert outlook.not_looked.startswith(reason)
    assert "5 nodes, running and waiting jobs are too many" in outlook.not_looked
