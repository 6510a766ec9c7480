"""Accounting of projects against what it must equal: everything added up anew, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.people import Devices
from shoal.scheduler.devices import Amount, ProjectView
from shoal.scheduler.fair import Fair, Usage
from shoal.scheduler.tree import Tree

NAMES = tuple("abcdef")
AMOUNTS = st.builds(Amount, st.sampled_from([0, 10, 500, 1000, 4000]), st.integers(0, 8000))
HALF = 1000.0


@st.composite
def devices(draw: st.DrawFn) -> Devices | None:
    gpus = draw(st.none() | st.integers(0, 10))
    cpus = draw(st.none() | st.integers(0, 20).map(float))
    return None if gpus is None and cpus is None else Devices(gpus=gpus, cpus=cpus)


@st.composite
def forests(draw: st.DrawFn) -> list[ProjectView]:
    """Each project's parent comes before it, so there is no circle; the order they are told in is any."""
    views = []
    for number, name in enumerate(NAMES):
        parent = draw(st.none() | st.sampled_from(NAMES[:number])) if number else None
        views.append(
            ProjectView(
                name=name,
                parent=parent,
                quota=draw(devices()),
                limit=draw(devices()),
                borrow=draw(devices()),
                weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            )
        )
    return draw(st.permutations(views))


Holdings = list[tuple[str, Amount]]
HOLDINGS = st.lists(st.tuples(st.sampled_from((*NAMES, "stranger")), AMOUNTS), max_size=12)


def above(views: list[ProjectView], name: str) -> list[ProjectView]:
    by_name = {view.name: view for view in views}
    line = [by_name.get(name, ProjectView(name=name))]
    while (parent := line[-1].parent) is not None:
        line.append(by_name[parent])
    return line


def total(views: list[ProjectView], held: Holdings, of: str) -> Amount:
    inside = [amount for name, amount in held if of in [view.name for view in above(views, name)]]
    return Amount(sum(one.milligpus for one in inside), sum(one.millicpus for one in inside))


def allows(view: ProjectView, milligpus: int | None, millicpus: int | None) -> bool:
    """By the definition: at most the limit, and at most the quota and what it may borrow. None: not asked."""
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
def test_what_is_held_equals_everything_added_up_anew(
    views: list[ProjectView], held: Holdings, random: Random
) -> None:
    tree = Tree()
    kept: Holdings = []
    for number, (name, amount) in enumerate(held):
        tree.take(name, amount)
        kept.append((name, amount))
        if number == len(held) // 2:
            tree.change(views)
        if random.random() < 0.4:
            gone = kept.pop(random.randrange(len(kept)))
            tree.give(*gone)
    tree.change(views)
    for name in (*NAMES, "stranger"):
        assert tree.held(name) == total(views, kept, name)


@given(forests(), HOLDINGS, st.sampled_from((*NAMES, "stranger")), AMOUNTS)
def test_a_project_is_refused_exactly_where_some_ceiling_would_be_passed(
    views: list[ProjectView], held: Holdings, name: str, asked: Amount
) -> None:
    tree = Tree(views)
    for holding in held:
        tree.take(*holding)
    refused = [
        view.name
        for view in above(views, name)
        if not allows(
            view,
            total(views, held, view.name).milligpus + asked.milligpus if asked.milligpus else None,
            total(views, held, view.name).millicpus + asked.millicpus if asked.millicpus else None,
        )
    ]
    found = tree.refusal(name, asked)
    assert (found.by if found else None) == (refused[0] if refused else None)
    if found is not None:
        assert found.in_use + found.asked > found.allowed


@given(forests(), HOLDINGS)
def test_starts_that_are_allowed_never_pass_a_limit_anywhere_in_the_tree(
    views: list[ProjectView], wanted: Holdings
) -> None:
    tree = Tree(views)
    for name, amount in wanted:
        if tree.refusal(name, amount) is None:
            tree.take(name, amount)
    for view in views:
        assert allows(view, *tree.held(view.name))


