"""Make sure that nothing of a task runs after its node agent died.

    python -m shoal.runtime.agent.reaping SPOOL ATTEMPT NODE REPLACEMENT

Run it only if the node agent is known to be dead. A supervisor without a node agent cannot deliver its
outcome, so it is killed too. Exit code 0 is evidence that nothing of the task runs here or ever will.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from shoal.clock import BootClock
from shoal.runtime.agent import spool_root
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import TaskSpecRequest

TIMEOUT_S = 40.0
TURN_S = 0.1
PAUSE_S = 5.0
"""Pause before exit code 1, because a caller that asks again at once would get the same code."""
OVER, NOT_YET, NOT_DEAD, USAGE = 0, 1, 2, 64


def main(arguments: list[str]) -> int:
    """Return 0 if nothing of the task runs, 1 if that is unknown, 2 if something did not die.

    After 1 or 2 the caller asks again.
    """
    if len(arguments) != 4 or not arguments[3].isdigit():
        sys.stderr.write("usage: python -m shoal.runtime.agent.reaping SPOOL ATTEMPT NODE REPLACEMENT\n")
        return USAGE
    root, attempt_id, node, replacement = arguments
    request = TaskSpecRequest(attempt_id=attempt_id, node=node, replacement=int(replacement), process="")
    code = max((_reap_below(folder, request) for folder in spool_root.existing_roots(root)), default=OVER)
    if code == NOT_YET:
        time.sleep(PAUSE_S)
    return code


def _reap_below(root: str, request: TaskSpecRequest) -> int:
    """Reap the task below one root.

    A directory that other users could have written is not trusted, so nothing is killed because of it. If one
    root cannot be read, the others are still reaped.
    """
    task = spool.SpoolTask(spool_root.task_directory(root, request))
    try:
        if not spool.has_directory(task):
            return OVER
        if foreign := spool_root.first_foreign_path(root, task.directory):
            problem = (
                f"users other than {os.getuid()} could change {foreign}; if it is yours: chmod go-w {foreign}"
            )
            sys.stderr.write(f"shoal reaping: {task.directory}: {problem}\n")
            return NOT_YET
        return reap(task)
    except OSError as error:
        sys.stderr.write(f"shoal reaping: {task.directory}: {error}\n")
        return NOT_YET


def reap(task: spool.SpoolTask, timeout_s: float = TIMEOUT_S) -> int:
    """Kill the task's supervisor and the processes that it left.

    A task without a directory is over: it was never prepared, or its files were removed. That cannot be told
    from a task whose whole directory was deleted. A task that has lost single files stays `NOT_YET`.
    """
    clock = BootClock()
    deadline, problem = clock.monotonic() + timeout_s, "its task spec is gone"
    while spool.has_directory(task):
        is_left = True
        lock = spool.take_lock(task)
        if lock is None:
            # The claim comes first: a supervisor that a node agent forked may have no room for its name on
            # its command line.
            if not spool.signal_supervisor(task, signal.SIGKILL):
                spool.kill_supervisors(task)
        else:
            try:
                claimed = spool.read_claim(task)
                # A supervisor that is still starting finds the claim and exits.
                spool.claim(task, clock.now())
                if spool.kill_leftovers(task.directory):
                    problem, is_left = _uncertainty(task, claimed), False
                    if not problem:
                        return OVER
                elif spool.is_copied(task):
                    problem, is_left = "it was copied, and the processes of the original run", False
                else:
                    # Without the task spec it is unknown which processes to look for.
                    is_left = spool.read_task_spec(task) is not None
            finally:
                os.close(lock)
        if clock.monotonic() >= deadline:
            problem = "something of it does not die" if is_left else problem
            sys.stderr.write(f"shoal reaping: {task.directory}: {problem}\n")
            return NOT_DEAD if is_left else NOT_YET
        time.sleep(TURN_S)
    return OVER


def _uncertainty(task: spool.SpoolTask, claimed: spool.Claim | None) -> str:
    """Return why something of the task may still run. Empty: everything of it was found.

    Processes that its ranks started may have been reparented, and may have overwritten or hidden the
    variables that mark them. Such a process is neither killed nor ignored.
    """
    if claimed is None or claimed.pid == os.getpid():
        return ""  # no supervisor ever began it
    pids = tree.doubtful(os.path.realpath(task.work), claimed.start_ticks)
    return f"processes {sorted(pids)} may be of it" if pids else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
