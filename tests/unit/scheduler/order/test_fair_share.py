"""Decayed usage computed by hand: the half-life is 100 s, so every number has a closed form."""

from __future__ import annotations

from math import log
from random import Random

import pytest

from shoal.scheduler.facts.amounts import DeviceAmount, ProjectInfo
from shoal.scheduler.order.fair_share import FairShare, Usage
from shoal.scheduler.order.project_tree import ProjectTree

HALF = 100.0
ONE = DeviceAmount(1_000, 0)


def fair(*views: ProjectInfo) -> FairShare:
    return FairShare(ProjectTree(views), half_life_s=HALF)


def test_usage_halves_every_half_life() -> None:
    usage = fair()
    usage.load_usages([Usage(project="a", value=80.0, at=0.0)])
    assert usage.used("a", 100.0) == pytest.approx(40.0)
    assert usage.used("a", 300.0) == pytest.approx(10.0)
    assert usage.used("nobody", 300.0) == 0.0


def test_usage_of_devices_held_for_ever_is_bounded() -> None:
    usage = fair()
    usage.hold("a", DeviceAmount(3_000, 0), since=0.0)
    assert usage.used("a", 1e9) == pytest.approx(3 * HALF / log(2))


def test_a_charge_is_the_same_as_holding_for_that_long() -> None:
    held, charged = fair(), fair()
    held.hold("a", ONE, since=10.0)
    held.release("a", ONE, until=70.0)
    charged.charge("a", ONE, since=10.0, until=70.0)
    assert held.used("a", 200.0) == pytest.approx(charged.used("a", 200.0))


def test_cpus_count_as_parts_of_a_gpu() -> None:
    usage = fair()
    usage.hold("gpus", DeviceAmount(1_000, 0), since=0.0)
    usage.hold("cpus", DeviceAmount(0, 64_000), since=0.0)
    assert usage.used("gpus", 50.0) == usage.used("cpus", 50.0)


def test_loaded_usage_is_not_counted_again_for_its_holdings() -> None:
    usage = fair()
    usage.hold("a", ONE, since=0.0)
    reloaded = fair()
    reloaded.load_usages([Usage(project="a", value=usage.used("a", 60.0), at=60.0)])
    reloaded.hold("a", ONE, since=0.0)
    assert reloaded.used("a", 100.0) == pytest.approx(usage.used("a", 100.0))


def test_a_late_report_of_an_end_counts_usage_until_the_end() -> None:
    late, prompt = fair(), fair()
    for usage in (late, prompt):
        usage.hold("a", ONE, since=0.0)
        usage.hold("a", ONE, since=0.0)
    prompt.release("a", ONE, until=40.0)
    prompt.release("a", ONE, until=50.0)
    late.release("a", ONE, until=50.0)
    late.release("a", ONE, until=40.0)
    assert late.used("a", 90.0) == pytest.approx(prompt.used("a", 90.0))


def test_project_that_used_less_for_its_weight_comes_first() -> None:
    usage = fair(ProjectInfo(name="big", weight=4.0), ProjectInfo(name="small"))
    usage.load_usages([Usage(project="big", value=30.0, at=0.0), Usage(project="small", value=10.0, at=0.0)])
    assert usage.standing("big", 0.0) < usage.standing("small", 0.0)
    usage.charge("big", ONE, since=-20.0, until=0.0)
    assert usage.standing("small", 0.0) < usage.standing("big", 0.0)


def test_a_parent_stands_for_all_below_it_before_they_are_compared() -> None:
    usage = fair(
        ProjectInfo(name="research"),
        ProjectInfo(name="vision", parent="research"),
        ProjectInfo(name="speech", parent="research"),
        ProjectInfo(name="sales"),
    )
    usage.load_usages([Usage(project="vision", value=9.0, at=0.0), Usage(project="sales", value=5.0, at=0.0)])
    order = sorted(["vision", "speech", "sales"], key=lambda name: usage.standing(name, 0.0))
    assert order == ["sales", "speech", "vision"]


def test_a_parents_own_jobs_stand_among_its_children() -> None:
    usage = fair(ProjectInfo(name="research"), ProjectInfo(name="vision", parent="research"))
    usage.load_usages([Usage(project="research", value=9.0, at=0.0)])
    assert usage.standing("vision", 0.0) < usage.standing("research", 0.0)


def test_a_change_of_the_tree_shows_at_once() -> None:
    tree = ProjectTree()
    usage = FairShare(tree, half_life_s=HALF)
    usage.load_usages([Usage(project="a", value=8.0, at=0.0)])
    assert usage.standing("a", 0.0) == (8.0,)
    tree.change([ProjectInfo(name="a", parent="top", weight=2.0)])
    assert usage.standing("a", 0.0) == (8.0, 4.0)


def test_a_hold_in_the_past_invalidates_a_cached_standing() -> None:
    usage = fair()
    assert usage.standing("a", 100.0) == (0.0,)
    usage.hold("a", ONE, since=0.0)
    assert usage.standing("a", 100.0) == (usage.used("a", 100.0),)


def test_a_hold_under_a_clock_that_was_set_back_shows_at_once() -> None:
    usage = fair()
    usage.hold("a", ONE, since=100.0)
    before = usage.standing("a", 50.0)
    usage.hold("a", ONE, since=50.0)
    assert usage.standing("a", 50.0) == (usage.used("a", 50.0),) > before


def test_a_start_after_a_clock_reset_is_not_part_of_loaded_usage() -> None:
    live, loaded = fair(), fair()
    live.hold("a", ONE, since=0.0)
    live.hold("a", ONE, since=100.0)
    loaded.load_usages(live.usages())
    loaded.hold("a", DeviceAmount(2_000, 0), since=0.0)
    for fair_share in (live, loaded):
        fair_share.hold("a", ONE, since=50.0, is_new=True)
    assert loaded.used("a", 100.0) == live.used("a", 100.0)


def test_project_without_recorded_usage_starts_from_zero() -> None:
    fresh, corrected = fair(), fair()
    corrected.hold("a", ONE, since=100.0)
    corrected.release("a", ONE, until=100.0)
    recorded = [Usage(project="b", value=8.0, at=100.0)]
    for fair_share in (fresh, corrected):
        fair_share.correct(recorded)
        fair_share.hold("a", ONE, since=50.0, is_new=True)
    assert corrected.usages() == fresh.usages()


def test_correcting_usage_keeps_holdings() -> None:
    usage = fair()
    usage.hold("a", ONE, since=0.0)
    usage.correct([Usage(project="a", value=8.0, at=100.0)])
    assert usage.used("a", 200.0) == pytest.approx(4.0 + HALF / log(2) / 2)


def test_two_always_busy_projects_get_devices_in_the_ratio_of_their_weights() -> None:
    """One device, jobs of many lengths, and always the project that stands first: 2 to 1 in the end.

    Jobs are short compared with the half-life, as they are in a cluster. If a job takes a tenth of the
    half-life, the project that has just run looks worse than over time, and the ratio comes to 1.88.
    """
    views = ProjectInfo(name="heavy", weight=2.0), ProjectInfo(name="light")
    usage = FairShare(ProjectTree(views), half_life_s=10_000.0)
    lengths, now = Random(7), 0.0
    had = {"heavy": 0.0, "light": 0.0}
    for _ in range(3000):
        first = min(sorted(had), key=lambda name: usage.standing(name, now))
        length = lengths.uniform(1.0, 20.0)
        usage.hold(first, ONE, since=now)
        now += length
        usage.release(first, ONE, until=now)
        had[first] += length
    assert had["heavy"] / had["light"] == pytest.approx(2.0, rel=0.02)
