"""Decayed usage after a restart: what was recorded, what ended since, and what is still held."""

from __future__ import annotations

import anyio
import pytest

from shoal.control.loops.clean import clean
from shoal.control.loops.project_usage import ProjectShare, project_shares, recall_usage, write_usage
from shoal.model.job import Job
from shoal.scheduler.facts.amounts import DeviceAmount
from shoal.scheduler.order.fair_share import HALF_LIFE_S, FairShare
from shoal.scheduler.order.project_tree import ProjectTree
from tests.support.planes.bench import ANA, ControlPlaneLab, result_in_loop, result_of

HOUR = 3600.0
CPUS = {"cpus": 4}


def used(lab: ControlPlaneLab) -> float:
    """Usage of the lab's project in device-seconds, as a planner that was just started would have it."""
    fair = FairShare(ProjectTree())
    fair.load_usages(lab.read(lambda tx: recall_usage(tx, HALF_LIFE_S)).usages)
    for _, attempt in lab.read(lambda tx: tx.attempts.holding()):
        assert attempt.placed_at is not None
        fair.hold("lab", DeviceAmount(0, 4000), attempt.placed_at)
    return fair.used("lab", lab.clock.now())


def expected(*spells: tuple[float, float]) -> float:
    """Four CPUs for each of these times, in hours before now."""
    fair = FairShare(ProjectTree())
    for since, until in spells:
        fair.charge("lab", DeviceAmount(0, 4000), -since * HOUR, -until * HOUR)
    return fair.used("lab", 0.0)


def ended(lab: ControlPlaneLab, job: Job) -> None:
    lab.stop(job)
    lab.run_loops()
    lab.watch()
    assert lab.status(job) == "cancelled"


def test_usage_adds_ended_and_held_resources() -> None:
    lab = ControlPlaneLab()
    first = lab.running_job(resources=CPUS)
    lab.clock.advance(HOUR)
    ended(lab, first)
    lab.running_job(resources=CPUS)
    lab.clock.advance(2 * HOUR)
    assert used(lab) == pytest.approx(expected((3, 2), (2, 0)), rel=1e-3)


def test_writing_usage_down_any_number_of_times_changes_nothing() -> None:
    lab = ControlPlaneLab()
    first = lab.running_job(resources=CPUS)
    lab.clock.advance(HOUR)
    result_of(write_usage(lab.core.records.store, lab.core.planning.planner))
    lab.running_job(resources=CPUS)
    lab.clock.advance(HOUR)
    ended(lab, first)
    result_of(write_usage(lab.core.records.store, lab.core.planning.planner))
    result_of(write_usage(lab.core.records.store, lab.core.planning.planner))
    lab.clock.advance(HOUR)
    lab.restart()
    assert used(lab) == pytest.approx(expected((3, 1), (2, 0)), rel=1e-3)


def test_recorded_usage_is_not_read_again() -> None:
    lab = ControlPlaneLab()
    ended(lab, lab.running_job(resources=CPUS))
    anyio.run(clean, lab.core.records, lab.core.planning.planner, lab.core.link.engine, lab.core.settings)
    seen = lab.read(lambda tx: recall_usage(tx, HALF_LIFE_S)).seen_seq
    assert lab.read(lambda tx: tx.meta.get("usage") or "").startswith(f'{{"seen_seq":{seen},')


def test_a_project_that_had_more_than_its_part_stands_above_1() -> None:
    lab = ControlPlaneLab()
    result_in_loop(lab.plane.create_project(ANA, "other", {"weight": 3.0}))
    assert lab.read(lambda tx: project_shares(tx, HALF_LIFE_S, lab.clock.now()))["lab"] == ProjectShare(
        DeviceAmount(0, 0), None
    )
    lab.running_job(resources=CPUS)
    lab.clock.advance(HOUR)
    shares = lab.read(lambda tx: project_shares(tx, HALF_LIFE_S, lab.clock.now()))
    assert shares == {
        "lab": ProjectShare(DeviceAmount(0, 4000), 4.0),
        "other": ProjectShare(DeviceAmount(0, 0), 0.0),
    }
