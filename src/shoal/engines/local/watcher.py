"""Observes one task by its spool files and ends it: stops it, kills it, or reaps what died without an
outcome.

The evidence is the supervisor's lock. While a process holds the lock, the task lives. Once the lock is
free, nothing of the task will ever start, and the watcher kills what is left before it reports the end.

A supervisor that could not start, or died, can report only by its last lines of output. They go into the
message of the task's end and into its log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shoal import bounded_file
from shoal.clock import Clock
from shoal.engines.base import Observation
from shoal.engines.local.client import ExitNotifier
from shoal.engines.local.spool_index import LocalTask
from shoal.engines.local.states import ended_observation, make_observation, make_outcome
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.wire import EndKind, TaskOutcome

# The spool names its files by strings: a supervisor starts without pathlib.


MAX_BYTES = 4096
MAX_LINES = 20
NUM_QUOTED = 3
MAX_QUOTED = 400
"""Lines and characters of a message. The log has all of them."""


def last_lines(path: str) -> list[str]:
    """Return the last non-empty lines of the file, without control characters; none if it does not exist."""
    with contextlib.suppress(OSError):
        text = bounded_file.read_end(path, MAX_BYTES).decode(errors="replace")
        lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines()]
        return [line for line in lines if line][-MAX_LINES:]
    return []


def quote_lines(lines: list[str]) -> str:
    """Return the end of the lines, as much as a message holds."""
    return "\n".join(line.strip() for line in lines[-NUM_QUOTED:])[-MAX_QUOTED:]


def append_to_log(path: str, at: float, lines: list[str]) -> None:
    """Append Shoal's own lines to the log of a task that no process writes any more. A full disk loses
    them.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(fd).st_size
            glue = b"" if size == 0 or os.pread(fd, 1, size - 1) == b"\n" else b"\n"
            os.write(fd, glue + "".join(f"{at:.6f} - e {line}\n" for line in lines).encode())
        finally:
            os.close(fd)


# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH110, PTH112, PTH119


T = TypeVar("T")

PATIENCE_S = 10.0
"""How long after its grace a supervisor may take to end before it is killed."""
REAP_S = 1.0
"""How long one observation waits for killed processes to end. The next observation of the task does not
wait, because other tasks come after it, and a process that is stuck in the kernel may stay so for days."""
MAX_FILE_EXCERPT = 400
"""Characters of an unreadable file that a message shows."""
MAX_STARTS = 6
"""After this many supervisors ended before they claimed the task, over 15 s, the task is given up."""


