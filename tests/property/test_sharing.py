"""Project accounting equals the sum computed from scratch, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.people import DeviceAmounts
from shoal.scheduler.facts.amounts import DeviceAmount, ProjectInfo
from shoal.scheduler.order.fair_share import FairShare, Usage
from shoal.scheduler.order.project_tree import ProjectTree

NAMES = tuple("abcdef")
AMOUNTS = st.builds(DeviceAmount, st.sampled_from([0, 10, 500, 1000, 4000]), st.integers(0, 8000))
HALF = 1000.0


@st.composite
def devices(draw: st.DrawFn) -> DeviceAmounts | None:
    gpus = draw(st.none() | st.integers(0, 10))
    cpus = draw(st.none() | st.integers(0, 20).map(float))
    return None if gpus is None and cpus is None else DeviceAmounts(gpus=gpus, cpus=cpus)


@st.composite
def forests(draw: st.DrawFn) -> list[ProjectInfo]:
    """Each project's parent comes before it, so there is no cycle. The projects are passed in any order."""
    views = []
    for number, name in enumerate(NAMES):
        parent = draw(st.none() | st.sampled_from(NAMES[:number])) if number else None
        views.append(
            ProjectInfo(
                name=name,
                parent=parent,
                quota=draw(devices()),
                limit=draw(devices()),
                borrow=draw(devices()),
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            )
        )
    return draw(st.permutations(views))


Holdings = list[tuple[str, DeviceAmount]]
HOLDINGS = st.lists(st.tuples(st.sampled_from((*NAMES, "stranger")), AMOUNTS), max_size=12)


def above(views: list[ProjectInfo], name: str) -> list[ProjectInfo]:
    by_name = {view.name: view for view in views}
    line = [by_name.get(name, ProjectInfo(name=name))]
    while (parent := line[-1].parent) is not None:
        line.append(by_name[parent])
    return line


def total(views: list[ProjectInfo], held: Holdings, of: str) -> DeviceAmount:
    inside = [amount for name, amount in held if of in [view.name for view in above(views, name)]]
    return DeviceAmount(
        sum(project.milligpus for project in inside), sum(project.millicpus for project in inside)
    )


def allows(view: ProjectInfo, milligpus: int | None, millicpus: int | None) -> bool:
    """By definition: at most the limit, and at most the quota plus what it may borrow. None: not
    asked for.
    """
    for amount, unit in ((milligpus, "gpus"), (millicpus, "cpus")):
        limit, quota, borrow = (
            getattr(bound, unit) if bound is not None else None
            for bound in (view.limit, view.quota, view.borrow)
        )
        if amount is None:
            continue
        if limit is not None and amount > limit * 1000:
            return False
        if quota is not None and borrow is not None and amount > (quota + borrow) * 1000:
            return False
    return True


@given(forests(), HOLDINGS, st.randoms(use_true_random=False))
def test_held_amounts_equal_the_sum_of_all_holdings(
    views: list[ProjectInfo], held: Holdings, random: Random
) -> None:
    tree = ProjectTree()
    remaining: Holdings = []
    for number, (name, amount) in enumerate(held):
        tree.take(name, amount)
        remaining.append((name, amount))
        if number == len(held) // 2:
            tree.change(views)
        if random.random() < 0.4:
            gone = remaining.pop(random.randrange(len(remaining)))
            tree.give(*gone)
    tree.change(views)
    for name in (*NAMES, "stranger"):
        assert tree.held(name) == total(views, remaining, name)


@given(forests(), HOLDINGS, st.sampled_from((*NAMES, "stranger")), AMOUNTS)
def test_a_project_is_refused_exactly_where_some_ceiling_would_be_passed(
    views: list[ProjectInfo], held: Holdings, name: str, amount: DeviceAmount
) -> None:
    tree = ProjectTree(views)
    for holding in held:
        tree.take(*holding)
    refused = [
        view.name
        for view in above(views, name)
        if not allows(
            view,
            total(views, held, view.name).milligpus + amount.milligpus if amount.milligpus else None,
            total(views, held, view.name).millicpus + amount.millicpus if amount.millicpus else None,
        )
    ]
    refusal = tree.refusal(name, amount)
    assert (refusal.by if refusal else None) == (refused[0] if refused else None)
    if refusal is not None:
        assert refusal.in_use + refusal.requested > refusal.allowed


