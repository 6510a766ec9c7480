"""Decayed usage by hand: a half-life of 100 s, so that every number has a closed form."""

from __future__ import annotations

from math import log
from random import Random

import pytest

from shoal.scheduler.devices import Amount, ProjectView
from shoal.scheduler.fair import Fair, Usage
from shoal.scheduler.tree import Tree

HALF = 100.0
ONE = Amount(1_000, 0)


def fair(*views: ProjectView) -> Fair:
    return Fair(Tree(views), half_life_s=HALF)


def test_usage_halves_every_half_life() -> None:
    book = fair()
    book.tell([Usage(project="a", value=80.0, at=0.0)])
    assert book.used("a", 100.0) == pytest.approx(40.0)
    assert book.used("a", 300.0) == pytest.approx(10.0)
    assert book.used("nobody", 300.0) == 0.0


def test_devices_held_for_ever_come_to_a_bound() -> None:
    book = fair()
    book.hold("a", Amount(3_000, 0), since=0.0)
    assert book.used("a", 1e9) == pytest.approx(3 * HALF / log(2))


def test_a_charge_is_the_same_as_holding_for_that_long() -> None:
    held, charged = fair(), fair()
    held.hold("a", ONE, since=10.0)
    held.release("a", ONE, until=70.0)
    charged.charge("a", ONE, since=10.0, until=70.0)
    assert held.used("a", 200.0) == pytest.approx(charged.used("a", 200.0))


def test_cpus_count_as_parts_of_a_gpu() -> None:
    book = fair()
    book.hold("gpus", Amount(1_000, 0), since=0.0)
    book.hold("cpus", Amount(0, 64_000), since=0.0)
    assert book.used("gpus", 50.0) == book.used("cpus", 50.0)


def test_what_was_told_is_not_counted_again_when_the_holdings_come() -> None:
    book = fair()
    book.hold("a", ONE, since=0.0)
    again = fair()
    again.tell([Usage(project="a", value=book.used("a", 60.0), at=60.0)])
    again.hold("a", ONE, since=0.0)
    assert again.used("a", 100.0) == pytest.approx(book.used("a", 100.0))


def test_an_end_that_is_heard_of_late_counts_until_it_was() -> None:
    late, prompt = fair(), fair()
    for book in (late, prompt):
        book.hold("a", ONE, since=0.0)
        book.hold("a", ONE, since=0.0)
    prompt.release("a", ONE, until=40.0)
    prompt.release("a", ONE, until=50.0)
    late.release("a", ONE, until=50.0)
    late.release("a", ONE, until=40.0)
    assert late.used("a", 90.0) == pytest.approx(prompt.used("a", 90.0))


def test_who_used_less_for_their_weight_comes_first() -> None:
    book = fair(ProjectView(name="big", weight=4.0), ProjectView(name="small"))
    book.tell([Usage(project="big", value=30.0, at=0.0), Usage(project="small", value=10.0, at=0.0)])
    assert book.standing("big", 0.0) < book.standing("small", 0.0)
    book.charge("big", ONE, since=-20.0, until=0.0)
    assert book.standing("small", 0.0) < book.standing("big", 0.0)


def test_a_parent_stands_for_all_below_it_before_they_are_compared() -> None:
    book = fair(
        ProjectView(name="research"),
        ProjectView(name="vision", parent="research"),
        ProjectView(name="speech", parent="research"),
        ProjectView(name="sales"),
    )
    book.tell([Usage(project="vision", value=9.0, at=0.0), Usage(project="sales", value=5.0, at=0.0)])
    order = sorted(["vision", "speech", "sales"], key=lambda name: book.standing(name, 0.0))
    assert order == ["sales", "speech", "vision"]


def test_a_parents_own_jobs_stand_among_its_children() -> None:
    book = fair(ProjectView(name="research"), ProjectView(name="vision", parent="research"))
    book.tell([Usage(project="research", value=9.0, at=0.0)])
    assert book.standing("vision", 0.0) < book.standing("research", 0.0)


def test_a_change_of_the_tree_shows_at_once() -> None:
    tree = Tree()
    book = Fair(tree, half_life_s=HALF)
    book.tell([Usage(project="a", value=8.0, at=0.0)])
    assert book.standing("a", 0.0) == (8.0,)
    tree.change([ProjectView(name="a", parent="top", weight=2.0)])
    assert book.standing("a", 0.0) == (8.0, 4.0)


def test_a_hold_in_the_past_shows_in_a_standing_that_was_asked_for_before() -> None:
    book = fair()
    assert book.standing("a", 100.0) == (0.0,)
    book.hold("a", ONE, since=0.0)
    assert book.standing("a", 100.0) == (book.used("a", 100.0),)


def test_a_hold_under_a_clock_that_was_set_back_shows_at_once() -> None:
    book = fair()
    book.hold("a", ONE, since=100.0)
    before = book.standing("a", 50.0)
    book.hold("a", ONE, since=50.0)
    assert book.standing("a", 50.0) == (book.used("a", 50.0),) > before


def test_a_start_under_a_clock_that_was_set_back_is_in_nothing_that_was_told() -> None:
    live, told = fair(), fair()
    live.hold("a", ONE, since=0.0)
    live.hold("a", ONE, since=100.0)
    told.tell(live.usages())
    told.hold("a", Amount(2_000, 0), since=0.0)
    for one in (live, told):
        one.hold("a", ONE, since=50.0, is_new=True)
    assert told.used("a", 100.0) == live.used("a", 100.0)


def test_whoever_has_no_recorded_usage_starts_as_if_it_never_had_any() -> None:
    fresh, corrected = fair(), fair()
    corrected.hold("a", ONE, since=100.0)
    corrected.release("a", ONE, until=100.0)
    recorded = [Usage(project="b", value=8.0, at=100.0)]
    for one in (fresh, corrected):
        one.correct(recorded)
        one.hold("a", ONE, since=50.0, is_new=True)
    assert corrected.usages() == fresh.usages()


def test_correction_leaves_held_what_is_held() -> None:
    book = fair()
    book.hold("a", ONE, since=0.0)
    book.correct([Usage(project="a", value=8.0, at=100.0)])
    assert book.used("a", 200.0) == pytest.approx(4.0 + HALF / log(2) / 2)


def test_two_projects_that_never_run_dry_get_devices_in_the_ratio_of_their_weights() -> None:
    """One device, jobs of many lengths, and always the project that stands first: 2 to 1 in the end.

    Jobs are short beside the half-life, as they are in a cluster: where one takes a tenth of it, whoever
    has just run looks worse than over time, and the ratio comes to 1.88.
    """
    views = ProjectView(name="heavy", weight=2.0), ProjectView(name="light")
    book = Fair(Tree(views), half_life_s=10_000.0)
    lengths, now = Random(7), 0.0
    had = {"heavy": 0.0, "light": 0.0}
    for _ in range(3000):
        first = min(sorted(had), key=lambda name: book.standing(name, now))
        length = lengths.uniform(1.0, 20.0)
        book.hold(first, ONE, since=now)
        now += length
        book.release(first, ONE, until=now)
        had[first] += length
    assert had["heavy"] / had["light"] == pytest.approx(2.0, rel=0.02)
