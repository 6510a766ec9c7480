"""A restore drill on the machine of the original, which must not be disturbed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.real import RankGate, RealPlane, running_plane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[RealPlane]:
    with running_plane(tmp_path / "home", demo="1x2") as real:
        yield real


def copied(plane: RealPlane, to: Path) -> RealPlane:
    """Copy as `cp -a` does, beside the home that runs."""
    subprocess.run(["cp", "-a", plane.home, to], check=True)
    return RealPlane(to, demo="1x2")


def test_a_copied_home_leaves_the_jobs_of_the_original_alone(
    plane: RealPlane, gate: RankGate, tmp_path: Path
) -> None:
    job = plane.submit(gate.run_line(), name="prod")
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    waiting = plane.submit("true", after=[job.ref], name="next")
    copy = copied(plane, tmp_path / "copy")

    refused = copy.command("up", "--listen", "127.0.0.1:0")
    assert refused.returncode == 3
    assert f"is a copy of {plane.home}" in refused.stderr
    assert "`shoal up --restored`" in refused.stderr

    drill = copy.command("up", "--restored", "--listen", "127.0.0.1:0")
    assert drill.returncode == 0, drill.stderr
    try:
        for stopped_job in (job, waiting):
            seen = copy.shoal.job(stopped_job.ref)
            assert (seen.status, "restored from a copy" in seen.because) == ("cancelled", True)
        assert copy.command("audit", "--verify").returncode == 0
        assert "home restored" in copy.command("events", "--kind", "home.").stdout
        again = copy.command("up", "--restored")
        assert "already running" in again.stderr
        assert "becomes a home of its own" not in again.stderr
        assert plane.until_status(job, "running").status == "running"
        assert not gate.is_gone(0)
    finally:
        copy.down()
    assert not gate.is_gone(0)
    gate.open()
    plane.until_status(job, "succeeded")
    plane.until_status(waiting, "succeeded")
    assert len(plane.attempts(job)) == 1


def test_open_jobs_restart_if_the_operator_says_that_the_original_is_gone(
    plane: RealPlane, gate: RankGate, tmp_path: Path
) -> None:
    job = plane.submit(gate.run_line())
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    copy = copied(plane, tmp_path / "copy")
    plane.down()
    shutil.rmtree(plane.home)
    plane.home = copy.home  # for what comes after the test
    plane.env = copy.env
    assert copy.command("up", "--restored", "--rerun", "--listen", "127.0.0.1:0").returncode == 0
    gate.wait_for_ranks()
    seen = copy.shoal.job(job.ref)
    assert copy.attempts(seen)[0]["reason"] == "lost"
    gate.open()
    copy.until_status(seen, "succeeded")
    copy.down()
