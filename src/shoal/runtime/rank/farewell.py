"""Agree, when everybody is asked to stop, after which step all ranks save and go.

The request reaches ranks at different steps, and a rank that waited for its peers at the end of a step could
keep them waiting in the next one for ever. So nobody stops training to agree: a thread of each rank meets the
others at the group's store, all propose the same step ahead of everybody, and it counts only when every rank
has said that it had not yet come so far. It costs one comparison a step while nobody asks.

A cluster may send the request to every process of a job, and reach ranks before their supervisor, which alone
can say that it is for all: a rank trains on until it has that word, or knows that none comes.
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

from shoal.runtime.board import Request
from shoal.runtime.rank.member import Member

SAVED_AND_GONE = 75
"""The exit code of a rank that saved because it was asked to stop: EX_TEMPFAIL, to be continued."""
AHEAD = 2
"""Steps from where the foremost rank is to where all stop; four times as many each time that was too few."""
POLL_S = 0.005
WORD_S = 1.0
"""How long the supervisor's word may take: it may get a signal that is for all half a second after a rank."""
ALONE_S = 10.0
"""A rank whose peers were not asked to stop within this time goes alone, as if it knew nothing of them."""


class Gone(SystemExit):
    """Raised where the program asks for its next step: what there was is saved."""

    def __init__(self) -> None:
        super().__init__(SAVED_AND_GONE)


class Farewell:
    """One process's part. `enter` and `is_time` are the training thread's."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._changed = threading.Condition()
        self._complete = 0
        self._proposed: int | None = None
        self._is_agreed = False
        self._is_asked = False
        self._is_alone = False
        self._group: dist.ProcessGroup | None = None

    def listen(self) -> None:
        """From now on SIGTERM asks. A program that has a handler of its own keeps it, and saves by itself."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def enter(self, step: int) -> None:
        """This process is in a group, with so many steps complete."""
        with self._changed:
            self._complete, self._proposed, self._is_agreed = step, None, False
            self._group = dist.group.WORLD
        if self._is_asked:
            self._begin()

    def leave(self) -> None:
        """It is in none: a request now ends it at once."""
        self._group = None

    def give_up(self, error: Exception) -> None:
        """The group broke. Who was asked to stop goes: its supervisor, which asked, forms no other."""
        self.leave()
        if self._is_asked and self._member.has_supervisor:
            sys.stderr.write("shoal: asked to stop; this rank ends with what follows\n")
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            self._go()

    def is_time(self, step: int) -> bool:
        """Whether to save now that so many steps are complete, and go. The same answer on every rank."""
        self._complete = step
        if self._proposed is None:
            return False
        with self._changed:
            while self._proposed == step and not self._is_agreed:
                self._changed.wait()  # for the others' threads, never for their training
            return self._proposed == step

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._group is None or self._is_alone or self._member.request is Request.GO:
            self._go()
        elif not self._is_asked:
            self._is_asked = True
            self._begin()

    @staticmethod
    def _go() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _begin(self) -> None:
        threading.Thread(target=self._run, args=(self._group,), name="farewell", daemon=True).start()

    def _run(self, group: dist.ProcessGroup) -> None:
        try:
            self._wait_for_word()
            # A connection of its own: training may be waiting on the other one.
            store: Any = distributed_c10d._get_default_store()  # noqa: SLF001
            self._agree(group, store.clone())
        except TimeoutError:
            self._is_alone = True
            os.kill(os.getpid(), signal.SIGTERM)
        except (RuntimeError, ValueError, OSError):
            if self._group is group:
                self._propose(None)  # the group is gone, and with it the question

    def _wait_for_word(self) -> None:
        """Until it is known that all are to save. `TimeoutError`: they are not, and this rank is to go."""
        until = time.monotonic() + WORD_S
        while (request := self._member.request) is Request.UNTOLD and time.monotonic() < until:
            time.sleep(POLL_S)
        if request is not Request.SAVE:
            raise TimeoutError

    def _agree(self, group: dist.ProcessGroup, store: Any) -> None:
        rank, ranks, ahead, turn = group.rank(), group.size(), AHEAD, 0
        while self._group is group:
            steps = self._told(store, f"shoal/farewell/{turn}/step", rank, ranks, self._complete)
            is_early = self._propose(max(steps) + ahead)
            if all(self._told(store, f"shoal/farewell/{turn}/early", rank, ranks, int(is_early))):
                with self._changed:
                    self._is_agreed = True
                    self._changed.notify_all()
                return
            self._propose(None)
            ahead, turn = ahead * 4, turn + 1

    def _propose(self, step: int | None) -> bool:
        """Whether training has not come so far: then it will see this before it goes on from there."""
        with self._changed:
            self._proposed = step
            self._changed.notify_all()
            return step is not None and self._complete < step

    def _told(self, store: Any, name: str, rank: int, ranks: int, value: int) -> list[int]:
        """What every rank says under this name. `TimeoutError`: some were never asked."""
        store.set(f"{name}/{rank}", str(value))
        until = time.monotonic() + ALONE_S
        names = [f"{name}/{one}" for one in range(ranks)]
        while not store.check(names):
            if time.monotonic() > until and not self._member.has_supervisor:
                raise TimeoutError
            time.sleep(POLL_S)
        return [int(one) for one in store.multi_get(names)]
