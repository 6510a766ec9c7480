"""Drills of programs that do not use `shoal.runtime`, on two simulated nodes: the report is correct."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from tests.support.planes.real import RealPlane, running_plane, until

pytestmark = pytest.mark.slow
WELL = """
import os, time
print("begins", flush=True)
while True:
    time.sleep(0.1)
"""
BROKEN = """
import os, sys, time
def load(path):
    if os.path.exists(path):
        time.sleep(0.5)
        raise RuntimeError("cannot read " + path)
mark = os.path.join(os.environ["SHOAL_CHECKPOINT_DIR"], "rank" + os.environ["RANK"])
try:
    load(mark)
finally:
    for number in range(40):
        print("nanobind: leaked function", number, file=sys.stderr)
open(mark, "w").close()
print("begins", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("drills") / "home", demo="4x1") as plane:
        yield plane


def running(plane: RealPlane, program: str) -> JobHandle:
    job = plane.submit(
        "python train.py",
        setup=f"cat > train.py <<'END'\n{program}\nEND",
        checkpoint={},
        resources={"nodes": 2, "gpus": 1},
        retry={"max": 5, "backoff": "1s"},
    )
    plane.until_status(job, "running")
    until(lambda: len(lines(plane, job)) == 2, "both ranks have begun")
    return job


def lines(plane: RealPlane, job: JobHandle) -> list[str]:
    return [line["text"] for line in plane.shoal.logs(job.job_id) if line["text"] == "begins"]


def kill_rank(plane: RealPlane, job: JobHandle) -> subprocess.Popen[str]:
    arguments = ("drill", "kill-rank", job.ref, "--window", "1s", "--json")
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli.main", *arguments], env=plane.env, stdout=subprocess.PIPE, text=True
    )


def ended(drill: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    output, _ = drill.communicate(timeout=90)
    result: dict[str, Any] = json.loads(output)["result"]
    return drill.returncode, result


def test_drill_reports_recovery_or_a_crash_loop(
    plane: RealPlane,
) -> None:
    well, broken = running(plane, WELL), running(plane, BROKEN)
    drills = kill_rank(plane, well), kill_rank(plane, broken)

    code, output = ended(drills[0])
    assert (code, output["outcome"], output["sign"], output["new_attempts"]) == (0, "recovered", "output", 0)
    assert output["stepped_s"] < output["watched_s"], (
        "the time until it ran again, and not the length of the watch"
    )
    assert output["watched_s"] >= 10.0

    code, output = ended(drills[1])
    assert (code, output["outcome"], output["num_ended"]) == (1, "crash loop", 2)
    assert "RuntimeError: cannot read" in output["because"]
    assert "train.py:6)" in output["because"]
    assert output["new_attempts"] > 0, "a program that gives up is not started in place again and again"
    again = list(plane.shoal.events(job=broken.job_id, kind="attempt.regrouped", tail=10))
    assert len(again) == 1, "one restart for the drill"
    broken.stop()
    well.stop()