class SpoolWatcher:
    """Observes and ends tasks. Every method blocks and holds the task's guard, so calls for one task
    exclude each other.
    """

    def __init__(self, clock: Clock, exit_notifier: ExitNotifier) -> None:
        self._clock = clock
        self._exit_notifier = exit_notifier

    def observe(self, task: LocalTask) -> Observation | None:
        """Return what can be observed of the task now; None if it was forgotten in the meantime.

        A task that cannot be read raises no exception, so that it does not hide the others.
        """
        with task.guard:
            try:
                return self._observe(task)
            except (OSError, msgspec.DecodeError) as error:
                if not os.path.isdir(task.files.directory):
                    return None
                if isinstance(error, OSError):
                    return make_observation(task.key, Evidence.UNKNOWN, _describe_error(task, error))
                return self._observe_unreadable(task, _describe_error(task, error))

    def stop(self, task: LocalTask, grace_s: float) -> None:
        """Ask the task to end. A task that no supervisor has claimed ends at once. `OSError`: ask again."""
        with task.guard:
            if task.final_observation is not None or _try(spool.read_outcome, task.files) is not None:
                return
            try:
                self._write_stop(task, grace_s)
                if not _is_claimed(task) and self._stop_unclaimed(task):
                    return
                if not _is_claimed(task) and self._clock.monotonic() >= self._kill_at(task, grace_s):
                    spool.kill_supervisors(task.files)  # a supervisor hangs between the lock and the claim
            finally:
                # Also on a full disk: the signal alone stops the task, with the grace of its task spec.
                with contextlib.suppress(msgspec.DecodeError):
                    spool.signal_supervisor(task.files, signal.SIGTERM)

    def _observe(self, task: LocalTask) -> Observation:
        if task.final_observation is not None:
            return task.final_observation
        outcome = spool.read_outcome(task.files)
        if outcome is not None:
            return _record_end(task, outcome)
        if task.read_task_spec() is None:
            return self._observe_unreadable(task, "task_spec.json is missing")
        if not _is_claimed(task):
            return make_observation(task.key, Evidence.PENDING, _why_pending(task))
        lock = spool.take_lock(task.files)
        if lock is None:
            return self._observe_alive(task)
        try:
            return self._reap(task, "its supervisor died without an outcome")
        finally:
            os.close(lock)

    def _observe_unreadable(self, task: LocalTask, problem: str) -> Observation:
        """Return an observation of a task whose files cannot be read. Without a supervisor, it may run for
        ever.
        """
        try:
            is_orphaned = _is_claimed(task) and not spool.is_locked(task.files)
        except OSError:
            is_orphaned = False
        return make_observation(task.key, Evidence.ORPHANED if is_orphaned else Evidence.UNKNOWN, problem)

    def _observe_alive(self, task: LocalTask) -> Observation:
        if task.started is None:
            task.started = _try(spool.read_started, task.files)
        if not task.is_followed and task.task_spec is not None and len(task.task_spec.ranks.nodes) > 1:
            task.is_followed = True
            self._exit_notifier.follow(task.files)
        if task.kill_at is None and os.path.exists(task.files.stop):
            # An engine before us wrote the stop. Its date may be wrong, so the patience starts again.
            stop = _try(spool.read_stop, task.files)
            task.kill_at = self._clock.monotonic() + (stop.grace_s if stop else 0.0) + PATIENCE_S
        if task.kill_at is not None and self._clock.monotonic() >= task.kill_at:
            return self._kill(task)
        started_at = task.started.at if task.started else None
        return make_observation(
            task.key, Evidence.ALIVE, "its supervisor holds the lock", started_at=started_at
        )

    def _kill(self, task: LocalTask) -> Observation:
        """The supervisor's time is over: kill it and everything of its task."""
        spool.signal_supervisor(task.files, signal.SIGKILL)
        lock = _await_lock(task.files, 0.0 if task.is_stuck else REAP_S)
        if lock is None:
            self._kill_leftovers(task)
            task.is_stuck = True
            return make_observation(task.key, Evidence.ALIVE, "its supervisor was killed, but does not die")
        try:
            return self._reap(task, "its supervisor did not stop in time and was killed")
        finally:
            os.close(lock)

    def _reap(self, task: LocalTask, reason: str) -> Observation:
        """Kill what is left of the task, then record its end. We hold the lock, so no other process does
        so.
        """
        outcome = spool.read_outcome(task.files)
        if outcome is not None:
            return _record_end(task, outcome)
        claim = _try(spool.read_claim, task.files)
        # Nothing outlives a reboot, and a search of the process table for every task would take long.
        if claim is None or claim.boot_id == spool.boot_id():
            if not self._kill_leftovers(task):
                return make_observation(
                    task.key, Evidence.ORPHANED, f"{reason}, and {_describe_leftovers(task)}"
                )
        else:
            reason = "the machine was restarted"
        if task.lost_outcome is None:
            task.lost_outcome = self._lost_outcome(task, reason)
        try:
            spool.write_outcome(task.files, task.lost_outcome)
        except OSError as error:
            # The task is over whether or not the disk takes the outcome; the claim keeps it from starting
            # again.
            raw = f"{reason}; the outcome is not on disk: {error.strerror}"
            return make_observation(
                task.key,
                Evidence.ENDED,
                raw,
                started_at=task.lost_outcome.started_at,
                outcome=task.lost_outcome,
            )
        return _record_end(task, task.lost_outcome)

    def _kill_leftovers(self, task: LocalTask) -> bool:
        """Kill what is left; whether all of it is gone."""
        timeout_s = 0.0 if task.is_stuck else REAP_S
        task.is_stuck = not spool.kill_leftovers(task.files.directory, task.task_spec, timeout_s=timeout_s)
        return not task.is_stuck

    def _lost_outcome(self, task: LocalTask, reason: str) -> TaskOutcome:
        """Return the outcome of a lost task and append its reason to the log. Called once, when nothing
        writes it.
        """
        started = task.started or _try(spool.read_started, task.files)
        lines = last_lines(task.files.errors)
        append_to_log(task.files.log, self._clock.now(), [reason, *lines])
        message = f"{reason}; it last said: {quote_lines(lines)}" if lines else reason
        return make_outcome(
            task.key, EndKind.LOST, self._clock.now(), message, started.at if started else None
        )

    def _write_stop(self, task: LocalTask, grace_s: float) -> None:
        """Record the stop. Of several, the shortest grace counts, from the time of its request."""
        before = _try(spool.read_stop, task.files)
        if before is not None and before.grace_s <= grace_s:
            return
        spool.write_stop(task.files, spool.SpoolStop(grace_s=grace_s, at=self._clock.now()))
        task.kill_at = min(self._kill_at(task, grace_s), self._clock.monotonic() + grace_s + PATIENCE_S)

    def _kill_at(self, task: LocalTask, grace_s: float) -> float:
        if task.kill_at is None:
            task.kill_at = self._clock.monotonic() + grace_s + PATIENCE_S
        return task.kill_at

    def may_start(self, task: LocalTask) -> bool:
        """Return whether to start a supervisor now. The caller holds the guard, and none of ours is
        starting.

        A supervisor that ended without a claim (it cannot be imported, or was killed) is replaced at once,
        then after 1 s, doubled each time. At last the task is lost, with the last lines of the last
        supervisor.
        """
        now = self._clock.monotonic()
        if task.supervisor_pid is not None:
            task.supervisor_pid = None
            task.num_failed_starts += 1
            task.next_start_at = now + (
                2.0 ** (task.num_failed_starts - 2) if task.num_failed_starts > 1 else 0.0
            )
        if task.num_failed_starts < MAX_STARTS:
            return now >= task.next_start_at
        self.give_up(task, f"no supervisor began it in {task.num_failed_starts} tries")
        return False

    def give_up(self, task: LocalTask, reason: str) -> None:
        """End a task that no supervisor will run, unless one claims it first. The caller holds the guard."""
        self._end_unclaimed(task, lambda: self._lost_outcome(task, reason))

    def _stop_unclaimed(self, task: LocalTask) -> bool:
        message = "stopped before it started"
        return self._end_unclaimed(
            task, lambda: make_outcome(task.key, EndKind.STOPPED, self._clock.now(), message)
        )

    def _end_unclaimed(self, task: LocalTask, end: Callable[[], TaskOutcome]) -> bool:
        """Claim the task ourselves, so that no supervisor ever can. False: a supervisor was faster."""
        lock = spool.take_lock(task.files)
        if lock is None:
            return False
        try:
            if not spool.claim(task.files, self._clock.now()):
                return False
            with contextlib.suppress(msgspec.DecodeError):
                task.read_task_spec()
            outcome = end()
            spool.write_outcome(task.files, outcome)
            _record_end(task, outcome)
        finally:
            os.close(lock)
        return True


