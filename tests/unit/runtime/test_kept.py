"""Who ends what a program has started when its keeper, or its supervisor, is killed: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.runtime import kept, spool, tree
from shoal.runtime.kept import Kept
from shoal.wire import EndKind, NodeOutcome
from tests.support.shares import NODE_PATH, SOURCE, until

REPO = Path(__file__).parents[3]
WALLS = ("rlimits", "affinity")
"""None that the kernel would pull down with the supervisor: neither namespaces nor control groups."""


class Kin:
    """A keeper whose rank has a child, as launchers have."""

    def __init__(self, root: Path) -> None:
        self._child = root / "child"
        attempt_id = f"att_{uuid.uuid4().hex}"
        run = f"setsid sleep 600 & echo $! > {self._child}.part; mv {self._child}.part {self._child}; wait"
        words = ("-m", "tests.support.paper_keeper", str(root / "spool"), attempt_id, run, *WALLS)
        self.keeper = subprocess.Popen(
            [sys.executable, *words],
            cwd=REPO,
            env={"PYTHONPATH": f"{SOURCE}:{REPO}", "PATH": NODE_PATH},
            stdout=subprocess.PIPE,
        )
        until(self._child.exists)
        self.child = int(self._child.read_text())
        place = next((root / "spool").glob(f"**/spool/live/{attempt_id}/*"))
        self.share = spool.Share(str(place))
        claim = spool.read_claim(self.share)
        assert claim is not None
        self.supervisor = claim.pid
        self.all = {self.supervisor, *tree.descendants(self.supervisor)}
        assert self.child in self.all

    def living(self) -> dict[int, int]:
        return tree.living(self.all)

    def end(self) -> None:
        self.keeper.kill()
        self.keeper.communicate(timeout=10)
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def kin(tmp_path: Path) -> Iterator[Kin]:
    made = Kin(tmp_path)
    yield made
    made.end()


def test_what_a_rank_has_started_does_not_outlive_its_keeper(kin: Kin) -> None:
    kin.keeper.kill()
    until(lambda: not kin.living(), 10.0, lambda: f"{kin.living()} of {kin.all}")
    outcome = spool.read_outcome(kin.share)
    assert outcome is not None
    assert (outcome.kind, outcome.message) == (EndKind.LOST, "its keeper was killed")


def test_what_a_rank_has_started_does_not_outlive_its_supervisor(kin: Kin) -> None:
    os.kill(kin.supervisor, signal.SIGKILL)
    said, _ = kin.keeper.communicate(timeout=30)
    outcome = msgspec.json.decode(said, type=NodeOutcome)
    assert (outcome.kind, kin.living()) == (EndKind.LOST, {})


def test_signal_to_a_keeper_is_none_that_we_have_asked_for(kin: Kin) -> None:
    kin.keeper.terminate()
    said, _ = kin.keeper.communicate(timeout=30)
    outcome = msgspec.json.decode(said, type=NodeOutcome)
    assert (outcome.kind, outcome.is_unasked, kin.living()) == (EndKind.STOPPED, True, {})


def test_supervisor_that_does_not_see_that_its_keeper_is_dead_does_not_outlive_it_for_long(
    tmp_path: Path,
) -> None:
    """It hangs: the kernel would have killed it at once, had we not asked to be told instead."""
    told = tmp_path / "pid"
    keeper = os.fork()
    if keeper == 0:
        own = os.getpid()
        if os.fork() == 0:
            kept.LOOK_S, kept.UNSEEN_S = 0.05, 0.5
            Kept(own).listen()
            told.write_text(f"{os.getpid()}\n")
            while True:
                time.sleep(600)
        signal.pause()
        os._exit(0)
    until(lambda: told.exists() and told.read_text().endswith("\n"))
    supervisor = int(told.read_text())
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    assert tree.living([supervisor]), "it is told, and not killed"
    until(lambda: not tree.living([supervisor]), 10.0)
