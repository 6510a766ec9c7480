"""Transformers, Lightning and Accelerate with Shoal's callback: metrics, hangs, drills that count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.client.handles import JobHandle
from tests.style.tree import ROOT
from tests.support.planes.real import RealPlane, running_plane, until
from tests.support.runtime.torchrun import needs_torch

pytestmark = [needs_torch, pytest.mark.slow]
KINDS = (
    pytest.param("transformers", marks=pytest.mark.soak),
    pytest.param("lightning", marks=pytest.mark.soak),
    pytest.param("accelerate", marks=pytest.mark.soak),
)
"""`make soak` runs them: each takes half a minute and more, mostly for imports."""
START_S = 120.0
"""Each library imports for several seconds."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("callbacks") / "home", demo="3x1") as plane:
        yield plane


def started(plane: RealPlane, kind: str) -> JobHandle:
    """Start the example as its first line says, but for longer."""
    path = str(ROOT / "examples" / "callbacks" / f"{kind}.yaml")
    done = plane.command("run", "-d", "-e", "STEPS=1000000", "-e", "PAUSE_S=0.05", "--json", path)
    assert done.returncode == 0, done.stderr
    return plane.shoal.job(json.loads(done.stdout)["job_id"])


def curves(plane: RealPlane, job: JobHandle) -> set[str]:
    done = plane.command("metrics", job.ref, "--json")
    assert done.returncode == 0, done.stderr
    return {one["name"] for one in json.loads(done.stdout)["items"]}


def drill(plane: RealPlane, kind: str, job: JobHandle) -> dict[str, Any]:
    done = plane.command("drill", kind, job.ref, "--window", "0s", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_program_of_another_library_tells_of_its_steps(plane: RealPlane, kind: str) -> None:
    job = started(plane, kind)
    until(lambda: "checkpoint_step" in curves(plane, job), f"{kind} has saved", START_S)
    assert {"loss", "steps_per_s"} <= curves(plane, job)
    told = drill(plane, "kill-rank", job)
    assert (told["outcome"], told["tells_steps"], told["new_attempts"]) == ("recovered", True, 0)
    assert told["steps_lost"] is not None
    said = {line["text"] for line in plane.shoal.logs(job.job_id) if line["text"].startswith("resumes from")}
    assert len(said) == 2, "first from nothing, then from its newest checkpoint"
    assert told["noticed_s"] <= told["stepped_s"]
    if kind == "transformers":  # the three have that in common
        hung = drill(plane, "hang", job)
        assert (hung["outcome"], hung["new_attempts"]) == ("recovered", 0)
    job.stop()


@pytest.mark.soak
def test_example_ends_well_and_says_so_outside_of_steps(plane: RealPlane) -> None:
    """After the last step nothing is a hang, and the ranks end by themselves."""
    path = str(ROOT / "examples" / "callbacks" / "accelerate.yaml")
    done = plane.command("run", "-e", "STEPS=20", "-e", "PAUSE_S=0", path, timeout_s=START_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count("resumes from step 0") == 2
