"""Many ranks are lost in one run, and its loss curve and weights are those of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import ROOT
from tests.support.planes.simulated import SimulatedCluster, running_cluster
from tests.support.runtime.rank_boards import training_pids
from tests.support.runtime.tasks import pids_with
from tests.support.runtime.torchrun import torchrun

FOLDER = ROOT / "examples" / "language_model"
RANKS, EVERY = 2, 8
PACE_S = 0.03
"""A step is shorter than the time to notice it and to strike."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
Curve = dict[int, str]


@pytest.fixture(scope="module")
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path_factory.mktemp("home"), "--demo", "1x2") as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("ddp", 20), ("fsdp2", 20)],  # each seventh fault of ddp stops a rank instead of killing it
)
def test_twenty_faults_change_neither_the_loss_curve_nor_a_bit_of_the_weights(
    shoal: SimulatedCluster, tmp_path: Path, name: str, wanted: int
) -> None:
    steps = wanted * EVERY + 30
    curve, weights, faults = under_fire(shoal, tmp_path, name, wanted, steps)
    assert faults == wanted
    expected, kept = unharmed(tmp_path, name, steps)
    # A rank that is killed between a step and its line leaves a step without a line.
    assert len(curve) >= steps - wanted
    assert curve == {step: expected[step] for step in curve}
    assert curve[steps] == expected[steps]
    assert weights == kept


def under_fire(
    shoal: SimulatedCluster, folder: Path, name: str, wanted: int, steps: int
) -> tuple[Curve, set[str], int]:
    """Return the curve, the final weights, and the number of faults."""
    spec = (
        (FOLDER / f"{name}.yaml")
        .read_text()
        .replace("max: 3", "max: 100")
        .replace("backoff: 1s", "backoff: 0s")
    )
    job = folder / "job.yaml"
    job.write_text(f"workdir: {FOLDER}\n{spec}")
    job_name = f"fire-{name}-{wanted}-{os.getpid()}"
    shoal("run", "-d", "-e", f"STEPS={steps}", "-e", f"PACE_S={PACE_S}", "--name", job_name, str(job))
    dice, faults = random.Random(name), 0
    lines: list[str] = []
    for line in shoal.follow(job_name):
        lines.append(line)
        step = newest(line)
        if faults < wanted and step is not None and step >= (faults + 1) * EVERY:
            faults += strike(job_name, f"{name}.py", dice, how(name, faults))
    log = "\n".join(lines)
    return curve_of(log), weights_of(log), faults


def how(name: str, number: int) -> signal.Signals:
    """Mostly kill. A stopped rank is noticed only by its steps, which only some programs report."""
    return signal.SIGSTOP if name == "ddp" and number % 7 == 6 else signal.SIGKILL


def strike(job: str, script: str, dice: random.Random, how: signal.Signals) -> int:
    """Hit one of the ranks if all are there, and the spare if the program has one."""
    mine = f"SLURM_JOB_NAME={job}".encode()
    pids = []
    for pid in sorted(pids_with(f"bin/python\0{script}\0")):
        with contextlib.suppress(OSError):
            if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                pids.append(pid)
    if len(pids) < RANKS + (script == "ddp.py"):
        return 0
    victims = list(training_pids(pids).values()) if script == "ddp.py" else pids[:RANKS]
    if len(victims) != RANKS:
        return 0
    os.kill(dice.choice(victims), how)
    return 1


def newest(line: str) -> int | None:
    match = re.search(r"step +(\d+) of \d+", line)
    return int(match.group(1)) if match else None


def curve_of(log: str) -> Curve:
    """Return the loss of each step, as reported last."""
    losses = dict(re.findall(r"step +(\d+) of \d+  loss ([0-9.]+)", log))
    return {int(step): losses[step] for step in sorted(losses, key=int)}


def weights_of(log: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f]{16})", log))


def unharmed(folder: Path, name: str, steps: int) -> tuple[Curve, set[str]]:
    """Return the result of two undisturbed ranks outside of Shoal."""
    saved = str(folder / "saved")
    log = torchrun(FOLDER / f"{name}.py", STEPS=str(steps), SHOAL_CHECKPOINT_DIR=saved)
    return curve_of(log), weights_of(log)
