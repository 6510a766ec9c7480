"""Many ranks are lost in one run: its loss curve and its weights are those of an unharmed one."""

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
from tests.support.boards import training
from tests.support.shares import processes_with
from tests.support.simulated import Cluster, a_cluster
from tests.support.torchrun import torchrun

FOLDER = ROOT / "examples" / "language_model"
RANKS, EVERY = 2, 8
PACE_S = 0.03
"""A step is shorter than it takes to hear of it and to strike."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
Curve = dict[int, str]


@pytest.fixture(scope="module")
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with a_cluster(tmp_path_factory.mktemp("home"), "--demo", "1x2") as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("ddp", 20), ("fsdp2", 20)],  # each seventh of ddp's is stopped, and not killed
)
def test_faults_in_a_row_change_neither_the_loss_curve_nor_a_bit_of_the_weights(
    shoal: Cluster, tmp_path: Path, name: str, wanted: int
) -> None:
    steps = wanted * EVERY + 30
    curve, weights, faults = under_fire(shoal, tmp_path, name, wanted, steps)
    assert faults == wanted
    expected, kept = unharmed(tmp_path, name, steps)
    # A rank that is killed between a step and its line leaves a step that nobody tells of.
    assert len(curve) >= steps - wanted
    assert curve == {step: expected[step] for step in curve}
    assert curve[steps] == expected[steps]
    assert weights == kept


def under_fire(
    shoal: Cluster, folder: Path, name: str, wanted: int, steps: int
) -> tuple[Curve, set[str], int]:
    """The curve, the weights at the end, and how many faults there were."""
    spec = (
        (FOLDER / f"{name}.yaml")
        .read_text()
        .replace("max: 3", "max: 100")
        .replace("backoff: 1s", "backoff: 0s")
    )
    job = folder / "job.yaml"
    job.write_text(f"workdir: {FOLDER}\n{spec}")
    own = f"fire-{name}-{wanted}-{os.getpid()}"
    shoal("run", "-d", "-e", f"STEPS={steps}", "-e", f"PACE_S={PACE_S}", "--name", own, str(job))
    dice, faults = random.Random(name), 0
    told: list[str] = []
    for line in shoal.follow(own):
        told.append(line)
        step = newest(line)
        if faults < wanted and step is not None and step >= (faults + 1) * EVERY:
            faults += strike(own, f"{name}.py", dice, how(name, faults))
    said = "\n".join(told)
    return curve_of(said), weights_of(said), faults


def how(name: str, number: int) -> signal.Signals:
    """Mostly killed. A stopped rank is noticed by its steps, of which only some programs tell."""
    return signal.SIGSTOP if name == "ddp" and number % 7 == 6 else signal.SIGKILL


def strike(job: str, script: str, dice: random.Random, how: signal.Signals) -> int:
    """Hit one of the ranks, if all are there and, of a program that has one, a spare."""
    mine = f"SLURM_JOB_NAME={job}".encode()
    found = []
    for pid in sorted(processes_with(f"bin/python\0{script}\0")):
        with contextlib.suppress(OSError):
            if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    if len(found) < RANKS + (script == "ddp.py"):
        return 0
    victims = list(training(found).values()) if script == "ddp.py" else found[:RANKS]
    if len(victims) != RANKS:
        return 0
    os.kill(dice.choice(victims), how)
    return 1


def newest(line: str) -> int | None:
    found = re.search(r"step +(\d+) of \d+", line)
    return int(found.group(1)) if found else None


def curve_of(said: str) -> Curve:
    """The loss of each step, as it was told last."""
    told = dict(re.findall(r"step +(\d+) of \d+  loss ([0-9.]+)", said))
    return {int(step): told[step] for step in sorted(told, key=int)}


def weights_of(said: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f]{16})", said))


def unharmed(folder: Path, name: str, steps: int) -> tuple[Curve, set[str]]:
    """What two ranks come to outside of Shoal, with nothing in their way."""
    saved = str(folder / "saved")
    said = torchrun(FOLDER / f"{name}.py", STEPS=str(steps), SHOAL_CHECKPOINT_DIR=saved)
    return curve_of(said), weights_of(said)
