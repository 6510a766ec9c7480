"""Meet the other ranks of a group: all of them, or nobody when another group has begun meanwhile.

What torch does to form a group cannot be interrupted: a rank inside it waits for a peer that was lost since
until its connections are cut (`lines`). So nobody enters it before everybody has come to the
group's store, and who comes is counted under the group's own name: nothing keeps the port free between the
choice and the first rank, and another job's ranks may find their way to it.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from shoal.runtime.board import Place
from shoal.runtime.rank.member import POLL_S, Member

SLOWEST_S = 0.1
"""How long a rank that waits for the others may take to see them, or to hear of another group."""
CONNECT_S = 1.0
"""Of one try. Where the first rank is lost just when we come to its store, torch takes up to 2.3 times as
long, and who has not heard of the next group after five seconds is ended.
"""


class OvertakenError(Exception):
    """Another group has begun: this one will never be complete."""


def meet(member: Member, place: Place, timeout_s: float) -> Store:
    """The group's store, once every rank has come to it. Raises where it is not to be."""
    ranks = int(os.environ["WORLD_SIZE"])
    until = time.monotonic() + timeout_s
    store = _store(member, place, ranks, timeout_s)
    name = f"shoal/{os.environ.get('SHOAL_ATTEMPT_ID', '')}/{place.generation}"
    here, together = f"{name}/here", f"{name}/together"
    if store.add(here, 1) == ranks:
        store.set(together, "")
    began = time.monotonic()
    # Asked again and again: a wait at the store that ends without an answer writes two lines into the log.
    while not store.check([together]):
        if member.is_overtaken:
            raise OvertakenError
        if time.monotonic() > until:
            raise TimeoutError(f"{store.add(here, 0)} of {ranks} ranks came within {timeout_s:g} s")
        time.sleep(min(max(POLL_S, (time.monotonic() - began) / 20), SLOWEST_S))
    if member.is_overtaken:
        raise OvertakenError  # one of those who came is lost again
    return store


def _store(member: Member, place: Place, ranks: int, timeout_s: float) -> Store:
    """Opened by the first rank; the others come to it, and again while nobody is there."""
    address, until = os.environ["MASTER_ADDR"], time.monotonic() + timeout_s
    is_first = place.rank == 0
    limit = timedelta(seconds=timeout_s if is_first else min(timeout_s, CONNECT_S))
    while True:
        _until_open(member, place, timeout_s)
        try:
            store = TCPStore(address, place.master_port, ranks, is_first, limit, wait_for_workers=False)
        except DistNetworkError as error:
            if is_first or time.monotonic() > until:
                raise
            if member.is_overtaken:
                raise OvertakenError from error
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _until_open(member: Member, place: Place, timeout_s: float) -> None:
    """Wait until the first rank listens. A store's client that comes too early tries again after half a
    second: longer than all the rest takes.
    """
    began, pause_s = time.monotonic(), POLL_S
    address = (os.environ["MASTER_ADDR"], place.master_port)
    while place.rank != 0:
        try:
            with socket.create_connection(address, timeout=min(timeout_s, CONNECT_S)):
                return
        except OSError as error:
            if member.is_overtaken:
                raise OvertakenError from error
            if time.monotonic() > began + timeout_s:
                told = (
                    f"nobody listens at {address[0]}:{address[1]}, where rank 0 should, after {timeout_s:g} s"
                )
                raise TimeoutError(told) from error
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, SLOWEST_S)
