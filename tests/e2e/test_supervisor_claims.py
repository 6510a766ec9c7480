"""A share runs once, whoever is killed and however often it is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime import spool
from shoal.wire import EndKind
from tests.support.confinements import JOB_UID, MODES
from tests.support.shares import SOURCE, Start, an_order, processes_with, until


def test_ten_supervisors_for_one_share_are_one_run(start: Start) -> None:
    share = start(an_order(run="echo once; sleep 0.5"))
    codes = [process.wait(30) for process in [share.spawn() for _ in range(10)]]
    assert sorted(codes) == [0] + [3] * 9
    assert share.outcome().kind is EndKind.SUCCEEDED
    assert share.texts() == ["once"]


def test_share_that_ended_is_not_run_again(start: Start) -> None:
    share = start(an_order(run="echo once"))
    share.run()
    assert share.spawn().wait(20) == 3
    assert share.texts() == ["once"]


def test_supervisor_that_got_no_credentials_leaves_the_share_unclaimed(start: Start) -> None:
    share = start(an_order())
    command = [sys.executable, "-m", "shoal.runtime.supervisor", str(share.directory)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, env={"PYTHONPATH": SOURCE}, timeout=20, check=False
    )
    assert done.returncode == 3
    assert spool.read_claim(share.share) is None
    assert share.run().kind is EndKind.SUCCEEDED


def test_supervisor_waits_for_somebody_who_only_looks_at_the_lock(start: Start) -> None:
    share = start(an_order())
    lock = spool.take_lock(share.share)
    assert lock is not None
    process = share.spawn()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    os.close(lock)
    assert share.outcome().kind is EndKind.SUCCEEDED


def test_share_claimed_by_an_engine_starts_nothing(start: Start) -> None:
    share = start(an_order(run="echo never"))
    lock = spool.take_lock(share.share)
    assert spool.claim(share.share, 0.0)
    assert share.spawn().wait(20) == 3
    assert share.log() == []
    assert lock is not None
    os.close(lock)


def test_lock_is_held_for_life_and_free_afterwards(start: Start) -> None:
    share = start(an_order(run="echo ready; sleep 300"))
    process = share.spawn()
    until(lambda: "ready" in share.texts(), describe=share.describe)
    assert spool.is_locked(share.share)
    process.terminate()
    process.wait(20)
    assert not spool.is_locked(share.share)


@pytest.mark.parametrize("confinement", MODES)
def test_killed_supervisor_leaves_nothing_once_leftovers_are_killed(
    start: Start, confinement: tuple[str, ...]
) -> None:
    mark = f"31.{os.getpid()}{abs(hash(confinement)) % 1000:03}"
    daemon = f"setsid sh -c 'setsid sleep {mark} & sleep {mark}' &"
    run = f"({daemon}) ; sleep {mark} & echo ready; sleep {mark}"
    share = start(an_order(run=run, ranks_per_node=2, confinement=confinement, uid=JOB_UID))
    process = share.spawn()
    until(lambda: share.texts() == ["ready", "ready"], describe=share.describe)
    until(lambda: len(processes_with(mark)) >= 8, describe=share.describe)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    lock = spool.take_lock(share.share)
    assert lock is not None, "a rank inherited the lock"
    assert spool.kill_leftovers(share.directory)
    os.close(lock)
    until(lambda: processes_with(mark) == [])
    assert spool.read_outcome(share.share) is None
    assert not [path for path in spool.read_cgroups(share.share) if Path(path).exists()]


def test_leftovers_of_a_share_that_never_started_are_none(start: Start) -> None:
    assert spool.kill_leftovers(start(an_order()).directory)
