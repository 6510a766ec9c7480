"""A firm start is the latest possible one: if no new job comes, it is met whatever else starts."""

from __future__ import annotations

from math import inf

from hypothesis import event, given, settings
from hypothesis import strategies as st

from shoal.model.job import GpuRequest, ResourceRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, Planner, Policy, Snapshot
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.facts.capacity import ends_at
from shoal.scheduler.prediction.outlook import firm_starts
from tests.support.clusters import NOW, candidate, node

PROJECTS = ("vision", "speech")
DEVICES = st.sampled_from([None, None, DeviceAmounts(gpus=2), DeviceAmounts(gpus=4), DeviceAmounts(gpus=6)])


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Candidate:
    least = draw(st.integers(1, 2))
    wanted = ResourceRequest(
        min_nodes=least,
        max_nodes=least + draw(st.integers(0, 1)),
        gpus=GpuRequest(count=draw(st.integers(1, 4))),
        cpus=1.0,
        time_limit_s=draw(st.sampled_from([60.0, 300.0, 1000.0])),
    )
    return candidate(
        number,
        wanted,
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
        ProjectInfo(name=name, quota=draw(DEVICES), limit=draw(DEVICES), borrow=draw(DEVICES))
        for name in (PROJECTS if is_shared else ())
    )
    return Snapshot(
        nodes=tuple(node(f"n{number}", gpus=4) for number in range(draw(st.integers(2, 3)))),
        holdings=(),
        candidates=tuple(draw(jobs(number)) for number in range(draw(st.integers(3, 9)))),
        projects=views,
    )


def starts_by_limits(planner: Planner, now: float) -> dict[str, float]:
    """Return when each job starts that does, if every job runs to its limit and no new job comes."""
    started: dict[str, float] = {}
    for _ in range(60):
        result = planner.plan(now)
        started.update((start.attempt_id, now) for start in result.starts)
        ends = {item.attempt_id: ends_at(item) for item in planner.snapshot().holdings}
        stopped = {eviction.attempt_id for eviction in result.evictions}
        following = now if stopped else min((*ends.values(), result.replan_at or inf), default=inf)
        if following == inf:
            break
        now = following
        for attempt_id in [item for item, at in ends.items() if at <= now or item in stopped]:
            planner.release(attempt_id, now)
    return started


@settings(max_examples=200)
@given(contested())
def test_firm_start_is_never_delayed(snapshot: Snapshot) -> None:
    planner = Planner.of(snapshot, Policy())
    result = planner.plan(NOW)
    firm = firm_starts(planner.snapshot(), result.promises, NOW)
    event(f"{len(result.promises)} promised, {len(firm)} firm")
    started = starts_by_limits(planner, NOW)
    for attempt_id, at in firm.items():
        assert started.get(attempt_id, inf) <= at


def test_start_of_a_job_too_large_for_its_quota_is_not_firm_beside_one_that_fits() -> None:
    """The small job starts first, as soon as the quota has room for it."""

    def asking(number: int, nodes: int, gpus: int, queue: str) -> Candidate:
        wanted = ResourceRequest(
            min_nodes=nodes, max_nodes=nodes, gpus=GpuRequest(count=gpus), cpus=1.0, time_limit_s=60.0
        )
        return candidate(number, wanted, project="vision", queue=queue, submitted_at=NOW - 10.0)

    snapshot = Snapshot(
        nodes=(node("n0", gpus=4), node("n1", gpus=4)),
        holdings=(),
        candidates=(asking(0, 1, 4, "default"), asking(1, 2, 4, "default"), asking(2, 2, 1, "night")),
        projects=(ProjectInfo(name="vision", quota=DeviceAmounts(gpus=4)),),
    )
    planner = Planner.of(snapshot, Policy())
    result = planner.plan(NOW)
    assert result.promises
    assert firm_starts(planner.snapshot(), result.promises, NOW) == {}
