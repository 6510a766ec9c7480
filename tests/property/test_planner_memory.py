"""A planner that followed every change plans like one that is told the facts today; promises are kept."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.window import Window, WindowKind
from shoal.scheduler import Candidate, Holding, NodeView, Plan, Planner, Policy, Promise, Snapshot
from shoal.scheduler.classes import CLASSES, PriorityClass
from tests.property.test_scheduler_plans import NOW, candidates, node_views, snapshots

Change = tuple[str, int]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "drop", "end", "node", "lose", "wait", "plan", "undo", "leave", "save", "windows"]
        ),
        st.integers(0, 9),
    ),
    max_size=40,
)


@st.composite
def windows(draw: st.DrawFn) -> list[Window]:
    """On each of some nodes one after another, in no order."""
    made: list[Window] = []
    for name in draw(st.sets(st.sampled_from(["n0", "n1", "n2", "n3"]))):
        begins = NOW - 100.0
        for _ in range(draw(st.integers(1, 2))):
            begins += draw(st.sampled_from([0.0, 60.0, 500.0, 1000.0]))
            until = begins + draw(st.sampled_from([30.0, 600.0, 2000.0]))
            project = draw(st.sampled_from([None, "vision", "speech"]))
            kind = WindowKind.MAINTENANCE if project is None else WindowKind.RESERVATION
            window_id = f"w{len(made)}"
            made.append(
                Window(
                    window_id=window_id,
                    kind=kind,
                    nodes=(name,),
                    from_at=begins,
                    until_at=until,
                    project=project,
                )
            )
            begins = until
    return draw(st.permutations(made))


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
        elif what == "leave" and snapshot.holdings:
            one = snapshot.holdings[which % len(snapshot.holdings)]
            planner.hold(msgspec.structs.replace(one, is_leaving=True))
        elif what == "save" and snapshot.holdings:
            planner.save(snapshot.holdings[which % len(snapshot.holdings)].attempt_id, self.now - which)
        elif what == "undo" and snapshot.holdings:
            planner.undo(snapshot.holdings[which % len(snapshot.holdings)].attempt_id)
        elif what == "windows":
            planner.set_windows(self.draw(windows()))


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, list[Change]]:
    patience_s = draw(st.sampled_from([0.0, 600.0, inf]))
    classes = draw(st.sampled_from([CLASSES, (PriorityClass(name="all", value=-1, can_preempt=True),)]))
    life = Life(draw, Policy(patience_s=patience_s, classes=classes))
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
        assert (made.starts, made.promises, made.evictions) == (again.starts, again.promises, again.evictions)
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


@given(lives())
def test_nobody_starts_who_may_meet_a_window_of_others(case: tuple[Life, list[Change]]) -> None:
    """So a window is never late because of somebody who started after it was declared."""
    life, changes = case
    for _, made in _plans(life, changes):
        facts = life.planner.snapshot()
        holdings = {holding.attempt_id: holding for holding in facts.holdings}
        for start in made.starts:
            held = holdings[start.attempt_id]
            ends_at = inf if held.time_limit_s is None else life.now + held.time_limit_s
            names = {share.node for share in start.allocation}
            for window in facts.windows:
                if names.isdisjoint(window.nodes) or window.project == held.project:
                    continue
                assert ends_at <= window.from_at or life.now >= window.until_at


@given(lives())
def test_promised_start_meets_no_window(case: tuple[Life, list[Change]]) -> None:
    life, changes = case
    for fresh, made in _plans(life, changes):
        facts = fresh.snapshot()
        waiting = {candidate.attempt_id: candidate for candidate in facts.candidates}
        for promise in made.promises:
            if promise.at is None:
                continue
            head = waiting[promise.attempt_id]
            limit_s = head.request.time_limit_s
            ends_at = inf if limit_s is None else promise.at + limit_s
            for window in facts.windows:
                if window.project == head.project or set(promise.nodes).isdisjoint(window.nodes):
                    continue
                assert ends_at <= window.from_at or promise.at >= window.until_at


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