@given(forests(), HOLDINGS, AMOUNTS)
def test_nobody_reclaims_from_themselves_nor_both_ways(
    views: list[ProjectView], held: Holdings, asked: Amount
) -> None:
    tree = Tree(views)
    for holding in held:
        tree.take(*holding)
    for one in NAMES:
        assert not tree.may_reclaim(one, asked, one)
        for other in NAMES:
            if tree.may_reclaim(one, asked, other):
                assert tree.is_within_quota(one, asked)
                assert not tree.may_reclaim(other, asked, one)


Spell = tuple[str, Amount, float, float]
"""Who held how much, since when, until when."""


@st.composite
def spells(draw: st.DrawFn) -> Spell:
    since = draw(st.floats(0.0, 5000.0))
    return draw(st.sampled_from(NAMES)), draw(AMOUNTS), since, since + draw(st.floats(0.0, 5000.0))


SPELLS = st.lists(spells(), max_size=10)


def charged(views: list[ProjectView], spells: list[Spell]) -> Fair:
    fair = Fair(Tree(views), HALF)
    for name, amount, since, until in spells:
        fair.charge(name, amount, since, until)
    return fair


def standings(fair: Fair, now: float) -> list[float]:
    return [level for name in NAMES for level in fair.standing(name, now)]


@given(forests(), SPELLS, st.randoms(use_true_random=False))
def test_standings_do_not_depend_on_the_order_of_charges(
    views: list[ProjectView], spells: list[Spell], random: Random
) -> None:
    shuffled = random.sample(spells, len(spells))
    expected = standings(charged(views, spells), 12_000.0)
    assert standings(charged(views, shuffled), 12_000.0) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(forests(), SPELLS, st.randoms(use_true_random=False))
def test_holding_and_giving_back_comes_to_the_same_as_a_charge_whatever_was_heard_first(
    views: list[ProjectView], spells: list[Spell], random: Random
) -> None:
    fair = Fair(Tree(views), HALF)
    steps: list[tuple[Callable[[str, Amount, float], None], str, Amount, float]] = []
    for name, amount, since, until in spells:
        place = random.randint(0, len(steps))
        steps.insert(place, (fair.hold, name, amount, since))
        steps.insert(random.randint(place + 1, len(steps)), (fair.release, name, amount, until))
    for act, name, amount, at in steps:
        act(name, amount, at)
    expected = standings(charged(views, spells), 12_000.0)
    assert standings(fair, 12_000.0) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.floats(0.0, 1e6), AMOUNTS, st.floats(0.0, 5000.0), st.floats(0.0, 5000.0))
def test_decay_composes(value: float, held: Amount, first_s: float, second_s: float) -> None:
    at_once, in_two = Fair(Tree(), HALF), Fair(Tree(), HALF)
    for fair in (at_once, in_two):
        fair.tell([Usage(project="a", value=value, at=0.0)])
        fair.hold("a", held, since=0.0)
    in_two.hold("a", Amount(0, 0), since=first_s)
    end = first_s + second_s
    assert in_two.used("a", end) == pytest.approx(at_once.used("a", end), rel=1e-9, abs=1e-9)


@given(forests(), SPELLS, st.lists(st.tuples(st.sampled_from(NAMES), AMOUNTS), max_size=6))
def test_told_usage_and_holdings_give_the_same_standings_to_the_last_bit(
    views: list[ProjectView], spells: list[Spell], held: Holdings
) -> None:
    fair = charged(views, spells)
    since = {(name, n): 100.0 * n for n, (name, _) in enumerate(held)}
    for n, (name, amount) in enumerate(held):
        fair.hold(name, amount, since[name, n])
    carried = msgspec.json.decode(msgspec.json.encode(fair.usages()), type=tuple[Usage, ...])
    again = Fair(Tree(views), HALF)
    again.tell(carried)
    for n, (name, amount) in reversed(list(enumerate(held))):
        again.hold(name, amount, since[name, n])
    assert standings(again, 13_000.0) == standings(fair, 13_000.0)
