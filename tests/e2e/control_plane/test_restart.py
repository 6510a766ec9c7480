"""Jobs on a real cluster whose control plane is killed, drained and started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.runtime.files import spool
from tests.support.planes.real import RankGate, RealPlane, running_plane, until


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("restart") / "home") as real:
        yield real


def test_a_running_gang_survives_a_killed_control_plane_and_is_adopted(
    plane: RealPlane, gate: RankGate
) -> None:
    job = plane.submit(gate.run_line(), resources={"nodes": 2, "gpus": 2})
    gate.wait_for_ranks(2)
    (before,) = plane.attempts(plane.until_status(job, "running"))
    plane.kill()
    plane.up()
    (after,) = plane.attempts(plane.until_status(job, "running"))
    assert (after["attempt_id"], after["nodes"]) == (before["attempt_id"], before["nodes"])
    assert not gate.is_gone(0)
    assert not gate.is_gone(1)
    gate.open()
    plane.until_status(job, "succeeded")
    assert len(plane.attempts(job)) == 1


def test_job_that_ends_during_an_outage_is_recorded_with_its_exit_code(
    plane: RealPlane, gate: RankGate
) -> None:
    job = plane.submit(gate.run_line(exit_code=9))
    gate.wait_for_ranks()
    (attempt,) = plane.attempts(plane.until_status(job, "running"))
    plane.kill()
    gate.open()
    task = plane.spool_task(attempt)
    until(lambda: spool.read_outcome(task), "the supervisor writes how it ended")
    plane.up()
    plane.until_status(job, "failed")
    assert (job.exit_code, len(plane.attempts(job))) == (9, 1)
    assert "exited with code 9" in job.because


def test_supervisor_that_died_during_an_outage_is_noticed_and_its_job_retried(
    plane: RealPlane, gate: RankGate
) -> None:
    job = plane.submit(gate.run_line())
    gate.wait_for_ranks()
    (attempt,) = plane.attempts(plane.until_status(job, "running"))
    claim = spool.read_claim(plane.spool_task(attempt))
    assert claim is not None
    plane.kill()
    os.kill(claim.pid, signal.SIGKILL)
    plane.up()
    gate.wait_for_ranks()
    assert gate.is_gone(0)
    first, second = plane.attempts(plane.until_status(job, "running"))
    assert (first["reason"], second["epoch"]) == ("lost", 2)
    assert (job.data["losses"], job.data["failures"]) == (1, 0)
    gate.open()
    plane.until_status(job, "succeeded")


def test_a_stop_that_was_answered_happens_although_the_control_plane_died_at_once(
    plane: RealPlane, gate: RankGate
) -> None:
    job = plane.submit(gate.run_line(before='trap "" TERM; '), grace="2s")
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    job.stop()
    plane.kill()
    plane.up()
    plane.until_status(job, "cancelled")
    assert gate.is_gone(0)
    assert job.because.startswith("stopped by ")
    assert len(plane.attempts(job)) == 1


def test_a_drain_moves_a_job_to_another_node_and_costs_it_nothing(plane: RealPlane, gate: RankGate) -> None:
    job = plane.submit(gate.run_line(), grace="5s")
    gate.wait_for_ranks()
    (attempt,) = plane.attempts(plane.until_status(job, "running"))
    (left,) = attempt["nodes"]
    plane.shoal.drain(left, "new cooling")
    try:
        gate.wait_for_ranks()
        first, second = plane.attempts(plane.until_status(job, "running"))
        assert gate.is_gone(0)
        assert first["reason"] == "preempted"
        assert second["nodes"] != [left]
        assert (job.data["losses"], job.data["failures"]) == (0, 0)
    finally:
        plane.shoal.resume(left)
    gate.open()
    plane.until_status(job, "succeeded")


def most_at_once(attempts: list[dict[str, Any]]) -> int:
    """Return how many jobs held resources together at the busiest moment."""
    moves = [(a["placed_at"], 1) for a in attempts] + [(a["ended_at"], -1) for a in attempts]
    busy = most = 0
    for _, change in sorted(moves):
        busy += change
        most = max(most, busy)
    return most


def test_an_array_never_holds_more_than_it_allows_itself(plane: RealPlane) -> None:
    array = plane.shoal.submit_array(
        run="sleep 0.2", workdir=None, resources={"cpus": 0.1}, array={"indices": "0-4", "at_once": 2}
    )
    until(lambda: all(job.is_ended for job in array.all()), "every element ends")
    elements = array.all()
    assert {job.status for job in elements} == {"succeeded"}
    attempts = [attempt for job in elements for attempt in plane.attempts(job)]
    assert len(attempts) == 5
    assert most_at_once(attempts) == 2


def test_job_starts_after_its_dependencies_or_says_why_it_never_will(
    plane: RealPlane, gate: RankGate
) -> None:
    first = plane.submit(gate.run_line(exit_code=3), name="first")
    if_good = plane.submit("true", after=[first.job_id])
    if_bad = plane.submit("true", after=[f"{first.job_id}:failed"])
    whatever = plane.submit("true", after=[f"{if_good.job_id}:ended"])
    gate.wait_for_ranks()
    until(
        lambda: (if_good.why()["explanation"] or {}).get("why") == "dependency", "it says what it waits for"
    )
    assert first.ref in if_good.why()["sentence"]
    gate.open()
    for job in (if_bad, whatever):
        plane.until_status(job, "succeeded")
    plane.until_status(if_good, "cancelled")
    assert if_good.because == f"{first.ref} first failed; this job was to start only after it succeeded"
    ended_at = first.refresh().data["ended_at"]
    assert plane.attempts(if_bad)[0]["placed_at"] >= ended_at


def test_a_job_is_stopped_at_its_time_limit(plane: RealPlane, gate: RankGate) -> None:
    job = plane.submit(gate.run_line(), time_limit="1s", grace="1s")
    gate.wait_for_ranks()
    plane.until_status(job, "failed")
    assert gate.is_gone(0)
    assert plane.attempts(job)[0]["reason"] == "time_limit"
    assert "the time limit of 1 s has passed" in job.because


def test_failed_job_is_retried_after_a_growing_pause(plane: RealPlane) -> None:
    job = plane.submit('test "$SHOAL_EPOCH" = 3', retry={"max": 3, "backoff": "300ms"})
    plane.until_status(job, "succeeded")
    attempts = plane.attempts(job)
    assert [a["reason"] for a in attempts] == ["exit", "exit", "succeeded"]
    pauses = [a["placed_at"] - a["queued_at"] for a in attempts]
    assert pauses[1] >= 0.3
    assert pauses[2] >= 0.6


@pytest.mark.parametrize("program,code", [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_run_ends_with_the_exit_code_of_the_job(plane: RealPlane, program: str, code: int) -> None:
    done = plane.command("run", "--workdir", "", "--", "sh", "-c", program)
    assert done.returncode == code, done.stderr
