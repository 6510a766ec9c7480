"""`shoal reserve` sends its flags and prints the result."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.fakes.api_server import FakeApiServer, Shell

MADE: dict[str, Any] = {
    "id": "win_1", "kind": "reservation", "nodes": ["node-01", "node-02"], "from_at": 1_800_000_000.0,
    "until_at": 1_800_007_200.0, "project": "vision", "because": "demo", "by": "ana",
    "created_at": 1_800_000_000.0, "still_there": ["speech/4"],
}  # fmt: skip
TOLD = "win_1: node-01, node-02 reserved for vision from 2027-01-15 08:00 until 2027-01-15 10:00 UTC\n"


def test_reserve_sends_its_flags_and_names_jobs_that_may_still_run(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/windows"] = (201, MADE)
    typed = "reserve --nodes node-01,node-02 --from 2027-01-15T08:00 --for 2h --project vision -m demo"
    result = shell(*typed.split())
    assert (result.code, result.out) == (0, TOLD)
    assert result.err == "note: speech/4 may still run there by then; end it with `shoal stop speech/4`\n"
    assert fake.requests[-1].json() == {
        "kind": "reservation",
        "nodes": ["node-01", "node-02"],
        "from_at": 1_800_000_000.0,
        "duration_s": 7200.0,
        "project": "vision",
        "because": "demo",
    }


def test_window_is_printed_to_the_minute_like_why(shell: Shell, fake: FakeApiServer) -> None:
    """The window begins no later, and ends no sooner, than printed."""
    odd = {**MADE, "from_at": MADE["from_at"] + 20.0, "until_at": MADE["until_at"] - 20.0}
    fake.answers["POST", "/v1/windows"] = (201, odd)
    assert shell("reserve", "--nodes", "node-01,node-02", "--for", "2h", "--project", "vision").out == TOLD


def test_maintenance_by_count_begins_now_by_default(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["POST", "/v1/windows"] = (201, {**MADE, "project": None, "kind": "maintenance"})
    assert shell(*["reserve", "--maintenance", "--count", "2", "--pool", "a100", "--for", "90m"]).code == 0
    sent = fake.requests[-1].json()
    assert sent == {"kind": "maintenance", "count": 2, "pool": "a100", "duration_s": 5400.0, "because": ""}
    shell(*["reserve", "--maintenance", "--count", "2", "--from", "1h", "--for", "90m", "--json"])
    assert fake.requests[-1].json()["from_at"] == pytest.approx(time.time() + 3600, abs=60)


def test_invalid_time_is_refused_before_anything_is_sent(shell: Shell, fake: FakeApiServer) -> None:
    result = shell(*["reserve", "--count", "2", "--from", "soon", "--for", "2h"])
    assert result.code == 2
    assert "`--from`: `soon` is not a moment such as `14:00`" in result.err
    assert "`--for`: `long` is not a time" in shell(*["reserve", "--count", "2", "--for", "long"]).err
    assert fake.paths("POST") == []


def test_reservation_is_cancelled_by_its_id(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["DELETE", "/v1/windows/win_1"] = MADE
    result = shell("reservations", "cancel", "win_1")
    assert (result.code, result.out) == (0, f"cancelled: {TOLD}")


def test_no_reservation_at_all_says_how_to_make_one(shell: Shell, fake: FakeApiServer) -> None:
    fake.answers["GET", "/v1/windows"] = {"items": [], "next_cursor": None}
    assert "`shoal reserve`" in shell("reservations").out
