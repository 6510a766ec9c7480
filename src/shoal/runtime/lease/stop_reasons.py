"""Every reason from outside to stop a task: a request, a limit that has passed, or a lost right to run.

One reason is the death of the node agent that forked the supervisor. When a node agent is killed, its cluster
takes the job for over, and may kill only the node agent itself. Then the supervisor has to kill the processes
that the ranks started, and end itself afterwards. So the kernel does not kill the supervisor with its node
agent, but sends it a signal. If the supervisor does not react, a thread of its own kills it. Then the kernel
kills the ranks, but the processes that the ranks started live on.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from types import FrameType

import msgspec

from shoal.clock import Clock
from shoal.runtime.files import spool
from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.process import kernel
from shoal.runtime.supervisor.endings import Ending
from shoal.wire import EndKind, TaskSpec

AGENT_DEATH_SIGNAL = signal.SIGRTMIN
"""No other process sends this signal. If one does, the supervisor only wakes up once for nothing."""
LOOK_S, UNNOTICED_S = 5.0, 15.0
"""How often the thread looks at the node agent, and how long its death may go unnoticed: longer than any part
of the supervisor's loop that does not check.
"""


class NodeAgentWatch:
    """Watches the node agent. Main thread only.

    The kernel must kill the process with its parent until `start`, so that no death of the node agent is
    missed.
    """

    def __init__(self, agent_pid: int) -> None:
        self._agent_pid = agent_pid
        self._is_noticed = threading.Event()

    def start(self) -> None:
        """Have the node agent's death signalled from here on. Until now the kernel killed us with it."""
        signal.signal(AGENT_DEATH_SIGNAL, _only_wake)
        threading.Thread(target=self._kill_unless_noticed, name="kept", daemon=True).start()
        kernel.signal_on_parent_death(AGENT_DEATH_SIGNAL)

    @property
    def is_agent_dead(self) -> bool:
        """Whether the node agent is dead. The caller must then end the task."""
        if os.getppid() == self._agent_pid:
            return False
        self._is_noticed.set()
        return True

    def _kill_unless_noticed(self) -> None:
        while os.getppid() == self._agent_pid:
            time.sleep(LOOK_S)
        if not self._is_noticed.wait(UNNOTICED_S):
            os.kill(os.getpid(), signal.SIGKILL)


