"""A planner that followed every change plans like one that is told the facts today; promises are kept."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.scheduler import Candidate, Holding, NodeView, Plan, Planner, Policy, Promise, Snapshot
from tests.property.test_scheduler_plans import NOW, candidates, node_views, snapshots

Change = tuple[str, int]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "drop", "end", "node", "lose", "wait", "plan", "undo"]), st.integers(0, 9)
    ),
    max_size=40,
)


class Life:
    """A planner, what was done to it, and the clock."""

    def __init__(self, draw: st.DrawFn, policy: Policy) -> None:
        self.draw = draw
        self.now = NOW
        self.planner = Planner(policy)
        self.num = 0
        self.known: dict[str, Candidate] = {}

    def happen(self, what: str, which: int) -> None:
        planner, snapshot = self.planner, self.planner.snapshot()
        if what == "add":
            self.num += 1
            new = self.draw(candidates(self.num, "job"))
            expected = self.draw(st.sampled_from([None, 5.0, 60.0, 4000.0]))
            due_at = self.draw(st.sampled_from([None, NOW - 50, NOW + 900]))
            score = self.draw(st.sampled_from([None, 1.0, 2.0, 3.0]))
            planner.add(msgspec.structs.replace(new, expected_s=expected, due_at=due_at, score=score))
        elif what == "drop" and snapshot.candidates:
            planner.drop(snapshot.candidates[which % len(snapshot.candidates)].attempt_id)
        elif what == "end" and snapshot.holdings:
            planner.release(snapshot.holdings[which % len(snapshot.holdings)].attempt_id, self.now)
        elif what == "node":
            planner.set_node(self.draw(node_views(f"n{which % 5}")))
        elif what == "lose":
            planner.drop_node(f"n{which % 5}")
        elif what == "wait":
            self.now += self.draw(st.sampled_from([0.5, 40.0, 700.0, -300.0]))
        elif what == "undo" and snapshot.holdings:
            planner.undo(snapshot.holdings[which % len(snapshot.holdings)].attempt_id)


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, list[Change]]:
    patience_s = draw(st.sampled_from([0.0, 600.0, inf]))
    life = Life(draw, Policy(patience_s=patience_s))
    for number in range(draw(st.integers(1, 4))):
        life.planner.set_node(draw(node_views(f"n{number}")))
    return life, draw(CHANGES)


def _plans(life: Life, changes: list[Change]) -> Iterator[tuple[Planner, Plan]]:
    """Each plan, and a planner that was made of the same facts just before it."""
    for what, which in [*changes, ("plan", 0)]:
        if what == "plan":
            fresh = Planner.of(life.planner.snapshot(), life.planner.policy)
            yield fresh, life.planner.plan(life.now)
        else:
            life.happen(what, which)


@given(lives())
def test_planner_that_followed_every_change_plans_like_one_that_did_not(
    case: tuple[Life, list[Change]],
) -> None:
    life, changes = case
    for fresh, made in _plans(life, changes):
        again = fresh.plan(life.now)
        assert (made.starts, made.promises) == (again.starts, again.promises)
        for waiting in life.planner.snapshot().candidates:
            told = life.planner.explain(waiting.attempt_id, life.now)
            assert told == fresh.explain(waiting.attempt_id, life.now)


def _turn(views: tuple[NodeView, ...], holdings: tuple[Holding, ...], head: Candidate) -> Promise | None:
    """What the head would be promised if nobody else waited."""
    planner = Planner(Policy(patience_s=0.0, patience_factor=0.0))
    for view in views:
        planner.set_node(view)
    for holding in holdings:
        planner.hold(holding)
    planner.add(head)
    return next(iter(planner.plan(NOW).promises), None)


@given(snapshots())
def test_who_starts_beside_a_promise_does_not_delay_it(snapshot: Snapshot) -> None:
    """By the limits of everybody who runs then: nobody is taken to end before they must."""
    planner = Planner.of(snapshot, Policy())
    made = planner.plan(NOW)
    after = planner.snapshot()
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    for promise in made.promises[:1]:
        if promise.at is None or by_id[promise.attempt_id].array_id is not None:
            continue  # elements of an array ask alike, which these do not
        again = _turn(after.nodes, after.holdings, by_id[promise.attempt_id])
        assert again is not None
        assert again.at is not None
        assert again.at <= promise.at
