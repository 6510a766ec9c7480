"""Who this process is in the group of ranks, from one generation to the next."""

from __future__ import annotations

import os
import socket
import time

from shoal.runtime.board import VARIABLE, Board, Place, Standing
from shoal.runtime.environment import numbers

POLL_S, SPARE_POLL_S = 0.002, 0.005
PEERS_S = 2.0
"""How long after an error of ours the supervisor may take to tell that it was a peer's end."""


STORE_S = 30.0


class Member:
    """This process's place. Used from one thread."""

    def __init__(self) -> None:
        self._board: Board | None = None
        self._slot = 0
        told = os.environ.get(VARIABLE)
        if told:
            fd, _, slot = told.partition(":")
            self._board, self._slot = Board(int(fd)), int(slot)
        self.generation = -1
        self.step = -1
        self._joined_ns = 0
        self._has_stepped = False

    def next(self) -> Place:
        """Wait for a group that is newer than ours, and enter it. At once, the first time, for a rank."""
        self._say(Standing.WAITING)
        while True:
            place = self._told()
            if place is not None and place.generation > self.generation:
                self.generation = place.generation
                os.environ.update(numbers(place.rank, place.local_rank))
                os.environ["MASTER_PORT"] = str(place.master_port)
                os.environ["SHOAL_GENERATION"] = str(place.generation)
                self._say(Standing.WAITING)  # for the others of this group, who may be long in coming
                return place
            time.sleep(POLL_S if self.generation >= 0 else SPARE_POLL_S)

    def joined(self) -> None:
        self._joined_ns, self._has_stepped = time.monotonic_ns(), False
        self._mark(0)
        self._say(Standing.JOINED)

    def at_step(self, step: int) -> None:
        """A sign of life: this many steps are complete."""
        self.step = step
        if not self._has_stepped:
            self._has_stepped = True
            self._mark(time.monotonic_ns())
        self._say(Standing.JOINED)

    def is_group_over(self) -> bool:
        """After an error: whether there is another group to join. Waits a little for the word."""
        if self._board is None:
            return False
        self._say(Standing.WAITING)
        until = time.monotonic() + PEERS_S
        while time.monotonic() < until:
            place = self._told()
            if place is not None and place.generation > self.generation:
                return True
            time.sleep(POLL_S)
        return False

    def _mark(self, stepped_ns: int) -> None:
        if self._board is not None:
            self._board.mark(
                self._slot, joined_ns=self._joined_ns, stepped_ns=stepped_ns, first_step=self.step
            )

    def _told(self) -> Place | None:
        if self._board is not None:
            return self._board.place(self._slot)
        return _from_environment()

    def _say(self, standing: Standing) -> None:
        if self._board is not None:
            self._board.say(self._slot, standing, self.generation, self.step, time.monotonic_ns())


def until_open(place: Place) -> None:
    """Wait until the group's first rank listens, or for so long that joining may as well say what is wrong.

    A store's client that comes too early tries again after half a second: longer than all the rest takes.
    """
    until = time.monotonic() + STORE_S
    address = (os.environ["MASTER_ADDR"], place.master_port)
    while place.rank != 0 and time.monotonic() < until:
        try:
            with socket.create_connection(address, timeout=STORE_S):
                return
        except OSError:
            time.sleep(POLL_S)


def _from_environment() -> Place:
    """Outside of Shoal: as torchrun says it, or alone."""
    return Place(
        generation=int(os.environ.get("SHOAL_GENERATION", "0")),
        rank=int(os.environ.setdefault("RANK", "0")),
        local_rank=int(os.environ.setdefault("LOCAL_RANK", "0")),
        master_port=int(os.environ.setdefault("MASTER_PORT", "29500")),
    )
