"""`shoal down --jobs` while jobs take their time: for whom it waits, and until when."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from shoal.cli import stopping
from shoal.client.connection import Connection
from shoal.client.handles import JobHandle
from tests.support.cli import Shell
from tests.support.fake_server import FakeServer, job_view

SILENT = {
    "why": "unreachable",
    "sentence": "no sign of life from node-a for 2 min; unreachable is not dead",
    "facts": {"silent_s": 120.0, "fence_s": 1860.0, "fence_left_s": 1740.0, "nodes": ["node-a"]},
}


def handle_of(shoal: Connection, number: int) -> JobHandle:
    return JobHandle(shoal, job_view(number, "stopping", nodes=["node-a"]))


def test_those_that_do_not_end_are_named_with_when_they_count_as_ended(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stopping, "FIRST_WORD_S", 0.0)
    monkeypatch.setattr(stopping, "NEXT_WORD_S", 0.3)
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    for number in range(1, 5):
        path = f"/v1/jobs/job_{number:026d}"
        slow, over = job_view(number, "stopping", nodes=["node-a"]), job_view(number, "cancelled")
        fake.answers["GET", path] = [slow, slow, over] if number == 1 else over
        fake.answers["GET", f"{path}/why"] = {"explanation": SILENT}
    with Connection() as shoal:
        ended = stopping.wait_for_ends([handle_of(shoal, number) for number in range(1, 5)])
    assert ended == ["vision/1", "vision/2", "vision/3", "vision/4"]
    silence = "silent for 2m00s; without word it counts as ended at about 08:29 UTC"
    assert capsys.readouterr().err.splitlines() == [
        f"-- waiting for vision/1 on node-a ({silence}); Ctrl-C leaves it stopping",
        "-- and for 1 more, where they have not ended yet",
    ]


def test_a_server_that_is_too_busy_is_asked_again_after_a_pause(
    shell: Shell, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is its limit the time for which one waits, nor does it end the command."""
    monkeypatch.setattr(stopping, "FIRST_WORD_S", 0.0)
    pauses: list[float] = []
    # Not the module's own: threads that other tests left behind sleep, too.
    own = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(stopping, "time", own)
    slow, busy = job_view(1, "stopping", nodes=["node-a"]), fake.problem(429, "limit.reached", "too many ask")
    fake.answers["GET", f"/v1/jobs/job_{1:026d}"] = [busy, slow, busy, job_view(1, "cancelled")]
    with Connection() as shoal:
        assert stopping.wait_for_ends([handle_of(shoal, 1)]) == ["vision/1"]
    assert pauses == [stopping.NEXT_WORD_S]
    assert capsys.readouterr().err.splitlines() == [
        "-- too many ask; asked again in 10s",
        "-- waiting for vision/1 on node-a (stopping); Ctrl-C leaves it stopping",
    ]


def test_jobs_that_end_at_once_are_not_spoken_of(
    shell: Shell, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["GET", f"/v1/jobs/job_{1:026d}"] = job_view(1, "cancelled")
    with Connection() as shoal:
        assert stopping.wait_for_ends([handle_of(shoal, 1)]) == ["vision/1"]
    assert capsys.readouterr().err == ""


def test_one_that_is_not_silent_is_told_with_what_is_known_of_it(shell: Shell, fake: FakeServer) -> None:
    with Connection() as shoal:
        handle = handle_of(shoal, 1)
    assert stopping.waiting(handle, {}, 0.0) == "waiting for vision/1 on node-a (stopping)"
    orphaned = {"why": "orphaned", "sentence": "what it left may still run", "facts": {"nodes": ["node-a"]}}
    told = stopping.waiting(handle, orphaned, 0.0)
    assert told == "waiting for vision/1 on node-a (what it left may still run)"
