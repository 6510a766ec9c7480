"""The rank board: a page of memory by which a supervisor and its ranks communicate without system calls.

The supervisor writes assignments, and each process writes its heartbeats. A rank's report is trusted only for
that rank, because all of them belong to the job. Every number is aligned and has eight bytes. The number that
signals a change is written last.

`rank_variables` has the variables that number a rank, under the names of torchrun, Slurm, MPI and Shoal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from enum import IntEnum
from typing import Final

import msgspec

OWN_RANK_NAMES = ("SHOAL_RANK", "SHOAL_LOCAL_RANK")
"""Set in every rank, also in the only one of a job."""
RANK_NAMES = ("RANK", "ROLE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
LOCAL_RANK_NAMES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_NODE_RANK",
    "MPI_LOCALRANKID",
)


def rank_variables(rank: int, local_rank: int) -> dict[str, str]:
    """Return the variables that give a rank its number, under the names of all frameworks."""
    ours = dict.fromkeys(RANK_NAMES, str(rank))
    variables = dict(zip(OWN_RANK_NAMES, (str(rank), str(local_rank)), strict=True))
    return {**ours, **dict.fromkeys(LOCAL_RANK_NAMES, str(local_rank)), **variables}


BOARD_VARIABLE: Final = "SHOAL_BOARD"
"""`<descriptor>:<slot>`: the descriptor of the page, and the rank's own slot."""
BOARD_NAME: Final = "shoal-board"
HEAD = 64
SLOT = 128
WORD = 8
SIZE = 1 << 16
MAX_SLOTS = (SIZE - HEAD) // SLOT
STACKS_SIGNAL = signal.SIGRTMIN + 11
"""Makes a rank that supports it (`can_dump_stacks`) write its stacks after the page, in its own area."""
STACKS_AREA = 1 << 20
MAX_TIMEOUT_S = 1 << 40


class RankStatus(IntEnum):
    """The status of a process in its group."""

    UNKNOWN = 0
    """The program does not use `shoal.runtime`, so it reports nothing."""
    WAITING = 1
    """It is ready for a group and in no group."""
    JOINED = 2
    """It is in the group of its `rendezvous_round`, and can leave it for the next."""
    DONE = 3
    """It has reached the end of its steps, and saves, evaluates or waits. It can still leave the group, or
    make more steps in it. Between two epochs it has this status, too."""
    GONE = 4
    """It has left the group for good, and runs the part of its program after training."""


class StopRequest(IntEnum):
    """What SIGTERM means to a rank."""

    UNKNOWN = 0
    """The supervisor has not said. The signal may be for this rank alone, or may come before the supervisor
    knows of it. A supervisor of an earlier version leaves this value where ranks have to exit.
    """
    SAVE = 1
    """The request is for all ranks, and there is time to save."""
    EXIT = 2
    """There is nothing to save, or a rank has failed, so that the others cannot save."""


class RankAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The number of one process in one group."""

    rendezvous_round: int
    rank: int
    local_rank: int
    master_port: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of a process. Times are readings of the monotonic clock."""

    status: RankStatus
    rendezvous_round: int
    step: int
    """Complete steps."""
    at_ns: int
    joined_ns: int = 0
    """When it joined this round. 0: not yet."""
    stepped_ns: int = 0
    """When its first step in this round was complete."""
    first_step: int = 0
    """How many steps were complete at that time."""
    pid: int = 0
    """The pid in the process's own namespace."""
    can_dump_stacks: bool = False
    """Whether it writes its stacks on `STACKS_SIGNAL`."""
    timeout_s: int = 0
    """How long its collectives wait for other ranks."""
    is_bound_to_round: bool = False
    """It reports steps but cannot join another group. When its group is over, it is started again."""

    def is_in(self, rendezvous_round: int) -> bool:
        """Whether it is in the group of this round, or has finished in it."""
        return self.status >= RankStatus.JOINED and self.rendezvous_round == rendezvous_round

    def is_behind(self, rendezvous_round: int) -> bool:
        """Whether it has not left an earlier group, although it could join this one.

        A process that joined and waits again is not behind: it has noticed the loss of a peer first.
        """
        return self.status is not RankStatus.UNKNOWN and self.rendezvous_round < rendezvous_round


