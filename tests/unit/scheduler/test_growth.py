"""An elastic job goes on with more nodes when they stand idle and it pays, and not otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.model.attempt import NodeShare
from shoal.model.request import GpuRequest, Request
from shoal.scheduler import Candidate, GpuView, NodeView, Plan, Planner, Policy, Why
from shoal.scheduler.book import Book, holding_of
from shoal.scheduler.claims import Claims
from shoal.scheduler.growth import kept_to_grow
from shoal.scheduler.types import Ground

HOUR = 3600.0
GPUS = tuple(GpuView(index, "H100") for index in range(8))


def asked(least: int, most: int, **fields: Any) -> Request:
    return Request(min_nodes=least, max_nodes=most, cpus=8.0, gpus=GpuRequest(count=8), **fields)


def candidate(name: str, request: Request, at: float = 0.0) -> Candidate:
    return Candidate(
        attempt_id=name, job_id=name, project="vision", order=int(at), submitted_at=at, request=request
    )


def shrunken(request: Request) -> Planner:
    """Four nodes, of which the job got two: the others were taken when it started, and are free since."""
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeView(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS))
    planner.add(candidate("first", asked(2, 2)))
    assert planner.plan(0.0).starts
    planner.add(candidate("elastic", request, 1.0))
    (start,) = planner.plan(1.0).starts
    assert len(start.allocation) == 2
    planner.release("first", 2.0)
    return planner


def grown(planner: Planner, saved_at: float | None, now: float) -> Plan:
    if saved_at is not None:
        planner.save("elastic", saved_at)
    return planner.plan(now)


def test_job_that_saved_goes_on_with_the_nodes_that_stand_idle() -> None:
    (eviction,) = grown(shrunken(asked(1, 4)), 2 * HOUR - 60, 2 * HOUR).evictions
    assert (eviction.ground, eviction.attempt_id, eviction.num_nodes) == (Ground.GROWTH, "elastic", 4)
    assert eviction.lost_s == 60 + 120


@pytest.mark.parametrize(
    "why,request_,saved_at,now",
    [
        ("no checkpoint of it is known", asked(1, 4), None, 2 * HOUR),
        ("it has all the nodes it can use", asked(1, 2), 2 * HOUR - 60, 2 * HOUR),
        ("it has just begun", asked(1, 4), 500.0, 599.0),
        ("more is done again than is won", asked(1, 4), HOUR, 2 * HOUR),
        ("its limit ends it soon", asked(1, 4, time_limit_s=2 * HOUR + 300), 2 * HOUR - 60, 2 * HOUR),
    ],
)
def test_job_is_left_alone_where(why: str, request_: Request, saved_at: float | None, now: float) -> None:
    assert grown(shrunken(request_), saved_at, now).evictions == (), why


def test_job_is_not_stopped_for_nodes_that_others_work_on() -> None:
    planner = shrunken(asked(1, 4))
    for name in ("n0", "n1"):
        planner.set_node(NodeView(name=name, cpus=8.0, memory_bytes=64, gpus=GPUS, is_busy=True))
    assert grown(planner, 2 * HOUR - 60, 2 * HOUR).evictions == ()


def test_nobody_grows_while_somebody_waits() -> None:
    planner = shrunken(asked(1, 4))
    planner.add(candidate("wide", asked(3, 3), 3.0))
    assert grown(planner, 2 * HOUR - 60, 2 * HOUR).evictions == ()


def test_job_that_can_never_run_here_holds_no_growth_up() -> None:
    planner = shrunken(asked(1, 4))
    planner.add(candidate("huge", asked(9, 9), 3.0))
    assert grown(planner, 2 * HOUR - 60, 2 * HOUR).evictions


def test_job_grows_as_soon_as_that_wins_twice_what_is_done_again() -> None:
    """From two nodes to four, a minute after a checkpoint: half of what it has run, against six minutes."""
    assert grown(shrunken(asked(1, 4)), 660.0, 720.0).evictions == ()
    assert grown(shrunken(asked(1, 4)), 661.0, 721.0).evictions


def test_job_that_runs_is_told_what_its_growth_waits_for() -> None:
    planner = shrunken(asked(1, 4))
    grown(planner, None, 60.0)
    said = planner.explain_growth("elastic", 60.0)
    assert said is not None
    assert "no checkpoint of it was seen" in said.sentence
    planner.add(candidate("wide", asked(3, 3), 3.0))
    planner.plan(61.0)
    said = planner.explain_growth("elastic", 61.0)
    assert said is not None
    assert "1 job waits" in said.sentence
    assert planner.explain_growth("wide", 61.0) is None


def test_job_that_is_stopping_already_is_not_asked_twice() -> None:
    planner = shrunken(asked(1, 4))
    assert grown(planner, 2 * HOUR - 60, 2 * HOUR).evictions
    held = next(one for one in planner.snapshot().holdings if one.attempt_id == "elastic")

    planner.hold(msgspec.structs.replace(held, is_leaving=True))
    assert planner.plan(2 * HOUR + 1).evictions == ()


def stopping(planner: Planner, now: float) -> Planner:
    """The plan's growth is carried out as far as that it was asked to stop."""
    (eviction,) = planner.plan(now).evictions
    held = next(one for one in planner.snapshot().holdings if one.attempt_id == eviction.attempt_id)
    planner.hold(msgspec.structs.replace(held, is_leaving=True, grows_to=eviction.num_nodes))
    return planner


