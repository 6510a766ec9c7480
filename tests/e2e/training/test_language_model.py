"""One language model in every kind of parallelism: each program learns, and goes on from its checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.style.tree import ROOT
from tests.support.planes.simulated import SimulatedCluster, rank_pid, running_cluster
from tests.support.runtime import torchrun as outside
from tests.support.runtime.torchrun import needs_torch

FOLDER = ROOT / "examples" / "language_model"
RANKS = {"ddp": 2, "fsdp2": 2, "tp": 2, "pp": 2, "fsdp2_tp": 4}
STEPS, MORE, LONG = 12, 15, 80
pytestmark = [pytest.mark.slow, needs_torch]


@pytest.fixture(scope="module")
def shoal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCluster]:
    with running_cluster(tmp_path_factory.mktemp("home"), "--demo", "1x2") as cluster:
        yield cluster


def losses(said: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) of \d+  loss ([0-9.]+)", said)}


def weights(said: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f]{16})", said))


def train(shoal: SimulatedCluster, name: str, *words: str) -> str:
    said = shoal("run", "-e", f"STEPS={STEPS}", *words, f"examples/language_model/{name}.yaml")
    assert len(re.findall(rf"rank \d of {RANKS.get(name, 2)} begins after step 0", said)) == RANKS.get(
        name, 2
    )
    told = losses(said)
    assert list(told) == list(range(1, STEPS + 1))
    assert told[STEPS] < 0.7 * told[1]
    return said


def test_every_program_has_a_job_and_a_test() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*RANKS, "deepspeed_zero", "serve", "two_nodes"}


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in RANKS if name not in ("ddp", "fsdp2")])
def test_sharded_program_learns(shoal: SimulatedCluster, name: str) -> None:
    train(shoal, name)


def test_sharded_program_learns_and_shows_its_curve_and_its_checkpoints(shoal: SimulatedCluster) -> None:
    train(shoal, "fsdp2", "--name", "lm-shown")
    (curve,) = json.loads(shoal("metrics", "lm-shown", "loss", "--json"))["items"]
    assert curve["points"][-1][0] == STEPS - 1
    saved = json.loads(shoal("checkpoints", "lm-shown", "--verify", "--json"))
    assert [(one["step"], one["state"]) for one in saved["items"]] == [(STEPS, "verified"), (10, "verified")]


@pytest.mark.soak
def test_ddp_under_shoal_ends_with_the_very_weights_of_torchrun(
    shoal: SimulatedCluster, tmp_path: Path
) -> None:
    said = train(shoal, "ddp")
    assert len(weights(said)) == 1
    assert weights(said) == weights(torchrun(tmp_path, "ddp", STEPS))


@pytest.mark.soak
def test_ddp_that_lost_a_rank_ends_with_the_very_weights_of_one_that_did_not(
    shoal: SimulatedCluster, tmp_path: Path
) -> None:
    job = f"lm-ddp-killed-{os.getpid()}"
    asked = ("-e", f"STEPS={LONG}", "-e", "SAVE_EVERY=1000", "-e", "PACE_S=0.05", "--name", job)
    shoal("run", "-d", *asked, "examples/language_model/ddp.yaml")
    told = []
    for line in shoal.follow(job):
        told.append(line)
        if 20 in losses(line):
            os.kill(rank_pid(job, "ddp.py", 1), signal.SIGKILL)
    said = "".join(told)
    assert "0 steps lost" in said
    assert list(losses(said)) == list(range(1, LONG + 1))
    assert weights(said) == weights(torchrun(tmp_path, "ddp", LONG))


@pytest.mark.soak
def test_run_that_was_cut_in_two_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    bare(tmp_path / "two", "fsdp2", STEPS)
    second = bare(tmp_path / "two", "fsdp2", MORE)
    assert list(losses(second)) == list(range(STEPS + 1, MORE + 1))
    assert weights(second) == weights(bare(tmp_path / "one", "fsdp2", MORE))


@pytest.mark.soak
def test_checkpoint_of_one_layout_is_read_by_another(tmp_path: Path) -> None:
    first = torchrun(tmp_path, "pp", STEPS)
    second = bare(tmp_path, "tp", MORE)
    assert list(losses(second)) == list(range(STEPS + 1, MORE + 1))
    assert losses(second)[MORE] < losses(first)[STEPS]


def torchrun(folder: Path, name: str, steps: int) -> str:
    """What two ranks print outside of Shoal."""
    return outside.torchrun(FOLDER / f"{name}.py", STEPS=str(steps), SHOAL_CHECKPOINT_DIR=str(folder))


def bare(folder: Path, name: str, steps: int) -> str:
    """What one rank prints that nobody launched."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    folder.mkdir(exist_ok=True)
    own = {**alone, "STEPS": str(steps), "SHOAL_CHECKPOINT_DIR": str(folder)}
    return outside.run([f"{name}.py"], FOLDER, own)


@pytest.mark.soak
def test_deepspeed_learns_with_its_launcher_in_front(shoal: SimulatedCluster) -> None:
    train(shoal, "deepspeed_zero")
