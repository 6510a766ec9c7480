"""A planner that followed every change plans like one that is told the facts today; promises are kept.

Lives have all that plans are made of: projects with limits and quotas, windows, power caps, jobs that were
evicted before, and jobs that go on with more nodes. To make one that fails smaller takes minutes: that, and
many more lives, is for `make lives`, which begins with those that failed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.model.people import Devices
from shoal.model.window import Window, WindowKind
from shoal.scheduler import Candidate, Holding, NodeView, Plan, Planner, Policy, Promise, Snapshot
from shoal.scheduler.classes import CLASSES, PriorityClass
from shoal.scheduler.devices import ProjectView
from tests.property.test_scheduler_plans import NOW, candidates, node_views, snapshots

NUM_LIVES = os.environ.get("SHOAL_LIVES")
SOME_LIVES = settings(max_examples=100, phases=(Phase.explicit, Phase.reuse, Phase.generate))
BUDGET = settings(max_examples=int(NUM_LIVES)) if NUM_LIVES else SOME_LIVES
Change = tuple[str, int]
COMMON = ("add", "add", "add", "plan", "plan", "plan", "end", "wait", "carry")
RARE = ("drop", "node", "lose", "undo", "leave", "save", "windows", "projects", "grow", "quiet")
CHANGES = st.lists(st.tuples(st.sampled_from((*COMMON, *RARE)), st.integers(0, 9)), min_size=8, max_size=40)


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


SOME = (None, None, None, Devices(gpus=2), Devices(cpus=3.0), Devices(gpus=4, cpus=6.0))
QUOTAS = st.sampled_from((*SOME, Devices(gpus=4), Devices(gpus=2, cpus=4.0)))
LIMITS = st.sampled_from((*SOME, None, None, None))


@st.composite
def project_views(draw: st.DrawFn) -> tuple[ProjectView, ...]:
    """Two that jobs are of, perhaps below a third."""
    parent = draw(st.sampled_from([None, "lab"]))
    return tuple(
        ProjectView(
            name=name,
            parent=parent if name != "lab" else None,
            quota=draw(QUOTAS),
            limit=draw(LIMITS),
            borrow=draw(LIMITS),
            weight=draw(st.sampled_from([1.0, 2.0])),
        )
        for name in ("lab", "vision", "speech")
    )


WATTS = st.fixed_dictionaries(
    {
        "idle_watts": st.sampled_from(["0", "50"]),
        "gpu_watts": st.sampled_from(["100", "333.3"]),
        "cpu_watts": st.sampled_from(["0", "10"]),
    }
)
CAPS = st.sampled_from([{}, {}, {"r1": 400.0}, {"r1": 250.0, "r2": 900.0}])


@st.composite
def powered_views(draw: st.DrawFn, name: str) -> NodeView:
    view = draw(node_views(name))
    return msgspec.structs.replace(view, labels={**view.labels, **draw(WATTS)})


class Life:
    """A planner, what was done to it, and the clock."""

    def __init__(self, draw: st.DrawFn, policy: Policy) -> None:
        self.draw = draw
        self.now = NOW
        self.planner = Planner(policy)
        self.num = 0
        self.made = Plan()

    def happen(self, what: str, which: int) -> None:
        planner, snapshot = self.planner, self.planner.snapshot()
        if what == "add":
            self.num += 1
            new = self.draw(candidates(self.num, "job"))
            expected = self.draw(st.sampled_from([None, 5.0, 60.0, 4000.0]))
            due_at = self.draw(st.sampled_from([None, NOW - 50, NOW + 900]))
            score = self.draw(st.sampled_from([None, 1.0, 2.0, 3.0]))
            fields: dict[str, Any] = {"expected_s": expected, "due_at": due_at, "score": score}
            fields["project"] = self.draw(st.sampled_from(["vision", "speech"]))
            fields["queue"] = self.draw(st.sampled_from(["default", "default", "night"]))
            fields["num_evicted"] = self.draw(st.sampled_from([0, 0, 1, 2]))
            planner.add(msgspec.structs.replace(new, **fields))
        elif what == "drop" and snapshot.candidates:
            planner.drop(snapshot.candidates[which % len(snapshot.candidates)].attempt_id)
        elif what == "end" and snapshot.holdings:
            planner.release(snapshot.holdings[which % len(snapshot.holdings)].attempt_id, self.now)
        elif what == "node":
            planner.set_node(self.draw(powered_views(f"n{which % 5}")))
        elif what == "lose":
            planner.drop_node(f"n{which % 5}")
        elif what == "wait":
            self.now += self.draw(st.sampled_from([0.5, 40.0, 700.0, 4000.0, -300.0]))
        elif what == "leave" and snapshot.holdings:
            one = snapshot.holdings[which % len(snapshot.holdings)]
            planner.hold(msgspec.structs.replace(one, is_leaving=True))
        elif what == "save" and snapshot.holdings:
            planner.save(snapshot.holdings[which % len(snapshot.holdings)].attempt_id, self.now - which)
        elif what == "undo" and snapshot.holdings:
            planner.undo(snapshot.holdings[which % len(snapshot.holdings)].attempt_id)
        elif what == "windows":
            planner.set_windows(self.draw(windows()))
        elif what == "projects":
            planner.set_projects(self.draw(project_views()))
        elif what == "carry":
            self._carry_out(self.made)
        elif what == "quiet":
            self._fall_quiet()
        elif what == "grow" and snapshot.holdings:
            one = snapshot.holdings[which % len(snapshot.holdings)]
            more = 1 + which % 3
            planner.hold(msgspec.structs.replace(one, is_leaving=True, grows_to=len(one.allocation) + more))

    def _fall_quiet(self) -> None:
        """Nobody waits any more, and everybody has saved after a while: then some may grow."""
        facts = self.planner.snapshot()
        for waiting in facts.candidates:
            self.planner.drop(waiting.attempt_id)
        self.now += 4000.0
        for held in facts.holdings:
            self.planner.save(held.attempt_id, self.now - 10.0)

    def _carry_out(self, made: Plan) -> None:
        """As control does: starts are confirmed, who was asked to stop is stopping."""
        held = {one.attempt_id: one for one in self.planner.snapshot().holdings}
        for start in made.starts:
            if start.attempt_id in held:
                self.planner.hold(held[start.attempt_id])
        for eviction in made.evictions:
            one = held.get(eviction.attempt_id)
            if one is not None:
                leaving = msgspec.structs.replace(one, is_leaving=True, grows_to=eviction.num_nodes)
                self.planner.hold(leaving)


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, list[Change]]:
    patience_s = draw(st.sampled_from([0.0, 600.0, inf]))
    classes = draw(st.sampled_from([CLASSES, (PriorityClass(name="all", value=-1, can_preempt=True),)]))
    policy = Policy(
        patience_s=patience_s,
        classes=classes,
        power_caps=draw(CAPS),
        max_evictions=draw(st.sampled_from([0, 1, 2, 5])),
        settle_s=draw(st.sampled_from([0.0, 5.0, 100.0])),
    )
    life = Life(draw, policy)
    if draw(st.booleans()):
        life.planner.set_projects(draw(project_views()))
    for number in range(draw(st.integers(2, 4))):
        life.planner.set_node(draw(powered_views(f"n{number}")))
    full = [("add", 0)] * draw(st.integers(3, 8)) + [("plan", 0), ("carry", 0)]
    return life, full + draw(CHANGES)


def _plans(life: Life, changes: list[Change]) -> Iterator[tuple[Planner, Plan]]:
    """Each plan, and a planner that was made of the same facts just before it."""
    for what, which in [*changes, ("plan", 0)]:
        if what == "plan":
            fresh = Planner.of(life.planner.snapshot(), life.planner.policy)
            life.made = life.planner.plan(life.now)
            yield fresh, life.made
        else:
            life.happen(what, which)


@BUDGET
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


@BUDGET
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


@BUDGET
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
