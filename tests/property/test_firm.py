"""A start that is said to be the latest possible is: if nobody new comes, it is met whatever else starts."""

from __future__ import annotations

from math import inf

from hypothesis import event, given, settings
from hypothesis import strategies as st

from shoal.model.people import Devices
from shoal.model.request import GpuRequest, Request
from shoal.scheduler import Candidate, Planner, Policy, Snapshot
from shoal.scheduler.capacity import ends_at
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.firm import firm_starts
from tests.support.clusters import NOW, job, node

PROJECTS = ("vision", "speech")
DEVICES = st.sampled_from([None, None, Devices(gpus=2), Devices(gpus=4), Devices(gpus=6)])


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Candidate:
    least = draw(st.integers(1, 2))
    asked = Request(
        min_nodes=least,
        max_nodes=least + draw(st.integers(0, 1)),
        gpus=GpuRequest(count=draw(st.integers(1, 4))),
        cpus=1.0,
        time_limit_s=draw(st.sampled_from([60.0, 300.0, 1000.0])),
    )
    return job(
        number,
        asked,
        project=draw(st.sampled_from(PROJECTS)),
        priority=draw(st.sampled_from([0, 0, 0, 1])),
        queue=draw(st.sampled_from(["default", "default", "night"])),
        submitted_at=NOW - draw(st.sampled_from([10.0, 500.0])),
        due_at=draw(st.sampled_from([None, NOW + 200.0, NOW + 5000.0])),
        score=draw(st.sampled_from([1.0, 2.0])),
    )


@st.composite
def contested(draw: st.DrawFn) -> Snapshot:
    is_shared = draw(st.booleans())
    views = tuple(
        ProjectView(name=name, quota=draw(DEVICES), limit=draw(DEVICES), borrow=draw(DEVICES))
        for name in (PROJECTS if is_shared else ())
    )
    return Snapshot(
        nodes=tuple(node(f"n{number}", gpus=4) for number in range(draw(st.integers(2, 3)))),
        holdings=(),
        candidates=tuple(draw(jobs(number)) for number in range(draw(st.integers(3, 9)))),
        projects=views,
    )


def starts_by_limits(planner: Planner, now: float) -> dict[str, float]:
    """When everybody starts who does, if everybody runs to their limits and nobody comes."""
    started: dict[str, float] = {}
    for _ in range(60):
        made = planner.plan(now)
        started.update((start.attempt_id, now) for start in made.starts)
        ends = {one.attempt_id: ends_at(one) for one in planner.snapshot().holdings}
        stopped = {eviction.attempt_id for eviction in made.evictions}
        following = now if stopped else min((*ends.values(), made.look_again_at or inf), default=inf)
        if following == inf:
            break
        now = following
        for attempt_id in [one for one, at in ends.items() if at <= now or one in stopped]:
            planner.release(attempt_id, now)
    return started


@settings(max_examples=200)
@given(contested())
def test_start_that_nobody_who_waits_can_put_off_is_not_put_off(snapshot: Snapshot) -> None:
    planner = Planner.of(snapshot, Policy())
    made = planner.plan(NOW)
    firm = firm_starts(planner.snapshot(), made.promises, NOW)
    event(f"{len(made.promises)} promised, {len(firm)} firm")
    started = starts_by_limits(planner, NOW)
    for attempt_id, at in firm.items():
        assert started.get(attempt_id, inf) <= at


def test_start_of_one_too_large_for_its_quota_is_not_firm_beside_one_that_fits() -> None:
    """The small one goes first as soon as the quota has room for it."""

    def asking(number: int, nodes: int, gpus: int, queue: str) -> Candidate:
        asked = Request(
            min_nodes=nodes, max_nodes=nodes, gpus=GpuRequest(count=gpus), cpus=1.0, time_limit_s=60.0
        )
        return job(number, asked, project="vision", queue=queue, submitted_at=NOW - 10.0)

    snapshot = Snapshot(
        nodes=(node("n0", gpus=4), node("n1", gpus=4)),
        holdings=(),
        candidates=(asking(0, 1, 4, "default"), asking(1, 2, 4, "default"), asking(2, 2, 1, "night")),
        projects=(ProjectView(name="vision", quota=Devices(gpus=4)),),
    )
    planner = Planner.of(snapshot, Policy())
    made = planner.plan(NOW)
    assert made.promises
    assert firm_starts(planner.snapshot(), made.promises, NOW) == {}
