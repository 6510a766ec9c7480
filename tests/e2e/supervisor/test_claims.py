"""A task runs once, whatever is killed and however often it is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.files import spool
from shoal.wire import EndKind
from tests.support.runtime.confinement_modes import JOB_UID, MODES
from tests.support.runtime.tasks import SOURCE, StartTask, a_task_spec, pids_with, until


def test_ten_supervisors_for_one_task_run_it_once(start: StartTask) -> None:
    task = start(a_task_spec(run="echo once; sleep 0.5"))
    codes = [process.wait(30) for process in [task.spawn() for _ in range(10)]]
    assert sorted(codes) == [0] + [3] * 9
    assert task.outcome().kind is EndKind.SUCCEEDED
    assert task.texts() == ["once"]


def test_ended_task_is_not_run_again(start: StartTask) -> None:
    task = start(a_task_spec(run="echo once"))
    task.run()
    assert task.spawn().wait(20) == 3
    assert task.texts() == ["once"]


def test_supervisor_without_credentials_leaves_the_task_unclaimed(start: StartTask) -> None:
    task = start(a_task_spec())
    command = [sys.executable, "-m", "shoal.runtime.supervisor", str(task.directory)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, env={"PYTHONPATH": SOURCE}, timeout=20, check=False
    )
    assert done.returncode == 3
    assert spool.read_claim(task.task) is None
    assert task.run().kind is EndKind.SUCCEEDED


def test_supervisor_waits_for_a_short_check_of_the_lock(start: StartTask) -> None:
    task = start(a_task_spec())
    lock = spool.take_lock(task.task)
    assert lock is not None
    process = task.spawn()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    os.close(lock)
    assert task.outcome().kind is EndKind.SUCCEEDED


def test_task_claimed_by_an_engine_starts_nothing(start: StartTask) -> None:
    task = start(a_task_spec(run="echo never"))
    lock = spool.take_lock(task.task)
    assert spool.claim(task.task, 0.0)
    assert task.spawn().wait(20) == 3
    assert task.log() == []
    assert lock is not None
    os.close(lock)


def test_lock_is_held_for_life_and_free_afterwards(start: StartTask) -> None:
    task = start(a_task_spec(run="echo ready; sleep 300"))
    process = task.spawn()
    until(lambda: "ready" in task.texts(), describe=task.describe)
    assert spool.is_locked(task.task)
    process.terminate()
    process.wait(20)
    assert not spool.is_locked(task.task)


@pytest.mark.parametrize("confinement", MODES)
def test_killed_supervisor_leaves_nothing_once_leftovers_are_killed(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    mark = f"31.{os.getpid()}{abs(hash(confinement)) % 1000:03}"
    daemon = f"setsid sh -c 'setsid sleep {mark} & sleep {mark}' &"
    run = f"({daemon}) ; sleep {mark} & echo ready; sleep {mark}"
    task = start(a_task_spec(run=run, ranks_per_node=2, confinement=confinement, uid=JOB_UID))
    process = task.spawn()
    until(lambda: task.texts() == ["ready", "ready"], describe=task.describe)
    until(lambda: len(pids_with(mark)) >= 8, describe=task.describe)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    lock = spool.take_lock(task.task)
    assert lock is not None, "a rank inherited the lock"
    assert spool.kill_leftovers(task.directory)
    os.close(lock)
    until(lambda: pids_with(mark) == [])
    assert spool.read_outcome(task.task) is None
    assert not [path for path in spool.read_cgroups(task.task) if Path(path).exists()]


def test_task_that_never_started_has_no_leftovers(start: StartTask) -> None:
    assert spool.kill_leftovers(start(a_task_spec()).directory)
