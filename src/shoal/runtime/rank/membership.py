"""The membership of this process in the rank group, from one rendezvous round to the next.

`RankMembership` reads assignments from the board and writes heartbeats to it. `register_stack_dump` lets the
supervisor read this process's stacks at any moment.
"""

from __future__ import annotations

import faulthandler
import os
import time

from shoal.runtime.rank.board import (
    BOARD_NAME,
    BOARD_VARIABLE,
    STACKS_SIGNAL,
    RankAssignment,
    RankBoard,
    RankStatus,
    StopRequest,
    rank_variables,
    stacks_offset,
)


def register_stack_dump(fd: int, slot: int) -> bool:
    """Make a signal write the stacks of all threads into the board's file. False: that is not possible.

    The signal handler itself writes them, so it works even if a thread holds Python's lock and never returns.
    """
    try:
        # Opened again for a file offset of its own, because every rank of the node shares the descriptor.
        dump_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(dump_fd, stacks_offset(slot), os.SEEK_SET)
        faulthandler.register(STACKS_SIGNAL, file=dump_fd, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        return False
    return True


POLL_S, SPARE_POLL_S = 0.002, 0.005
PEERS_S, FAR_PEERS_S = 2.0, 10.0
"""How long after an error in this rank the supervisor may take to report that a peer was lost. If the peer
was on another node, the report comes from the control plane over two networks, and it may be busy."""

ALONE = {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
"""The variables of a program that runs alone, outside of any group."""


class RankMembership:
    """This process's membership. Only `newest_round` and `request` may be used from several threads."""

    def __init__(self) -> None:
        self._board: RankBoard | None = None
        self._slot = 0
        board = os.environ.get(BOARD_VARIABLE)
        # A child of a rank may inherit the variable without the descriptor, or have its own file there.
        if board and _is_board(int(board.partition(":")[0])):
            fd, _, slot = board.partition(":")
            self._board, self._slot = RankBoard(int(fd)), int(slot)
            self._board.write_process(
                self._slot, os.getpid(), can_dump_stacks=register_stack_dump(int(fd), self._slot)
            )
        self.rendezvous_round = -1
        self.step = -1
        self._joined_ns = 0
        self._has_stepped = False

    def wait_for_round(self) -> RankAssignment:
        """Wait for a newer round and enter it. The first call of a rank returns at once."""
        self._write_status(RankStatus.WAITING)
        while True:
            place = self._read_place()
            if place is not None and place.rendezvous_round > self.rendezvous_round:
                self.rendezvous_round = place.rendezvous_round
                os.environ.update(rank_variables(place.rank, place.local_rank))
                os.environ["MASTER_PORT"] = str(place.master_port)
                for name in ("WORLD_SIZE", "MASTER_ADDR"):  # the only rank of a job has none of these
                    os.environ.setdefault(name, os.environ.get(f"SHOAL_{name}", ALONE[name]))
                os.environ["SHOAL_RENDEZVOUS_ROUND"] = str(place.rendezvous_round)
                self._write_status(RankStatus.WAITING)  # the other ranks of this round may come much later
                return place
            time.sleep(POLL_S if self.rendezvous_round >= 0 else SPARE_POLL_S)

    def mark_joined(self) -> None:
        self._joined_ns, self._has_stepped = time.monotonic_ns(), False
        self._mark(0)
        self._write_status(RankStatus.JOINED)

    def bind(self) -> None:
        """Note that this process cannot join another group, so its supervisor restarts it after this one."""
        if self._board is not None:
            self._board.bind_to_round(self._slot)

    def record_step(self, step: int) -> None:
        """Report that this many steps are complete."""
        self.step = step
        if not self._has_stepped:
            self._has_stepped = True
            self._mark(time.monotonic_ns())
        self._write_status(RankStatus.JOINED)

    def mark_done(self) -> None:
        """Report the end of the steps. Later work is no step, however long it takes."""
        self._write_status(RankStatus.DONE)

    def resume_steps(self) -> None:
        """Report that there are steps again."""
        self._write_status(RankStatus.JOINED)

    def mark_gone(self) -> None:
        """Report that the process has left the group and joins no other."""
        self._write_status(RankStatus.GONE)

    def set_timeout(self, timeout_s: float) -> None:
        """Report how long the collectives of this process wait for other ranks."""
        if self._board is not None:
            self._board.write_timeout(self._slot, timeout_s)

    @property
    def is_overtaken(self) -> bool:
        """Whether there is a newer round than the one of this process."""
        return self.newest_round() > self.rendezvous_round

    def newest_round(self) -> int:
        """Return the newest round that this process is assigned to. -1: none. Thread-safe."""
        place = self._read_place()
        return place.rendezvous_round if place is not None else -1

    def is_group_over(self, error: Exception) -> bool:
        """After an error: whether there is another round to join.

        Waits 2 s for the supervisor to say so, and 10 s if the error may come from a lost peer on another
        node. Collectives have no specific error for that.
        """
        if self._board is None:
            return False
        self._write_status(RankStatus.WAITING)
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
    def request(self) -> StopRequest:
        """What SIGTERM means now. Thread-safe."""
        return StopRequest.SAVE if self._board is None else self._board.stop_request

    def _mark(self, stepped_ns: int) -> None:
        if self._board is not None:
            self._board.write_joined(
                self._slot, joined_ns=self._joined_ns, stepped_ns=stepped_ns, first_step=self.step
            )

    def _read_place(self) -> RankAssignment | None:
        if self._board is not None:
            return self._board.assignment(self._slot)
        return _from_environment()

    def _write_status(self, status: RankStatus) -> None:
        if self._board is not None:
            self._board.write_status(
                self._slot, status, self.rendezvous_round, self.step, time.monotonic_ns()
            )


def _is_board(fd: int) -> bool:
    """Whether this descriptor is a page that `RankBoard.create` made."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{BOARD_NAME} ")
    except OSError:
        return False


def _from_environment() -> RankAssignment:
    """Return the assignment outside of Shoal, from torchrun's variables or for a single process."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    return RankAssignment(
        rendezvous_round=int(os.environ.get("SHOAL_RENDEZVOUS_ROUND", "0")),
        rank=int(os.environ.setdefault("RANK", "0")),
        local_rank=int(os.environ.setdefault("LOCAL_RANK", "0")),
        master_port=int(os.environ.setdefault("MASTER_PORT", "29500")),
    )