class RankBoard:
    """The page of one task. Its slots from 0 on are processes: ranks first, then spares."""

    def __init__(self, fd: int) -> None:
        self._cells = memoryview(mmap.mmap(fd, SIZE)).cast("q")

    @classmethod
    def create(cls) -> tuple[int, RankBoard]:
        """Make a page. Return its descriptor, which children inherit, and the board.

        The size is sealed, because the kernel kills a process that reads a page after the file was truncated.
        """
        fd = os.memfd_create(BOARD_NAME, os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE + MAX_SLOTS * STACKS_AREA)  # uses no memory until it is written
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, cls(fd)

    # --- the supervisor's part

    def assign(self, slot: int, assignment: RankAssignment) -> None:
        """Assign a rank to the process of this slot. The round is written last, because it is the signal."""
        at = self._at(slot) + 4
        for offset, number in enumerate(
            (assignment.rank, assignment.local_rank, assignment.master_port), start=1
        ):
            self._cells[at + offset] = number
        self._cells[at] = assignment.rendezvous_round + 1

    def set_stop_request(self, request: StopRequest) -> None:
        """Write what SIGTERM means, before it is sent to the ranks."""
        self._cells[0] = request

    def clear(self, slot: int) -> None:
        """Clear the slot of a process that is gone."""
        at = self._at(slot)
        for offset in range(SLOT // WORD):
            self._cells[at + offset] = 0

    def heartbeat(self, slot: int) -> Heartbeat:
        cells = self._cells[self._at(slot) : self._at(slot) + SLOT // WORD].tolist()
        return Heartbeat(
            status=RankStatus(cells[0]) if 0 <= cells[0] < len(RankStatus) else RankStatus.UNKNOWN,
            rendezvous_round=cells[1],
            step=cells[2],
            at_ns=cells[3],
            joined_ns=cells[8],
            stepped_ns=cells[9],
            first_step=cells[10],
            pid=cells[11],
            can_dump_stacks=cells[12] == 1,
            timeout_s=cells[13],
            is_bound_to_round=cells[14] == 1,
        )

    # --- a rank's part

    @property
    def stop_request(self) -> StopRequest:
        """What SIGTERM means now. An unknown value, from a later version, means `EXIT`."""
        word = self._cells[0]
        return StopRequest(word) if 0 <= word < len(StopRequest) else StopRequest.EXIT

    def assignment(self, slot: int) -> RankAssignment | None:
        """Return the assignment of this process. None: it has none."""
        at = self._at(slot) + 4
        number, rank, local_rank, port = self._cells[at : at + 4].tolist()
        if number == 0:
            return None
        return RankAssignment(rendezvous_round=number - 1, rank=rank, local_rank=local_rank, master_port=port)

    def write_status(
        self, slot: int, status: RankStatus, rendezvous_round: int, step: int, at_ns: int
    ) -> None:
        at = self._at(slot)
        self._cells[at + 1], self._cells[at + 2], self._cells[at + 3] = rendezvous_round, step, at_ns
        self._cells[at] = status

    def write_joined(self, slot: int, *, joined_ns: int, stepped_ns: int, first_step: int) -> None:
        """Write when it joined and made its first step. This must come before its status."""
        at = self._at(slot)
        self._cells[at + 8], self._cells[at + 10], self._cells[at + 9] = joined_ns, first_step, stepped_ns

    def write_process(self, slot: int, pid: int, *, can_dump_stacks: bool) -> None:
        """Write the pid, and whether the process writes its stacks on `STACKS_SIGNAL`."""
        at = self._at(slot)
        self._cells[at + 11], self._cells[at + 12] = pid, int(can_dump_stacks)

    def write_timeout(self, slot: int, timeout_s: float) -> None:
        """Write how long its collectives wait for other ranks."""
        self._cells[self._at(slot) + 13] = int(min(timeout_s, MAX_TIMEOUT_S))

    def bind_to_round(self, slot: int) -> None:
        """Write that the process cannot join another group after its first one."""
        self._cells[self._at(slot) + 14] = 1

    @staticmethod
    def _at(slot: int) -> int:
        return (HEAD + slot * SLOT) // WORD


def stacks_offset(slot: int) -> int:
    """Return the offset in the page's file at which the process of this slot writes its stacks."""
    return SIZE + slot * STACKS_AREA
