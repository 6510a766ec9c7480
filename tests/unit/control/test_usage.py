"""Decayed usage after a restart: what was written down, what ended since, and what is held still."""

from __future__ import annotations

import anyio
import pytest

from shoal.control.clean import clean
from shoal.control.shares import Share, shares
from shoal.control.usage import recall, write_down
from shoal.model.job import Job
from shoal.scheduler.devices import Amount
from shoal.scheduler.fair import HALF_LIFE_S, Fair
from shoal.scheduler.tree import Tree
from tests.support.lab import ANA, Lab, now, waited

HOUR = 3600.0
CPUS = {"cpus": 4}


def used(lab: Lab) -> float:
    """By the lab's project, in device-seconds, as a planner that was just started would have it."""
    fair = Fair(Tree())
    fair.tell(lab.read(lambda tx: recall(tx, HALF_LIFE_S)).usages)
    for _, attempt in lab.read(lambda tx: tx.attempts.holding()):
        assert attempt.placed_at is not None
        fair.hold("lab", Amount(0, 4000), attempt.placed_at)
    return fair.used("lab", lab.clock.now())


def expected(*spells: tuple[float, float]) -> float:
    """Four CPUs for each of these times, in hours before now."""
    fair = Fair(Tree())
    for since, until in spells:
        fair.charge("lab", Amount(0, 4000), -since * HOUR, -until * HOUR)
    return fair.used("lab", 0.0)


def ended(lab: Lab, job: Job) -> None:
    lab.stop(job)
    lab.turn()
    lab.watch()
    assert lab.status(job) == "cancelled"


def test_usage_is_what_ended_and_what_is_held() -> None:
    lab = Lab()
    first = lab.running(resources=CPUS)
    lab.clock.advance(HOUR)
    ended(lab, first)
    lab.running(resources=CPUS)
    lab.clock.advance(2 * HOUR)
    assert used(lab) == pytest.approx(expected((3, 2), (2, 0)), rel=1e-3)


def test_writing_it_down_changes_nothing_however_often_and_whenever() -> None:
    lab = Lab()
    first = lab.running(resources=CPUS)
    lab.clock.advance(HOUR)
    now(write_down(lab.core))
    lab.running(resources=CPUS)
    lab.clock.advance(HOUR)
    ended(lab, first)
    now(write_down(lab.core))
    now(write_down(lab.core))
    lab.clock.advance(HOUR)
    lab.restart()
    assert used(lab) == pytest.approx(expected((3, 1), (2, 0)), rel=1e-3)


def test_what_was_written_down_is_not_read_again() -> None:
    lab = Lab()
    ended(lab, lab.running(resources=CPUS))
    anyio.run(clean, lab.core)
    seen = lab.read(lambda tx: recall(tx, HALF_LIFE_S)).seen
    assert lab.read(lambda tx: tx.meta.get("usage") or "").startswith(f'{{"seen":{seen},')


def test_a_project_that_had_more_than_its_part_stands_above_1() -> None:
    lab = Lab()
    waited(lab.plane.create_project(ANA, "other", {"weight": 3.0}))
    assert lab.read(lambda tx: shares(tx, HALF_LIFE_S, lab.clock.now()))["lab"] == Share(Amount(0, 0), None)
    lab.running(resources=CPUS)
    lab.clock.advance(HOUR)
    found = lab.read(lambda tx: shares(tx, HALF_LIFE_S, lab.clock.now()))
    assert found == {"lab": Share(Amount(0, 4000), 4.0), "other": Share(Amount(0, 0), 0.0)}