@given(forests(), HOLDINGS)
def test_starts_that_are_allowed_never_pass_a_limit_anywhere_in_the_tree(
    views: list[ProjectInfo], wanted: Holdings
) -> None:
    tree = ProjectTree(views)
    for name, amount in wanted:
        if tree.refusal(name, amount) is None:
            tree.take(name, amount)
    for view in views:
        assert allows(view, *tree.held(view.name))


@given(forests(), HOLDINGS, AMOUNTS)
def test_no_project_reclaims_from_itself_or_in_both_directions(
    views: list[ProjectInfo], held: Holdings, amount: DeviceAmount
) -> None:
    tree = ProjectTree(views)
    for holding in held:
        tree.take(*holding)
    for project in NAMES:
        assert not tree.may_reclaim(project, amount, project)
        for other in NAMES:
            if tree.may_reclaim(project, amount, other):
                assert tree.is_within_quota(project, amount)
                assert not tree.may_reclaim(other, amount, project)


Spell = tuple[str, DeviceAmount, float, float]
"""Project, devices, since when, until when."""


@st.composite
def spells(draw: st.DrawFn) -> Spell:
    since = draw(st.floats(0.0, 5000.0))
    return draw(st.sampled_from(NAMES)), draw(AMOUNTS), since, since + draw(st.floats(0.0, 5000.0))


SPELLS = st.lists(spells(), max_size=10)


def charged(views: list[ProjectInfo], spells: list[Spell]) -> FairShare:
    fair = FairShare(ProjectTree(views), HALF)
    for name, amount, since, until in spells:
        fair.charge(name, amount, since, until)
    return fair


def standings(fair: FairShare, now: float) -> list[float]:
    return [level for name in NAMES for level in fair.standing(name, now)]


@given(forests(), SPELLS, st.randoms(use_true_random=False))
def test_standings_do_not_depend_on_the_order_of_charges(
    views: list[ProjectInfo], spells: list[Spell], random: Random
) -> None:
    shuffled = random.sample(spells, len(spells))
    expected = standings(charged(views, spells), 12_000.0)
    assert standings(charged(views, shuffled), 12_000.0) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(forests(), SPELLS, st.randoms(use_true_random=False))
def test_hold_and_release_equal_a_charge_in_any_order_of_reports(
    views: list[ProjectInfo], spells: list[Spell], random: Random
) -> None:
    fair = FairShare(ProjectTree(views), HALF)
    steps: list[tuple[Callable[[str, DeviceAmount, float], None], str, DeviceAmount, float]] = []
    for name, amount, since, until in spells:
        place = random.randint(0, len(steps))
        steps.insert(place, (fair.hold, name, amount, since))
        steps.insert(random.randint(place + 1, len(steps)), (fair.release, name, amount, until))
    for act, name, amount, at in steps:
        act(name, amount, at)
    expected = standings(charged(views, spells), 12_000.0)
    assert standings(fair, 12_000.0) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.floats(0.0, 1e6), AMOUNTS, st.floats(0.0, 5000.0), st.floats(0.0, 5000.0))
def test_decay_composes(value: float, held: DeviceAmount, first_s: float, second_s: float) -> None:
    at_once, in_two = FairShare(ProjectTree(), HALF), FairShare(ProjectTree(), HALF)
    for fair in (at_once, in_two):
        fair.load_usages([Usage(project="a", value=value, at=0.0)])
        fair.hold("a", held, since=0.0)
    in_two.hold("a", DeviceAmount(0, 0), since=first_s)
    end = first_s + second_s
    assert in_two.used("a", end) == pytest.approx(at_once.used("a", end), rel=1e-9, abs=1e-9)


@given(forests(), SPELLS, st.lists(st.tuples(st.sampled_from(NAMES), AMOUNTS), max_size=6))
def test_loaded_usage_and_holdings_give_bit_identical_standings(
    views: list[ProjectInfo], spells: list[Spell], held: Holdings
) -> None:
    fair = charged(views, spells)
    since = {(name, n): 100.0 * n for n, (name, _) in enumerate(held)}
    for n, (name, amount) in enumerate(held):
        fair.hold(name, amount, since[name, n])
    carried = msgspec.json.decode(msgspec.json.encode(fair.usages()), type=tuple[Usage, ...])
    reloaded = FairShare(ProjectTree(views), HALF)
    reloaded.load_usages(carried)
    for n, (name, amount) in reversed(list(enumerate(held))):
        reloaded.hold(name, amount, since[name, n])
    assert standings(reloaded, 13_000.0) == standings(fair, 13_000.0)
