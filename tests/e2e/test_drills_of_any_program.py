"""Drills of programs that do not use `shoal.runtime`, on two simulated nodes: what is said of them is so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from tests.support.real_plane import RealPlane, a_plane, until

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
    with a_plane(tmp_path_factory.mktemp("drills") / "home", demo="4x1") as plane:
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
    words = ("drill", "kill-rank", job.ref, "--window", "1s", "--json")
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli.main", *words], env=plane.env, stdout=subprocess.PIPE, text=True
    )


def ended(drill: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    told, _ = drill.communicate(timeout=90)
    result: dict[str, Any] = json.loads(told)["result"]
    return drill.returncode, result


def test_program_that_runs_again_has_recovered_and_one_that_cannot_load_is_in_a_crash_loop(
    plane: RealPlane,
) -> None:
    well, broken = running(plane, WELL), running(plane, BROKEN)
    drills = kill_rank(plane, well), kill_rank(plane, broken)

    code, told = ended(drills[0])
    assert (code, told["outcome"], told["sign"], told["new_attempts"]) == (0, "recovered", "output", 0)
    assert told["stepped_s"] < told["watched_s"], "when it ran again, not how long that was watched"
    assert told["watched_s"] >= 10.0

    code, told = ended(drills[1])
    assert (code, told["outcome"], told["num_ended"]) == (1, "crash loop", 2)
    assert "RuntimeError: cannot read" in told["because"]
    assert "train.py:6)" in told["because"]
    assert told["new_attempts"] > 0, "what gives up is not started in place again and again"
    again = list(plane.shoal.events(job=broken.job_id, kind="attempt.regrouped", tail=10))
    assert len(again) == 1, "for the drill"
    broken.stop()
    well.stop()
