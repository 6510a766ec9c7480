"""What a supervisor and its ranks tell each other without a system call: a page of memory both have mapped.

The supervisor writes who is who in the group there should be; each process writes where it is. A
rank's word is believed only about that rank: all of them belong to the job. Every number is aligned and eight
bytes long, and what is the signal for others is written last.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from enum import IntEnum
from typing import Final

import msgspec

VARIABLE: Final = "SHOAL_BOARD"
"""`<descriptor>:<slot>`: how a rank finds the page, and its own place on it."""
NAME: Final = "shoal-board"
HEAD = 64
SLOT = 128
WORD = 8
SIZE = 1 << 16
MAX_SLOTS = (SIZE - HEAD) // SLOT
STACKS_SIGNAL = signal.SIGRTMIN + 11
"""Asks a rank that has said so to write its stacks behind the page, at its own place."""
STACKS_AREA = 1 << 20
MAX_TIMEOUT_S = 1 << 40


class Standing(IntEnum):
    """Where a process is with respect to the group."""

    UNKNOWN = 0
    """It has not said: a program that does not use `shoal.runtime`."""
    WAITING = 1
    """It is ready for a group and in none."""
    JOINED = 2
    """It is in the group of the generation it names, and can leave it for the next."""
    DONE = 3
    """It has come to the end of its steps, and saves, evaluates or waits. It can leave it still, or go on to
    more steps there: between two epochs it stands so, too.
    """
    GONE = 4
    """It has left the group for good, and does what its program has to do after training."""


class Request(IntEnum):
    """What a request to stop, SIGTERM, means to a rank that gets one."""

    UNTOLD = 0
    """Nobody has said: it may be for this rank alone, or come before the word. A supervisor of an earlier
    version says no more where ranks are to go.
    """
    SAVE = 1
    """It is for all of them, with time to save."""
    GO = 2
    """There is nothing to save, or nobody to save with: a rank has failed."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Who one process is in one group."""

    generation: int
    rank: int
    local_rank: int
    master_port: int


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process was when it last said so. Times are readings of the monotonic clock."""

    standing: Standing
    generation: int
    step: int
    """Complete steps."""
    at_ns: int
    joined_ns: int = 0
    """When it joined this generation; 0: not yet."""
    stepped_ns: int = 0
    """When its first step in this generation was complete."""
    first_step: int = 0
    """How many steps were complete then."""
    pid: int = 0
    """As the process itself knows it."""
    can_answer: bool = False
    """Whether it writes its stacks when it is asked to."""
    timeout_s: int = 0
    """How long its collectives wait for others."""
    is_bound: bool = False
    """It tells of its steps but cannot join another group: when its group is over it is started again."""

    def is_in(self, generation: int) -> bool:
        """Whether it is in this group, or was until it had no more to do there."""
        return self.standing >= Standing.JOINED and self.generation == generation

    def is_behind(self, generation: int) -> bool:
        """Whether it could join this group and has not: it never came out of an earlier one.

        One that joined and waits again is not: it has noticed the loss of a peer before anybody else.
        """
        return self.standing is not Standing.UNKNOWN and self.generation < generation


class Board:
    """One page, for one share. Slots 0.. are its processes: ranks first, then spares."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, SIZE)).cast("q")

    @classmethod
    def make(cls) -> tuple[int, Board]:
        """A new page and its descriptor, which children inherit.

        Of one size for ever: who reads a page that was cut off beneath it is killed.
        """
        fd = os.memfd_create(NAME, os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE + MAX_SLOTS * STACKS_AREA)  # takes no memory before it is written to
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, cls(fd)

    # --- the supervisor's part

    def assign(self, slot: int, place: Place) -> None:
        """Say who the process of this slot is now. The generation is written last: it is the signal."""
        at = self._at(slot) + 4
        for offset, number in enumerate((place.rank, place.local_rank, place.master_port), start=1):
            self._words[at + offset] = number
        self._words[at] = place.generation + 1

    def tell(self, request: Request) -> None:
        """Everybody is about to be asked to stop: what that means."""
        self._words[0] = request

    def clear(self, slot: int) -> None:
        """The slot's process is gone."""
        at = self._at(slot)
        for offset in range(SLOT // WORD):
            self._words[at + offset] = 0

    def beat(self, slot: int) -> Beat:
        words = self._words[self._at(slot) : self._at(slot) + SLOT // WORD].tolist()
        return Beat(
            standing=Standing(words[0]) if 0 <= words[0] < len(Standing) else Standing.UNKNOWN,
            generation=words[1],
            step=words[2],
            at_ns=words[3],
            joined_ns=words[8],
            stepped_ns=words[9],
            first_step=words[10],
            pid=words[11],
            can_answer=words[12] == 1,
            timeout_s=words[13],
            is_bound=words[14] == 1,
        )

    # --- a rank's part

    @property
    def request(self) -> Request:
        """What a request to stop means now. A word that we do not know, of a later version, is no leave."""
        word = self._words[0]
        return Request(word) if 0 <= word < len(Request) else Request.GO

    def place(self, slot: int) -> Place | None:
        """Who this process is now; None: nobody has said."""
        at = self._at(slot) + 4
        generation, rank, local_rank, port = self._words[at : at + 4].tolist()
        if generation == 0:
            return None
        return Place(generation=generation - 1, rank=rank, local_rank=local_rank, master_port=port)

    def say(self, slot: int, standing: Standing, generation: int, step: int, at_ns: int) -> None:
        at = self._at(slot)
        self._words[at + 1], self._words[at + 2], self._words[at + 3] = generation, step, at_ns
        self._words[at] = standing

    def mark(self, slot: int, *, joined_ns: int, stepped_ns: int, first_step: int) -> None:
        """When it joined and made its first step; before it says that it has."""
        at = self._at(slot)
        self._words[at + 8], self._words[at + 10], self._words[at + 9] = joined_ns, first_step, stepped_ns

    def introduce(self, slot: int, pid: int, *, can_answer: bool) -> None:
        """Which process it is, and whether it writes its stacks on `STACKS_SIGNAL`."""
        at = self._at(slot)
        self._words[at + 11], self._words[at + 12] = pid, int(can_answer)

    def wait_for(self, slot: int, timeout_s: float) -> None:
        """How long its collectives wait for others."""
        self._words[self._at(slot) + 13] = int(min(timeout_s, MAX_TIMEOUT_S))

    def bind(self, slot: int) -> None:
        """The process says that it cannot join another group than its first one."""
        self._words[self._at(slot) + 14] = 1

    @staticmethod
    def _at(slot: int) -> int:
        return (HEAD + slot * SLOT) // WORD


def stacks_at(slot: int) -> int:
    """Where in the page's file the process of this slot writes its stacks."""
    return SIZE + slot * STACKS_AREA
