"""Buckets and slots: bounded, fair, and given back."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from shoal.api.http.limits import MAX_PEERS, Bucket, StreamSlots
from shoal.errors import LimitReached
from shoal.identity import Caller, CallerKind


class Ticker:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    clock = Ticker()
    bucket = Bucket(3, 0.5, clock)
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]
    assert bucket.take("b")
    clock.now += 2.0
    assert [bucket.take("a") for _ in range(2)] == [True, False]
    clock.now += 1e6
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]


def test_a_bucket_remembers_a_bounded_number_of_names() -> None:
    bucket = Bucket(1, 0.0, Ticker())
    for number in range(MAX_PEERS * 3):
        bucket.take(str(number))
    assert len(bucket._left) == MAX_PEERS


def test_slots_are_limited_for_each_and_for_all_and_come_back() -> None:
    slots = StreamSlots(max_total=3, max_per_account=2)
    a, b, c = (Caller(kind=CallerKind.USER, id=f"usr_{name}", name=name) for name in "abc")
    with slots.held(a), slots.held(a):
        with pytest.raises(LimitReached), slots.held(a):
            pass
        with slots.held(b), pytest.raises(LimitReached), slots.held(c):
            pass
    with slots.held(a), slots.held(a), slots.held(c):
        pass


def job(number: int, project: str = "vision", owner: str = "usr_1") -> Caller:
    name = f"{project}/{number}"
    return Caller(kind=CallerKind.JOB, id=f"job_{name}", name=name, project=project, owner=owner)


def test_jobs_share_the_streams_of_their_project_and_of_their_owner() -> None:
    slots = StreamSlots(max_total=100, max_per_account=2)
    with slots.held(job(1)), slots.held(job(2)):
        with pytest.raises(LimitReached, match="2 streams of jobs of project vision"), slots.held(job(3)):
            pass
        with pytest.raises(LimitReached, match="of owner usr_1"), slots.held(job(4, "speech")):
            pass
        with slots.held(job(5, "speech", "usr_2")):
            pass
    with slots.held(job(6)):
        pass


def test_jobs_of_any_number_of_projects_leave_half_of_the_streams_to_people() -> None:
    slots = StreamSlots(max_total=10, max_per_account=2)
    ada = Caller(kind=CallerKind.USER, id="usr_ada", name="ada")
    with ExitStack() as held:
        for number in range(5):
            held.enter_context(slots.held(job(number, f"project-{number}", f"usr_{number}")))
        with pytest.raises(LimitReached, match="all jobs together"), slots.held(job(9, "other", "usr_9")):
            pass
        held.enter_context(slots.held(ada))
