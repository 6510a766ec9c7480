"""A supervisor's first steps: claim the task, then run it.

Until the claim is on disk, it changes nothing but the lock.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from shoal.clock import BootClock
from shoal.runtime.files import spool
from shoal.runtime.lease.stop_reasons import NodeAgentWatch
from shoal.runtime.process import kernel
from shoal.runtime.supervisor.task_run import TaskRun
from shoal.wire import TaskCredentials, TaskSpec

LOCK_PATIENCE_S = 2.0
DONE, NOTHING_TO_DO, USAGE = 0, 3, 64


def main(arguments: list[str], born_at: float | None = None, agent_pid: int | None = None) -> int:
    """Return 0 if the task ran and its outcome is written, 3 if it is not ours to run and nothing was done.

    `born_at`: when the fence starts to count, if the control plane knew of this supervisor before it was
    started. `agent_pid`: the node agent that forked us. If it dies, the task ends.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m shoal.runtime.supervisor DIRECTORY < CREDENTIALS\n")
        return USAGE
    # Blocked until the task can record a stop: one may come as soon as the task is claimed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    kernel.hide_memory()
    os.umask(0o077)
    clock = BootClock()
    task = spool.SpoolTask(os.path.realpath(arguments[0]))
    taken = claim_task(task, clock)
    if taken is None:
        return NOTHING_TO_DO
    kernel.become_subreaper()
    kept = NodeAgentWatch(agent_pid) if agent_pid is not None else None
    TaskRun(task, *taken, clock, _born_at(clock) if born_at is None else born_at, agent_watch=kept).run()
    return DONE


def claim_task(task: spool.SpoolTask, clock: BootClock) -> tuple[TaskSpec, TaskCredentials] | None:
    """Claim the task for this process, for ever. None: it is not ours to run."""
    lock = _wait_for_lock(task, clock)
    if lock is None:
        return None
    # Before the claim, because an engine that dies before it has sent the credentials may start us again.
    credentials = _read_credentials()
    task_spec = spool.read_task_spec(task)
    if credentials is None or task_spec is None or not spool.claim(task, clock.now()):
        os.close(lock)
        return None
    return task_spec, credentials


def _born_at(clock: BootClock) -> float:
    """Return when this process was started, from when the fence counts.

    If a supervisor hangs before its claim, the control plane counts from when it sent it, and then replaces
    it.
    """
    ticks = spool.start_ticks(os.getpid())
    return clock.monotonic() if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def _wait_for_lock(task: spool.SpoolTask, clock: BootClock) -> int | None:
    """Take the lock. A check may hold it for an instant; a process that keeps it has claimed the task."""
    deadline = clock.monotonic() + LOCK_PATIENCE_S
    while not os.path.exists(task.claimed):
        lock = spool.take_lock(task)
        if lock is not None or clock.monotonic() > deadline:
            return lock
        time.sleep(0.01)
    return None


def _read_credentials() -> TaskCredentials | None:
    with os.fdopen(os.dup(0), "rb") as file:
        data = file.read()
    try:
        return msgspec.json.decode(data, type=TaskCredentials)
    except msgspec.DecodeError:
        return None
