"""Outlooks are worked out from the planner's own facts, and every start teaches the next."""

from __future__ import annotations

import anyio
import pytest

from shoal.control.actor import Actor
from shoal.control.foreseen import MAX_ASKING, MAX_EACH
from shoal.control.outlook import learn, look_ahead, look_ahead_and_around
from shoal.errors import LimitReached
from shoal.scheduler import Basis, Outlook
from shoal.scheduler import sooner as sooner_module
from tests.support.lab import ANA, Lab

WHOLE = {"cpus": 8}


@pytest.fixture
def full() -> Lab:
    """One node, all of it taken for at most an hour, and whoever comes waits."""
    lab = Lab(num_nodes=1)
    lab.running(resources=WHOLE, time_limit="1h")
    return lab


def waiting(lab: Lab, **spec: object) -> str:
    job = lab.submit(**spec)
    lab.place()
    return lab.attempt(job).attempt_id


def around(lab: Lab, attempt_id: str) -> Outlook:
    found = anyio.run(look_ahead_and_around, lab.core, ANA, attempt_id)
    assert found is not None
    return found


def test_waiting_job_has_an_interval_within_its_promise(full: Lab) -> None:
    attempt_id = waiting(full, resources=WHOLE)
    now = full.clock.now()
    said = around(full, attempt_id)
    assert said.basis is Basis.SCENARIOS
    assert said.earliest is not None
    assert said.likely is not None
    assert said.latest is not None
    assert said.promised_at is not None
    with_grace_s = 3600.0 + 30.0
    assert now <= said.earliest <= said.likely <= said.latest <= said.promised_at <= now + with_grace_s


def test_gang_is_told_what_would_start_it_now() -> None:
    lab = Lab(num_nodes=3)
    lab.running(resources=WHOLE)
    attempt_id = waiting(lab, resources={**WHOLE, "nodes": 3})
    assert [change.setting for change in around(lab, attempt_id).changes] == ["nodes: 2..3", "nodes: 2"]


def test_where_a_cluster_has_a_queue_of_its_own_nothing_is_said_to_start_that_is_handed_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(num_nodes=3)
    monkeypatch.setattr(lab.engine, "own_queue", "Slurm", raising=False)
    lab.running(resources=WHOLE, time_limit="1h")
    said = around(lab, waiting(lab, resources={**WHOLE, "nodes": 3}))
    assert [change.sentence for change in said.changes] == [
        "`nodes: 2..3` would have it handed to Slurm now (on 2 nodes)",
        "`nodes: 2` would have it handed to Slurm now",
    ]
    assert said.sentence.startswith("starts between ")
    then = "that is when Shoal hands it to Slurm, which starts it when the jobs of others there let it"
    assert said.sentence.endswith(f"; {then}")


def test_job_that_runs_or_is_not_there_has_no_outlook(full: Lab) -> None:
    (held,) = full.core.planner.snapshot().holdings
    assert anyio.run(look_ahead_and_around, full.core, ANA, held.attempt_id) is None
    assert anyio.run(look_ahead, full.core, ANA, ["nobody"]) == {}


def test_start_of_a_job_that_was_asked_about_is_learned_from_once() -> None:
    """By what was said first: a minute passes before it is asked about again."""
    lab, learned = Lab(num_nodes=1), []
    first = lab.running(resources=WHOLE, time_limit="1h")
    attempt_id = waiting(lab, resources=WHOLE)
    lab.core.foreseen.calibration.note = lambda *noted: learned.append(noted)  # type: ignore[method-assign]
    around(lab, attempt_id)
    lab.clock.advance(60.0)
    around(lab, attempt_id)
    lab.stop(first)
    while lab.core.planner.waiting:
        lab.clock.advance(1.0)
        lab.turn()
    assert attempt_id not in lab.core.foreseen
    assert [waited_s >= 60.0 for _, _, waited_s in learned] == [True]


def test_some_of_those_who_wait_are_learned_from_though_nobody_asks(full: Lab) -> None:
    attempt_ids = [waiting(full, resources=WHOLE) for _ in range(3)]
    anyio.run(learn, full.core)
    assert all(attempt_id in full.core.foreseen for attempt_id in attempt_ids)


def test_more_questions_at_once_than_may_wait_are_turned_away(full: Lab) -> None:
    """One is being answered, so many may wait for it; when they are answered, others may ask again."""
    attempt_id = waiting(full, resources=WHOLE)
    answered, refused = list[Outlook | None](), list[LimitReached]()

    async def ask(who: int) -> None:
        actor = Actor(kind="user", id=f"usr_{who}", name=f"user{who}")
        try:
            answered.append(await look_ahead_and_around(full.core, actor, attempt_id))
        except LimitReached as busy:
            refused.append(busy)

    async def all_at_once() -> None:
        async with anyio.create_task_group() as tasks:
            for who in range(MAX_ASKING + 4):
                tasks.start_soon(ask, who)
        await ask(0)

    anyio.run(all_at_once)
    assert (len(answered), len(refused)) == (MAX_ASKING + 2, 3)
    assert refused[0].message == "8 questions about starts wait to be answered; this one is too many"
    assert refused[0].hint == "ask again in a few seconds"


def test_questions_of_one_person_leave_room_for_those_of_others(full: Lab) -> None:
    attempt_id = waiting(full, resources=WHOLE)
    answered, refused = list[str](), list[LimitReached]()
    ben = Actor(kind="user", id="usr_ben", name="ben")

    async def ask(actor: Actor) -> None:
        try:
            await look_ahead_and_around(full.core, actor, attempt_id)
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
    assert full.core.foreseen.is_idle


def test_nobody_is_learned_from_while_somebody_asks(full: Lab) -> None:
    attempt_id = waiting(full, resources=WHOLE)

    async def ask_and_learn() -> None:
        async with full.core.foreseen.one_at_a_time("usr_ana"):
            with anyio.fail_after(1):
                await learn(full.core)

    anyio.run(ask_and_learn)
    assert attempt_id not in full.core.foreseen


@pytest.mark.parametrize(
    "limit,told",
    [("MOST_FACTS", "no changes were tried: "), ("MOST_WORK", "only changes that would start it now were ")],
)
def test_looking_for_changes_stops_where_it_is_too_much_work_and_says_so(
    limit: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(num_nodes=3)
    lab.running(resources=WHOLE)
    attempt_id = waiting(lab, resources={**WHOLE, "nodes": 3})
    monkeypatch.setattr(sooner_module, limit, 1)
    said = around(lab, attempt_id)
    assert bool(said.changes) == (limit == "MOST_WORK")
    assert said.not_looked is not None
    assert said.not_looked.startswith(told)
    assert "5 nodes, running and waiting jobs are too many" in said.not_looked
