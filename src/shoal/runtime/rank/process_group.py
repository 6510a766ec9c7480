"""Form a torch process group with all ranks of a round, and give up a broken one without waiting for it.

Rendezvous: the calls with which torch forms a group cannot be interrupted. A rank inside them waits for a
peer that was lost in between, until its connections are cut. So no rank makes these calls before all ranks
have come to the store of the round. Ranks are counted under the round's own name, because the port is not
reserved between its choice and the start of rank 0, so ranks of another job may connect to it.

Connections: a collective that gloo has begun cannot be cancelled, and neither can the forming of a group.
Both end at once if a connection that they wait on is cut at either end. So a rank that leaves a broken group
cuts all its connections, and peers that wait for this rank notice the loss. If a rank is inside such a wait
when its supervisor announces the next round, a thread cuts the connections (`GroupConnections.cut_older`).

Leaving: pending operations of a broken group must not delay training. Dropping the last reference to a group
waits for them, so a daemon thread holds the last few groups and does the waiting.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistNetworkError, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from shoal.runtime.rank.board import RankAssignment
from shoal.runtime.rank.membership import POLL_S, RankMembership

LOOK_S = 0.05

SocketInodes = dict[int, int]
"""Inodes of sockets by descriptor, because a descriptor's number may be reused before it is cut."""


class GroupConnections:
    """The sockets that this process has open for its rank group. Any thread may cut them."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._rendezvous_round = -1
        self._sockets: SocketInodes = {}
        self._before: SocketInodes | None = None

    def begin(self, rendezvous_round: int) -> None:
        """Start recording for this round."""
        with self._guard:
            self._rendezvous_round, self._sockets, self._before = rendezvous_round, {}, None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record sockets that are opened inside the `with` block as the group's."""
        with self._guard:
            is_outermost = self._before is None
            if is_outermost:
                self._before = _sockets()
        try:
            yield
        finally:
            if is_outermost:
                with self._guard:
                    self._record_new()
                    self._before = None

    def cut(self, before: float = math.inf) -> None:
        """Shut down every connection of a round older than `before`. The owners close the descriptors."""
        with self._guard:
            if self._rendezvous_round >= before:
                return
            self._record_new()
            for fd, inode in self._sockets.items():
                _cut(fd, inode)
            self._sockets.clear()

    def cut_older(self, newest: Callable[[], int]) -> None:
        """Start a thread that cuts the connections of all rounds older than `newest()`."""

        def look() -> None:
            while True:
                time.sleep(LOOK_S)
                self.cut(newest())

        threading.Thread(target=look, name="shoal-lines", daemon=True).start()

    def _record_new(self) -> None:
        if self._before is not None:
            self._sockets |= {fd: one for fd, one in _sockets().items() if self._before.get(fd) != one}


connections = GroupConnections()
"""The connections of this process."""


@functools.cache
def watch_groups() -> None:
    """Record the sockets of every group, including groups that the program makes. Runs once per process."""
    make = distributed_c10d._new_process_group_helper  # noqa: SLF001 - where all of them are made

    @functools.wraps(make)
    def noted(*args: Any, **more: Any) -> Any:
        with connections.recording():
            return make(*args, **more)

    distributed_c10d._new_process_group_helper = noted  # noqa: SLF001


def _sockets() -> SocketInodes:
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[int(name)] = status.st_ino
    return sockets


