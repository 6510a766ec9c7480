"""Some simulated lives; `make sim` runs tens of thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog

from tests.sim.run import simulate_all
from tests.sim.story import fingerprint, silence_logs, simulate

pytestmark = pytest.mark.usefixtures("_log_as_before")
REPO = Path(__file__).resolve().parents[2]
NUM_SEEDS = 60
CHUNK = 20
MUST_HAPPEN = (
    "answers repeated",
    "attempts ended",
    "clock jumps",
    "crashes",
    "doubts withdrawn",
    "drains",
    "evictions by priority",
    "evictions by quota",
    "failing disks",
    "fences passed",
    "full disks",
    "growths",
    "jobs cancelled",
    "jobs failed",
    "jobs succeeded",
    "leftovers that live on",
    "nodes declared dead",
    "nodes powered off",
    "partitions",
    "ranks killed",
    "retries",
    "shares replaced on the same node",
    "stalls",
    "stops",
    "submissions answered",
    "supervisors killed",
    "supervisors killed before their ranks",
)


@pytest.fixture
def _log_as_before() -> Iterator[None]:
    """The lives are lived quietly; whoever comes after must not be."""
    config = structlog.get_config()
    yield
    structlog.configure(**config)


@cache
def lived(first: int) -> tuple[Counter[str], list[str]]:
    """What happened in so many lives, and what was broken: two tests ask for some of them."""
    return simulate_all(first, CHUNK)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_no_promise_is_broken_in_any_of_these_lives(first: int) -> None:
    failures = lived(first)[1]
    assert not failures, "\n\n".join(failures)


def test_every_kind_of_trouble_happens() -> None:
    happened = lived(0)[0] + lived(CHUNK)[0] + lived(2 * CHUNK)[0]
    missing = [name for name in MUST_HAPPEN if not happened[name]]
    assert not missing, f"never in 60 lives: {missing}; seen: {dict(happened)}"


@pytest.mark.parametrize("seed", [7, 123])
def test_seed_replays_exactly_even_in_another_process(seed: int) -> None:
    silence_logs()
    here = fingerprint(simulate(seed))
    assert fingerprint(simulate(seed)) == here
    script = (
        "from tests.sim.story import fingerprint, silence_logs, simulate\n"
        f"silence_logs(); print(fingerprint(simulate({seed})))"
    )
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{REPO / 'src'}:{REPO}"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == here


def test_different_seeds_live_different_lives() -> None:
    silence_logs()
    assert len({fingerprint(simulate(seed)) for seed in range(5)}) == 5