def _record_end(task: LocalTask, outcome: TaskOutcome) -> Observation:
    observation = ended_observation(task.key, outcome)
    if observation.evidence is Evidence.ENDED:
        task.final_observation = observation
    return observation


def _is_claimed(task: LocalTask) -> bool:
    task.is_claimed = task.is_claimed or os.path.exists(task.files.claimed)
    return task.is_claimed


def _await_lock(task: spool.SpoolTask, timeout_s: float) -> int | None:
    """Return the lock once the killed holder is gone, usually within a millisecond; None after
    `timeout_s`.
    """
    for _ in range(100):
        lock = spool.take_lock(task)
        if lock is not None or timeout_s == 0:
            return lock
        time.sleep(timeout_s / 100)
    return None


def _try(read: Callable[[spool.SpoolTask], T | None], task: spool.SpoolTask) -> T | None:
    """Return the content of the file; None if it cannot be decoded."""
    with contextlib.suppress(msgspec.DecodeError):
        return read(task)
    return None


def _why_pending(task: LocalTask) -> str:
    if not task.num_failed_starts:
        return "not claimed by a supervisor yet"
    lines = quote_lines(last_lines(task.files.errors))
    return (
        f"{task.num_failed_starts} supervisors ended before they began; the last said: {lines or 'nothing'}"
    )


def _describe_leftovers(task: LocalTask) -> str:
    if spool.is_copied(task.files):
        return "its processes belong to the task that this one was copied from, so they are left alone"
    return "something of it does not die"


def _describe_error(task: LocalTask, error: Exception) -> str:
    """Return the error and the start of each file that it may be about."""
    message = f"{type(error).__name__}: {error}"
    for path in (task.files.task_spec, task.files.outcome, task.files.claimed, task.files.cgroups):
        with contextlib.suppress(OSError):
            message += f"; {os.path.basename(path)}: {bounded_file.read_start(path, MAX_FILE_EXCERPT)!r}"
    return message