def test_nodes_it_goes_on_with_are_kept_until_it_has_stopped() -> None:
    planner = shrunken(asked(1, 4))
    planner.save("elastic", 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    planner.add(candidate("late", asked(1, 1), 2 * HOUR + 1))
    told = planner.plan(2 * HOUR + 2)
    assert told.starts == ()
    assert told.promises == ()
    said = planner.explain("late", 2 * HOUR + 2)
    assert said is not None
    assert said.why is Why.BEHIND
    assert said.details == ("`elastic` is stopping, and goes on with more nodes",)
    planner.release("elastic", 2 * HOUR + 5)
    planner.add(candidate("elastic again", asked(1, 4), 1.0))
    starts = {start.attempt_id: len(start.allocation) for start in planner.plan(2 * HOUR + 5).starts}
    assert starts == {"elastic again": 4}


def test_higher_priority_does_not_wait_for_a_job_that_grows() -> None:
    planner = shrunken(asked(1, 4))
    planner.save("elastic", 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    planner.add(msgspec.structs.replace(candidate("urgent", asked(1, 1), 2 * HOUR), priority=10))
    assert [start.attempt_id for start in planner.plan(2 * HOUR + 2).starts] == ["urgent"]


def test_power_of_its_own_nodes_is_kept_as_well_as_that_of_the_others() -> None:
    """One within its quota, who may have others stop, does not count on what the growing job gives back."""
    labels = {"rack": "r1", "gpu_watts": "100"}
    book = Book(Policy(power_caps={"r1": 3000.0}))
    for number in range(4):
        book.set_node(NodeView(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS, labels=labels))
    shares = tuple(
        NodeShare(node=f"n{n}", cpus=8.0, memory_bytes=64, gpu_ids=tuple(range(8))) for n in (0, 1)
    )
    held = msgspec.structs.replace(
        holding_of(candidate("elastic", asked(1, 4)), shares, 0.0), is_leaving=True, grows_to=3
    )
    book.hold(held)
    claims = Claims(book.capacity, book.windows, book.power)
    claim = kept_to_grow(book, claims, held, 1.0)
    assert claim is not None
    assert dict(claim.draw.watts) == {"r1": 3 * 800_000}
    assert claim.draw.spare == {"r1": 600_000}


def test_two_jobs_do_not_stop_for_the_same_idle_nodes() -> None:
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeView(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS))
    planner.add(candidate("first", asked(2, 2)))
    planner.plan(0.0)
    planner.add(candidate("filler", asked(1, 1)))
    planner.plan(0.0)
    planner.add(candidate("one", asked(1, 3), 1.0))
    planner.plan(1.0)
    planner.release("filler", 1.0)
    planner.add(candidate("two", asked(1, 3), 1.0))
    planner.plan(1.0)
    planner.release("first", 2.0)
    for name in ("one", "two"):
        planner.save(name, 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    assert planner.plan(2 * HOUR + 1).evictions == ()


def planned_anew(planner: Planner, now: float) -> tuple[Plan, Planner]:
    """What a planner does that is told the same facts today."""
    again = Planner.of(planner.snapshot(), planner.policy)
    return again.plan(now), again


def test_newcomer_that_is_before_a_growing_job_is_not_kept_from_its_nodes() -> None:
    planner = shrunken(asked(1, 4))
    planner.save("elastic", 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    for name, count, at in (("wide", 4, 2 * HOUR + 1), ("urgent", 1, 2 * HOUR + 2)):
        planner.add(msgspec.structs.replace(candidate(name, asked(count, count), at), priority=10))
        again, _ = planned_anew(planner, at)
        assert planner.plan(at).starts == again.starts
    assert planner.holds("urgent")


def test_growing_jobs_keep_idle_nodes_in_one_order_whoever_else_waits() -> None:
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeView(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS))
    for number, (name, priority) in enumerate((("a", -1), ("b", 0))):
        share = NodeShare(node=f"n{number}", cpus=8.0, memory_bytes=64, gpu_ids=tuple(range(8)))
        held = holding_of(candidate(name, asked(1, 2)), (share,), 0.0)
        planner.hold(msgspec.structs.replace(held, priority=priority, is_leaving=True, grows_to=2))
    planner.add(candidate("quick", asked(1, 1), 1.0))
    planner.add(msgspec.structs.replace(candidate("late", asked(1, 1), 1.0), priority=-1))
    assert [start.attempt_id for start in planner.plan(2.0).starts] == ["quick"]
    for now in (2.0, 3.0):
        _, again = planned_anew(planner, now)
        planner.plan(now)
        told = planner.explain("late", now)
        assert told is not None
        assert told.facts["behind_job_id"] == "b"
        assert told == again.explain("late", now)
