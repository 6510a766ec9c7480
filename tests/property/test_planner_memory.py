"""A planner that followed every change plans like one made from the present facts, and promises are kept.

The generated lives have all that plans are made from: projects with limits and quotas, windows, power caps,
jobs that were evicted before, and jobs that grow. Shrinking a failing life takes minutes. `make lives` does
that and plays many more lives; it begins with those that failed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.model.node import Window, WindowKind
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, Holding, NodeInfo, Plan, Planner, Policy, Promise, Snapshot, TaskLoss
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.facts.policy import DEFAULT_CLASSES, PriorityClass
from tests.property.test_scheduler_plans import NOW, candidates, node_views, snapshots

NUM_LIVES = os.environ.get("SHOAL_LIVES")
SOME_LIVES = settings(max_examples=100, phases=(Phase.explicit, Phase.reuse, Phase.generate))
BUDGET = settings(max_examples=int(NUM_LIVES)) if NUM_LIVES else SOME_LIVES
Change = tuple[str, int]
COMMON = ("add", "add", "add", "plan", "plan", "plan", "end", "wait", "carry")
RARE = ("drop", "node", "lose", "undo", "leave", "save", "windows", "projects", "grow", "quiet", "task")
CHANGES = st.lists(st.tuples(st.sampled_from((*COMMON, *RARE)), st.integers(0, 9)), min_size=8, max_size=40)


@st.composite
def windows(draw: st.DrawFn) -> list[Window]:
    """On each of some nodes, one after another, in no order."""
    result: list[Window] = []
    for name in draw(st.sets(st.sampled_from(["n0", "n1", "n2", "n3"]))):
        begins = NOW - 100.0
        for _ in range(draw(st.integers(1, 2))):
            begins += draw(st.sampled_from([0.0, 60.0, 500.0, 1000.0]))
            until = begins + draw(st.sampled_from([30.0, 600.0, 2000.0]))
            project = draw(st.sampled_from([None, "vision", "speech"]))
            kind = WindowKind.MAINTENANCE if project is None else WindowKind.RESERVATION
            window_id = f"w{len(result)}"
            result.append(
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
    return draw(st.permutations(result))


SOME = (None, None, None, DeviceAmounts(gpus=2), DeviceAmounts(cpus=3.0), DeviceAmounts(gpus=4, cpus=6.0))
QUOTAS = st.sampled_from((*SOME, DeviceAmounts(gpus=4), DeviceAmounts(gpus=2, cpus=4.0)))
LIMITS = st.sampled_from((*SOME, None, None, None))


@st.composite
def project_views(draw: st.DrawFn) -> tuple[ProjectInfo, ...]:
    """Two projects that have jobs, perhaps below a third."""
    parent = draw(st.sampled_from([None, "lab"]))
    return tuple(
        ProjectInfo(
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
def powered_views(draw: st.DrawFn, name: str) -> NodeInfo:
    view = draw(node_views(name))
    return msgspec.structs.replace(view, labels={**view.labels, **draw(WATTS)})


class Life:
    """A planner, the changes made to it, and the clock."""

    def __init__(self, draw: st.DrawFn, policy: Policy) -> None:
        self.draw = draw
        self.now = NOW
        self.planner = Planner(policy)
        self.num = 0
        self.made = Plan()

    def happen(self, kind: str, which: int) -> None:
        planner, snapshot = self.planner, self.planner.snapshot()
        if kind == "add":
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
        elif kind == "drop" and snapshot.candidates:
            planner.drop(snapshot.candidates[which % len(snapshot.candidates)].attempt_id)
        elif kind == "end" and snapshot.holdings:
            planner.release(snapshot.holdings[which % len(snapshot.holdings)].attempt_id, self.now)
        elif kind == "node":
            planner.set_node(self.draw(powered_views(f"n{which % 5}")))
        elif kind == "lose":
            planner.drop_node(f"n{which % 5}")
        elif kind == "wait":
            self.now += self.draw(st.sampled_from([0.5, 40.0, 700.0, 4000.0, -300.0]))
        elif kind == "leave" and snapshot.holdings:
            holding = snapshot.holdings[which % len(snapshot.holdings)]
            planner.hold(msgspec.structs.replace(holding, is_stopping=True))
        elif kind == "save" and snapshot.holdings:
            planner.save(snapshot.holdings[which % len(snapshot.holdings)].attempt_id, self.now - which)
        elif kind == "undo" and snapshot.holdings:
            planner.undo(snapshot.holdings[which % len(snapshot.holdings)].attempt_id)
        elif kind == "windows":
            planner.set_windows(self.draw(windows()))
        elif kind == "projects":
            planner.set_projects(self.draw(project_views()))
        elif kind == "carry":
            self._carry_out(self.made)
        elif kind == "quiet":
            self._fall_quiet()
        elif kind == "task" and snapshot.holdings:
            self._lose_task(snapshot.holdings[which % len(snapshot.holdings)])
        elif kind == "grow" and snapshot.holdings:
            holding = snapshot.holdings[which % len(snapshot.holdings)]
            more = 1 + which % 3
            planner.hold(
                msgspec.structs.replace(holding, is_stopping=True, grows_to=len(holding.allocation) + more)
            )

    def _lose_task(self, holding: Holding) -> None:
        losses = self.planner.snapshot().losses
        lost = TaskLoss(attempt_id=holding.attempt_id, node=holding.allocation[-1].node)
        self.planner.set_losses({loss.attempt_id: loss for loss in (*losses, lost)}.values())

    def settle_replacements(self) -> None:
        """Confirm or undo each, as the control plane does before the next plan."""
        held = {holding.attempt_id: holding for holding in self.planner.snapshot().holdings}
        for planned in self.made.replacements:
            if self.draw(st.booleans()):
                self.planner.hold(held[planned.attempt_id])
            else:
                self.planner.undo(planned.attempt_id)

    def _fall_quiet(self) -> None:
        """No job waits any more, and every job has saved after a while, so some may grow."""
        facts = self.planner.snapshot()
        for waiting in facts.candidates:
            self.planner.drop(waiting.attempt_id)
        self.now += 4000.0
        for held in facts.holdings:
            self.planner.save(held.attempt_id, self.now - 10.0)

    def _carry_out(self, plan_made: Plan) -> None:
        """Carry out the plan like the control plane: starts are confirmed, and evicted jobs are stopping."""
        held = {holding.attempt_id: holding for holding in self.planner.snapshot().holdings}
        for start in plan_made.starts:
            if start.attempt_id in held:
                self.planner.hold(held[start.attempt_id])
        for eviction in plan_made.evictions:
            holding = held.get(eviction.attempt_id)
            if holding is not None:
                stopping = msgspec.structs.replace(holding, is_stopping=True, grows_to=eviction.num_nodes)
                self.planner.hold(stopping)


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, list[Change]]:
    patience_s = draw(st.sampled_from([0.0, 600.0, inf]))
    classes = draw(
        st.sampled_from([DEFAULT_CLASSES, (PriorityClass(name="all", value=-1, can_preempt=True),)])
    )
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
    """Yield each plan, and a planner that was made from the same facts just before it."""
    for kind, which in [*changes, ("plan", 0)]:
        if kind == "plan":
            fresh = Planner.of(life.planner.snapshot(), life.planner.policy)
            life.made = life.planner.plan(life.now)
            yield fresh, life.made
            life.settle_replacements()
        else:
            life.happen(kind, which)


@BUDGET
@given(lives())
def test_planner_that_followed_every_change_plans_like_one_that_did_not(
    case: tuple[Life, list[Change]],
) -> None:
    life, changes = case
    for fresh, result in _plans(life, changes):
        fresh_plan = fresh.plan(life.now)
        assert (result.starts, result.promises, result.evictions, result.replacements) == (
            fresh_plan.starts,
            fresh_plan.promises,
            fresh_plan.evictions,
            fresh_plan.replacements,
        )
        assert result.explanations == fresh_plan.explanations
        for waiting in life.planner.snapshot().candidates:
            explanation = life.planner.explain(waiting.attempt_id, life.now)
            assert explanation == fresh.explain(waiting.attempt_id, life.now)


@BUDGET
@given(lives())
def test_replacements_overfill_no_node_and_join_no_node_of_their_attempt(
    case: tuple[Life, list[Change]],
) -> None:
    life, changes = case
    for fresh, result in _plans(life, changes):
        before = {holding.attempt_id: holding for holding in fresh.snapshot().holdings}
        facts = life.planner.snapshot()
        views = {view.name: view for view in facts.nodes}
        for planned in result.replacements:
            held = next(other for other in facts.holdings if other.attempt_id == planned.attempt_id)
            if planned.task is None:
                assert held == before[planned.attempt_id]
                continue
            names = [task.node for task in held.allocation]
            assert len(set(names)) == len(names) == len(before[planned.attempt_id].allocation)
            node = planned.task.node
            assert views[node].closed_because is None
            devices = [
                (task.gpu_milli, index)
                for holding in facts.holdings
                for task in holding.allocation
                if task.node == node
                for index in task.gpu_ids
            ]
            assert len(devices) == len({index for _, index in devices})
        assert {planned.attempt_id for planned in result.replacements if planned.task is None} == {
            explanation.attempt_id for explanation in result.explanations
        }


def _promise_alone(
    views: tuple[NodeInfo, ...], holdings: tuple[Holding, ...], head: Candidate
) -> Promise | None:
    """Return what the head would be promised if no other job waited."""
    planner = Planner(Policy(patience_s=0.0, patience_factor=0.0))
    for view in views:
        planner.set_node(view)
    for holding in holdings:
        planner.hold(holding)
    planner.add(head)
    return next(iter(planner.plan(NOW).promises), None)


@BUDGET
@given(lives())
def test_no_job_starts_that_may_meet_a_window_of_others(case: tuple[Life, list[Change]]) -> None:
    """So no job that started after the declaration of a window delays the window."""
    life, changes = case
    for _, result in _plans(life, changes):
        facts = life.planner.snapshot()
        holdings = {holding.attempt_id: holding for holding in facts.holdings}
        for start in result.starts:
            held = holdings[start.attempt_id]
            ends_at = inf if held.time_limit_s is None else life.now + held.time_limit_s
            names = {task.node for task in start.allocation}
            for window in facts.windows:
                if names.isdisjoint(window.nodes) or window.project == held.project:
                    continue
                assert ends_at <= window.from_at or life.now >= window.until_at


@BUDGET
@given(lives())
def test_promised_start_meets_no_window(case: tuple[Life, list[Change]]) -> None:
    life, changes = case
    for fresh, result in _plans(life, changes):
        facts = fresh.snapshot()
        waiting = {candidate.attempt_id: candidate for candidate in facts.candidates}
        for promise in result.promises:
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
def test_backfill_does_not_delay_a_promise(snapshot: Snapshot) -> None:
    """By the limits of all jobs that run then: no job counts as ended before it must have ended."""
    planner = Planner.of(snapshot, Policy())
    result = planner.plan(NOW)
    after = planner.snapshot()
    by_id = {candidate.attempt_id: candidate for candidate in snapshot.candidates}
    for promise in result.promises[:1]:
        if promise.at is None or by_id[promise.attempt_id].array_id is not None:
            continue  # elements of an array have equal requests, which these have not
        fresh_plan = _promise_alone(after.nodes, after.holdings, by_id[promise.attempt_id])
        assert fresh_plan is not None
        assert fresh_plan.at is not None
        assert fresh_plan.at <= promise.at
