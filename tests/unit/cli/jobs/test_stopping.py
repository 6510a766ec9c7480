"""`shoal down --jobs` while jobs take their time: which jobs it waits for, and until when."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from shoal.cli.jobs import stop_and_retry
from shoal.client.connection import Connection
from shoal.client.handles import JobHandle
from tests.support.fakes.api_server import FakeApiServer, Shell, job_view

SILENT = {
    "why": "unreachable",
    "sentence": "no sign of life from node-a for 2 min; unreachable is not dead",
    "facts": {"silent_s": 120.0, "fence_s": 1860.0, "fence_left_s": 1740.0, "nodes": ["node-a"]},
}


def handle_of(shoal: Connection, number: int) -> JobHandle:
    return JobHandle(shoal, job_view(number, "stopping", nodes=["node-a"]))


def test_waiting_names_jobs_and_when_they_count_as_ended(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop_and_retry, "FIRST_WORD_S", 0.0)
    monkeypatch.setattr(stop_and_retry, "NEXT_WORD_S", 0.3)
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    for number in range(1, 5):
        path = f"/v1/jobs/job_{number:026d}"
        slow, over = job_view(number, "stopping", nodes=["node-a"]), job_view(number, "cancelled")
        fake.answers["GET", path] = [slow, slow, over] if number == 1 else over
        fake.answers["GET", f"{path}/why"] = {"explanation": SILENT}
    with Connection() as shoal:
        ended = stop_and_retry.wait_for_ends([handle_of(shoal, number) for number in range(1, 5)])
    assert ended == ["vision/1", "vision/2", "vision/3", "vision/4"]
    silence = "silent for 2m00s; unless it answers, it counts as ended at about 08:29 UTC"
    assert capsys.readouterr().err.splitlines() == [
        f"-- waiting for vision/1 on node-a ({silence}); Ctrl-C leaves it stopping",
        "-- and for 1 more, unless they have ended meanwhile",
    ]


def test_busy_server_is_asked_again_after_a_pause(
    shell: Shell, fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's limit is not the time to wait, and it does not end the command."""
    monkeypatch.setattr(stop_and_retry, "FIRST_WORD_S", 0.0)
    pauses: list[float] = []
    # Not the module's own: threads that other tests left behind sleep, too.
    fake_time = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr(stop_and_retry, "time", fake_time)
    slow, busy = job_view(1, "stopping", nodes=["node-a"]), fake.problem(429, "limit.reached", "too many ask")
    fake.answers["GET", f"/v1/jobs/job_{1:026d}"] = [busy, slow, busy, job_view(1, "cancelled")]
    with Connection() as shoal:
        assert stop_and_retry.wait_for_ends([handle_of(shoal, 1)]) == ["vision/1"]
    assert pauses == [stop_and_retry.NEXT_WORD_S]
    assert capsys.readouterr().err.splitlines() == [
        "-- too many ask; asking again in 10s",
        "-- waiting for vision/1 on node-a (stopping); Ctrl-C leaves it stopping",
    ]


def test_jobs_that_end_at_once_print_nothing(
    shell: Shell, fake: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["GET", f"/v1/jobs/job_{1:026d}"] = job_view(1, "cancelled")
    with Connection() as shoal:
        assert stop_and_retry.wait_for_ends([handle_of(shoal, 1)]) == ["vision/1"]
    assert capsys.readouterr().err == ""


def test_waiting_for_a_job_that_is_not_silent_prints_its_explanation(
    shell: Shell, fake: FakeApiServer
) -> None:
    with Connection() as shoal:
        handle = handle_of(shoal, 1)
    assert stop_and_retry.waiting_text(handle, {}, 0.0) == "waiting for vision/1 on node-a (stopping)"
    orphaned = {"why": "orphaned", "sentence": "what it left may still run", "facts": {"nodes": ["node-a"]}}
    text = stop_and_retry.waiting_text(handle, orphaned, 0.0)
    assert text == "waiting for vision/1 on node-a (what it left may still run)"
