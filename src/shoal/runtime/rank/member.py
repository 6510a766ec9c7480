"""Who this process is in the group of ranks, from one generation to the next."""

from __future__ import annotations

import os
import time

from shoal.runtime.board import NAME, VARIABLE, Board, Place, Request, Standing
from shoal.runtime.rank.own_stacks import answer
from shoal.runtime.rank_names import numbers

POLL_S, SPARE_POLL_S = 0.002, 0.005
PEERS_S, FAR_PEERS_S = 2.0, 10.0
"""How long after an error of ours the supervisor may take to tell that it was a peer's end. Of a peer on
another node the control plane tells it first, over two networks, and may be busy."""

ALONE = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""Of a program that nobody gave a place in a group."""


class Member:
    """This process's place. Used from one thread, but for `newest`."""

    def __init__(self) -> None:
        self._board: Board | None = None
        self._slot = 0
        told = os.environ.get(VARIABLE)
        # What a rank starts may have the variable and not the descriptor, or a file of its own there.
        if told and _is_board(int(told.partition(":")[0])):
            fd, _, slot = told.partition(":")
            self._board, self._slot = Board(int(fd)), int(slot)
            self._board.introduce(self._slot, os.getpid(), can_answer=answer(int(fd), self._slot))
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
                for name in ("WORLD_SIZE", "MASTER_ADDR"):  # which the only rank of a job has not been given
                    os.environ.setdefault(name, os.environ.get(f"SHOAL_{name}", ALONE[name]))
                os.environ["SHOAL_GENERATION"] = str(place.generation)
                self._say(Standing.WAITING)  # for the others of this group, who may be long in coming
                return place
            time.sleep(POLL_S if self.generation >= 0 else SPARE_POLL_S)

    def joined(self) -> None:
        self._joined_ns, self._has_stepped = time.monotonic_ns(), False
        self._mark(0)
        self._say(Standing.JOINED)

    def stays(self) -> None:
        """It cannot join another group: when this one is over, its supervisor starts it again."""
        if self._board is not None:
            self._board.bind(self._slot)

    def at_step(self, step: int) -> None:
        """A sign of life: this many steps are complete."""
        self.step = step
        if not self._has_stepped:
            self._has_stepped = True
            self._mark(time.monotonic_ns())
        self._say(Standing.JOINED)

    def is_done(self) -> None:
        """There is no step to make: what it does now is no step, however long it takes."""
        self._say(Standing.DONE)

    def goes_on(self) -> None:
        """There is one after all."""
        self._say(Standing.JOINED)

    def is_gone(self) -> None:
        """It has left the group and joins no other."""
        self._say(Standing.GONE)

    def waits_for(self, timeout_s: float) -> None:
        """So long do its collectives wait for others."""
        if self._board is not None:
            self._board.wait_for(self._slot, timeout_s)

    @property
    def is_overtaken(self) -> bool:
        """Whether there is a newer group than ours."""
        return self.newest() > self.generation

    def newest(self) -> int:
        """The newest group that this process was told of; -1: none yet. Any thread may ask."""
        place = self._told()
        return place.generation if place is not None else -1

    def is_group_over(self, error: Exception) -> bool:
        """After an error: whether there is another group to join. Waits a little for the word, longer where
        the error may be that a peer on another node is gone: collectives say that in no words of their own.
        """
        if self._board is None:
            return False
        self._say(Standing.WAITING)
        has_far_peers = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        may_be_far = has_far_peers and isinstance(error, RuntimeError | OSError)
        until = time.monotonic() + (FAR_PEERS_S if may_be_far else PEERS_S)
        while time.monotonic() < until:
            if self.is_overtaken:
                return True
            time.sleep(POLL_S)
        return False

    @property
    def has_supervisor(self) -> bool:
        return self._board is not None

    @property
    def request(self) -> Request:
        """What it means to be asked to stop now. Any thread may ask."""
        return Request.SAVE if self._board is None else self._board.request

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


def _is_board(fd: int) -> bool:
    """Whether this descriptor is the page that `Board.make` made."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{NAME} ")
    except OSError:
        return False


def _from_environment() -> Place:
    """Outside of Shoal: as torchrun says it, or alone."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    return Place(
        generation=int(os.environ.get("SHOAL_GENERATION", "0")),
        rank=int(os.environ.setdefault("RANK", "0")),
        local_rank=int(os.environ.setdefault("LOCAL_RANK", "0")),
        master_port=int(os.environ.setdefault("MASTER_PORT", "29500")),
    )