def _cut(fd: int, inode: int) -> None:
    """Shut the descriptor down if it is still that socket, is a network socket, and does not listen."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
        is_it = os.fstat(line.fileno()).st_ino == inode
        is_of_a_network = line.family in (socket.AF_INET, socket.AF_INET6)
        if is_it and is_of_a_network and not line.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            line.shutdown(socket.SHUT_RDWR)


SLOWEST_S = 0.1
"""The longest pause between two checks of a waiting rank."""
CONNECT_S = 1.0
"""The time limit of one try. If rank 0 is lost just when this rank connects, torch takes up to 2.3 times as
long, and a rank that does not react to the next round within 5 s is killed.
"""


class OvertakenError(Exception):
    """Another round has begun, so this one will never be complete."""


def rendezvous(membership: RankMembership, place: RankAssignment, timeout_s: float) -> Store:
    """Return the round's store once every rank has come to it. `OvertakenError`, `TimeoutError`: not all
    came.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    until = time.monotonic() + timeout_s
    store = _store(membership, place, ranks, timeout_s)
    name = f"shoal/{os.environ.get('SHOAL_ATTEMPT_ID', '')}/{place.rendezvous_round}"
    here, together = f"{name}/here", f"{name}/together"
    if store.add(here, 1) == ranks:
        store.set(together, "")
    began = time.monotonic()
    # Polled, because a `wait` on the store that times out writes two lines into the log.
    while not store.check([together]):
        if membership.is_overtaken:
            raise OvertakenError
        if time.monotonic() > until:
            raise TimeoutError(f"{store.add(here, 0)} of {ranks} ranks came within {timeout_s:g} s")
        time.sleep(min(max(POLL_S, (time.monotonic() - began) / 20), SLOWEST_S))
    if membership.is_overtaken:
        raise OvertakenError  # a rank that had come is lost again
    return store


def _store(membership: RankMembership, place: RankAssignment, ranks: int, timeout_s: float) -> Store:
    """Open the store on rank 0. On other ranks connect to it, and retry until it is there."""
    address, until = os.environ["MASTER_ADDR"], time.monotonic() + timeout_s
    is_first = place.rank == 0
    limit = timedelta(seconds=timeout_s if is_first else min(timeout_s, CONNECT_S))
    while True:
        _wait_for_listener(membership, place, timeout_s)
        try:
            store = TCPStore(address, place.master_port, ranks, is_first, limit, wait_for_workers=False)
        except DistNetworkError as error:
            if is_first or time.monotonic() > until:
                raise
            if membership.is_overtaken:
                raise OvertakenError from error
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _wait_for_listener(membership: RankMembership, place: RankAssignment, timeout_s: float) -> None:
    """Wait until rank 0 listens. A store's client that connects too early retries after 0.5 s, which is
    longer than everything else takes.
    """
    began, pause_s = time.monotonic(), POLL_S
    address = (os.environ["MASTER_ADDR"], place.master_port)
    while place.rank != 0:
        try:
            with socket.create_connection(address, timeout=min(timeout_s, CONNECT_S)):
                return
        except OSError as error:
            if membership.is_overtaken:
                raise OvertakenError from error
            if time.monotonic() > began + timeout_s:
                message = f"rank 0 does not listen at {address[0]}:{address[1]} after {timeout_s:g} s"
                raise TimeoutError(message) from error
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, SLOWEST_S)


MAX_HELD = 4
"""The number of lost groups that are held. A program may still refer to one, for example in a DDP replica."""

_left: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
_thread: threading.Thread | None = None


def leave_group() -> None:
    """Give up the group so that its other members notice. The group may be incomplete or broken."""
    groups = _process_groups()
    connections.cut()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    # Torch names a group by the number of groups before it, and ranks find each other's addresses under that
    # name. A group that failed to form is counted and never destroyed. So a survivor and a new rank would use
    # different names, and both would wait until the timeout.
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - as destroying a group does
    _left.put(groups)
    _begin()


def _process_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - there is no other list of them


def _begin() -> None:
    global _thread  # noqa: PLW0603 - one for the process, begun by the first loss
    if _thread is None:
        _thread = threading.Thread(target=_hold, name="shoal-left-groups", daemon=True)
        _thread.start()


def _hold() -> None:
    held = []  # a local variable of a daemon thread, which even the interpreter's exit does not drop
    while True:
        held.append(_left.get())
        if len(held) > MAX_HELD:
            del held[0]
