"""Agree on the step after which all ranks save and exit when the job is asked to stop.

The request reaches ranks at different steps. If a rank waited for its peers at the end of a step, the peers
could wait for it in the next step for ever. So no rank stops training in order to agree. A thread of each
rank meets the others at the group's store, and all propose the same step, which is ahead of every rank. The
step is agreed when every rank has confirmed that it had not reached the step. Without a request this costs
one comparison for each step.

A cluster may send the request to every process of a job, so it can reach ranks before their supervisor. Only
the supervisor knows whether the request is for all ranks, so a rank keeps training until the supervisor has
said so, or until it is known that the supervisor will not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.runtime.rank.board import StopRequest
from shoal.runtime.rank.membership import RankMembership

EXIT_SAVED = 75
"""The exit code of a rank that saved because it was asked to stop: EX_TEMPFAIL, to be continued."""
AHEAD = 2
"""Steps from the foremost rank to the proposed step. Four times as many after each proposal that was too
early."""
POLL_S = 0.005
REQUEST_WAIT_S = 1.0
"""How long to wait for the supervisor, which may get a signal for all processes 0.5 s after a rank."""
ALONE_S = 10.0
"""If the peers of a rank are not asked to stop within this time, the rank exits alone."""


class GracefulExit(SystemExit):
    """Raised where the program asks for its next step, after everything was saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_SAVED)


class GracefulStop:
    """The part of one process. Only the training thread calls `enter` and `is_stop_step`."""

    def __init__(self, membership: RankMembership) -> None:
        self._membership = membership
        self._changed = threading.Condition()
        self._complete = 0
        self._proposed: int | None = None
        self._is_agreed = False
        self._is_requested = False
        self._is_alone = False
        self._group: dist.ProcessGroup | None = None

    def listen(self) -> None:
        """Handle SIGTERM from now on. A program with its own handler keeps it, and saves by itself."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def enter(self, step: int) -> None:
        """Note that this process is in a group, with `step` complete steps."""
        with self._changed:
            self._complete, self._proposed, self._is_agreed = step, None, False
            self._group = dist.group.WORLD
        if self._is_requested:
            self._begin()

    def leave(self) -> None:
        """Note that this process is in no group. A request now ends it at once."""
        self._group = None

    def give_up(self, error: Exception) -> None:
        """Handle a broken group. If a stop was requested, exit: the supervisor forms no other group."""
        self.leave()
        if self._is_requested and self._membership.has_supervisor:
            sys.stderr.write("shoal: asked to stop; this rank ends with what follows\n")
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            self._terminate()

    def is_stop_step(self, step: int) -> bool:
        """Whether to save after `step` complete steps and exit. Every rank gets the same answer."""
        self._complete = step
        if self._proposed is None:
            return False
        with self._changed:
            while self._proposed == step and not self._is_agreed:
                self._changed.wait()  # for the threads of the other ranks, never for their training
            return self._proposed == step

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._group is None or self._is_alone or self._membership.request is StopRequest.EXIT:
            self._terminate()
        elif not self._is_requested:
            self._is_requested = True
            self._begin()

    @staticmethod
    def _terminate() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _begin(self) -> None:
        threading.Thread(
            target=self._run, args=(self._group,), name="shoal-graceful-stop", daemon=True
        ).start()

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            self._wait_for_request()
            # A connection of its own: training may be waiting on the other one.
            store: Any = distributed_c10d._get_default_store()  # noqa: SLF001
            self._agree(group, store.clone())
        except TimeoutError:
            self._is_alone = True
            os.kill(os.getpid(), signal.SIGTERM)
        except (RuntimeError, ValueError, OSError):
            if self._group is group:
                self._propose(None)  # the group is gone, so there is nothing to agree on

    def _wait_for_request(self) -> None:
        """Wait until it is known that all ranks save. `TimeoutError`: they do not, and this rank exits."""
        until = time.monotonic() + REQUEST_WAIT_S
        while (request := self._membership.request) is StopRequest.UNKNOWN and time.monotonic() < until:
            time.sleep(POLL_S)
        if request is not StopRequest.SAVE:
            raise TimeoutError

    def _agree(self, group: dist.ProcessGroup, store: Any) -> None:
        rank, ranks, ahead, turn = group.rank(), group.size(), AHEAD, 0
        while self._group is group:
            steps = self._gather(store, f"shoal/graceful-stop/{turn}/step", rank, ranks, self._complete)
            is_early = self._propose(max(steps) + ahead)
            if all(self._gather(store, f"shoal/graceful-stop/{turn}/early", rank, ranks, int(is_early))):
                with self._changed:
                    self._is_agreed = True
                    self._changed.notify_all()
                return
            self._propose(None)
            ahead, turn = ahead * 4, turn + 1

    def _propose(self, step: int | None) -> bool:
        """Propose a step. Return whether training will see the proposal before it reaches the step."""
        with self._changed:
            self._proposed = step
            self._changed.notify_all()
            return step is not None and self._complete < step

    def _gather(self, store: Any, name: str, rank: int, ranks: int, value: int) -> list[int]:
        """Return the values of all ranks for this name. `TimeoutError`: some ranks were not asked to stop."""
        store.set(f"{name}/{rank}", str(value))
        until = time.monotonic() + ALONE_S
        names = [f"{name}/{number}" for number in range(ranks)]
        while not store.check(names):
            if time.monotonic() > until and not self._membership.has_supervisor:
                raise TimeoutError
            time.sleep(POLL_S)
        return [int(text) for text in store.multi_get(names)]