def _only_wake(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has already done the work."""


FENCED_GRACE_S = 10.0
"""How long after the fence ranks may still take to end, counted from the last reply as the fence is. The
control plane starts replacements by the same count, and does not wait for a supervisor that slept in between.
"""


class StopReasons:
    """Checks all reasons at once. `current` is cheap enough for every turn of the loop."""

    def __init__(
        self,
        task: spool.SpoolTask,
        task_spec: TaskSpec,
        clock: Clock,
        renewer: LeaseRenewer | None,
        agent_watch: NodeAgentWatch | None = None,
    ) -> None:
        """`agent_watch`: set if a node agent forked this supervisor."""
        self._agent_watch = agent_watch
        self._task = task
        self._task_spec = task_spec
        self._clock = clock
        self._renewer = renewer
        self._began_at = clock.monotonic()
        self._sigterm_at: float | None = None
        self._is_sigterm_ours: bool | None = None

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler. Only the first signal counts."""
        if self._sigterm_at is None:
            self._sigterm_at = self._clock.monotonic()

    def current(self) -> Ending | None:
        """Return the strongest reason to end now. None: go on."""
        return (
            self._agent_lost()
            or self._stale()
            or self._fence()
            or self._stop_requested()
            or self._time_limit()
        )

    def signalled(self, least_s: float = -math.inf) -> Ending | None:
        """Return the stop that a signal from outside of Shoal asks for, if it came at least `least_s` ago.

        The ranks may have received the same signal.
        """
        reason = self._stop_requested()
        is_it = reason is not None and reason.is_external_stop and self._stop_requested_s() >= least_s
        return reason if is_it else None

    @property
    def has_lost_agent(self) -> bool:
        """Whether the node agent that would report for this supervisor is dead."""
        return self._agent_watch is not None and self._agent_watch.is_agent_dead

    def next_in(self, most_s: float) -> float:
        """Seconds until the next clock may give a reason, at most `most_s`."""
        now = self._clock.monotonic()
        waits = [most_s]
        if self._task_spec.resources.time_limit_s is not None:
            waits.append(self._began_at + self._task_spec.resources.time_limit_s - now)
        if self._renewer is not None:
            waits.append(self._renewer.answered_at + self._task_spec.lease.fence_s - now)
        return max(0.0, min(waits))

    def _stop_requested(self) -> Ending | None:
        # Read the signal first: Shoal writes the stop file before it sends a signal.
        has_sigterm, has_stop = self._sigterm_at is not None, os.path.exists(self._task.stop)
        stop = self._read_stop() if has_stop else None
        if stop is not None:
            because = f": {stop.because}" if stop.because else ""
            return Ending(
                kind=EndKind.STOPPED,
                message=f"stopped{'' if stop.is_external_stop else ' as asked'}{because}",
                grace_s=stop.grace_s,
                is_external_stop=stop.is_external_stop,
            )
        if has_sigterm:
            if self._is_sigterm_ours is None:
                # Shoal's own signal comes without a stop file if the disk refuses to write or read it.
                self._is_sigterm_ours = has_stop or not spool.can_write_stop(self._task)
            return Ending(
                kind=EndKind.STOPPED,
                message="stopped by SIGTERM",
                grace_s=self._task_spec.resources.grace_s,
                is_external_stop=not self._is_sigterm_ours,
            )
        answer = self._renewer.stop_reply if self._renewer is not None else None
        if answer is None:
            return None
        because = f": {answer.because}" if answer.because else ""
        return Ending(
            kind=EndKind.STOPPED, message=f"stopped by the control plane{because}", grace_s=answer.grace_s
        )

    def _stop_requested_s(self) -> float:
        """Seconds since the stop was asked for: by the signal or, if that is older, by the stop file.

        A node agent that receives the signal writes that file.
        """
        stop = self._read_stop()
        stop_age_s = self._clock.now() - stop.at if stop is not None else -math.inf
        if self._sigterm_at is None:
            return stop_age_s
        return max(stop_age_s, self._clock.monotonic() - self._sigterm_at)

    def _read_stop(self) -> spool.SpoolStop | None:
        """Return the stop file's content. None: there is none, or it cannot be read."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return spool.read_stop(self._task)
        return None

    def _agent_lost(self) -> Ending | None:
        """No grace: the cluster takes the task for over with its node agent, and may give its place away."""
        return Ending(kind=EndKind.LOST, message="its node agent was killed") if self.has_lost_agent else None

    def _stale(self) -> Ending | None:
        because = self._renewer.stale_because if self._renewer is not None else None
        if because is None:
            return None
        return Ending(
            kind=EndKind.FENCED, message=f"the control plane says that this attempt may not run: {because}"
        )

    def _fence(self) -> Ending | None:
        if self._renewer is None:
            return None
        fence_s = self._task_spec.lease.fence_s
        silent_s = self._clock.monotonic() - self._renewer.answered_at
        if silent_s < fence_s:
            return None
        return Ending(
            kind=EndKind.FENCED,
            message=f"no answer from the control plane for {silent_s:.0f} s (fence {fence_s:g})",
            grace_s=min(self._task_spec.resources.grace_s, max(0.0, fence_s + FENCED_GRACE_S - silent_s)),
        )

    def _time_limit(self) -> Ending | None:
        limit_s = self._task_spec.resources.time_limit_s
        if limit_s is None or self._clock.monotonic() - self._began_at < limit_s:
            return None
        return Ending(
            kind=EndKind.TIME_LIMIT,
            message=f"the time limit of {limit_s:g} s has passed",
            grace_s=self._task_spec.resources.grace_s,
        )
