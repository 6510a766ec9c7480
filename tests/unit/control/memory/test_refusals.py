"""Counts of refused requests: bounded, and reported less often the longer they go on."""

from __future__ import annotations

from itertools import pairwise

from shoal.control import Actor
from shoal.control.memory import refusals
from shoal.control.memory.refusals import FIRST_PAUSE_S, LONGEST_PAUSE_S, Refusals
from shoal.engines.fake import VirtualClock


def caller(number: int) -> Actor:
    return Actor(kind="user", id=f"usr_{number}", name=f"name-{number}")


def counting(clock: VirtualClock) -> Refusals:
    return Refusals(clock.monotonic, clock.now)


def test_more_callers_than_are_kept_are_counted_together_and_none_is_lost() -> None:
    counts = counting(VirtualClock())
    for number in range(3 * refusals.MAX_CALLERS):
        counts.count(caller(number), "GET /v1/users 403", f"/v1/users/{number}")
    taken = counts.take(is_all=True)
    assert len(taken) <= refusals.MAX_CALLERS
    assert sum(refused.event_data()["count"] for refused in taken) == 3 * refusals.MAX_CALLERS
    assert "unknown:others" in {str(refused.actor) for refused in taken}


def test_many_addresses_are_counted_together_and_push_no_user_out() -> None:
    counts = counting(VirtualClock())
    counts.count(caller(1), "GET /v1/users 403", "/v1/users")
    addresses = 3 * refusals.MAX_CALLERS
    for number in range(addresses):
        address = f"2001:db8:{number:x}::/64"
        counts.count(Actor(kind="unknown", id=address, name=address), "GET any 401", "/v1/me")
    taken = {str(refused.actor): refused.event_data()["count"] for refused in counts.take(is_all=True)}
    assert taken.pop(str(caller(1))) == 1
    assert len(taken) == refusals.MAX_STRANGERS + 1
    assert sum(taken.values()) == addresses


def test_routes_and_paths_of_one_caller_are_bounded() -> None:
    counts = counting(VirtualClock())
    for number in range(500):
        counts.count(caller(1), f"GET /{number} 403", f"/{number}")
    (refused,) = counts.take(is_all=True)
    data = refused.event_data()
    assert len(data["routes"]) == refusals.MAX_ROUTES + 1
    assert (data["count"], data["routes"]["other"]) == (500, 500 - refusals.MAX_ROUTES)
    assert len(data["paths"]) == refusals.MAX_PATHS


def test_persistent_caller_gets_events_less_and_less_often() -> None:
    clock = VirtualClock()
    counts = counting(clock)
    counted = []
    for second in range(4 * 3600):
        clock.advance(1)
        counts.count(caller(1), "GET /v1/users 403", "/v1/users")
        counted += [(second, refused.event_data()["count"]) for refused in counts.take()]
    pauses = [after[0] - before[0] for before, after in pairwise(counted)]
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S
    assert sum(count for _, count in counted) == counted[-1][0] + 1


def test_quiet_caller_is_forgotten_and_requests_for_nothing_make_no_event() -> None:
    clock = VirtualClock()
    counts = counting(clock)
    counts.count(caller(1), "GET /v1/users 403", "/v1/users")
    counts.count(caller(2), "GET /v1/jobs/{job_id} 404", "/v1/jobs/job_0", is_nowhere=True)
    clock.advance(FIRST_PAUSE_S)
    assert [refused.actor.id for refused in counts.take()] == ["usr_1"]
    clock.advance(LONGEST_PAUSE_S)
    assert counts.take() == []
    assert not counts._callers
