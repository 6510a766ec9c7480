"""Meet the other ranks of a group: all of them, or nobody when another group has begun meanwhile.

What torch does to form a group cannot be interrupted: a rank inside it waits for a peer that was lost since
until the time-out. So nobody enters it before everybody has come to the group's store.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from shoal.runtime.board import Place
from shoal.runtime.rank.member import POLL_S, Member

HERE, TOGETHER = "shoal/here", "shoal/together"
LOOK = timedelta(seconds=0.1)
"""How long a rank that waits for the others may take to hear of another group."""
SLOWEST_S = 0.1


class OvertakenError(Exception):
    """Another group has begun: this one will never be complete."""


def meet(member: Member, place: Place, timeout_s: float) -> Store:
    """The group's store, once every rank has come to it. Raises where it is not to be."""
    ranks = int(os.environ["WORLD_SIZE"])
    _until_open(member, place, timeout_s)
    address = os.environ["MASTER_ADDR"]
    limit = timedelta(seconds=timeout_s)
    store: Store = TCPStore(address, place.master_port, ranks, place.rank == 0, limit, wait_for_workers=False)
    if store.add(HERE, 1) == ranks:
        store.set(TOGETHER, "")
    until = time.monotonic() + timeout_s
    while not _are_together(store):
        if member.is_overtaken:
            raise OvertakenError
        if time.monotonic() > until:
            raise TimeoutError(f"{store.add(HERE, 0)} of {ranks} ranks came within {timeout_s:g} s")
    return store


def _are_together(store: Store) -> bool:
    try:
        store.wait([TOGETHER], LOOK)
    except DistStoreError:
        return False
    return True


def _until_open(member: Member, place: Place, timeout_s: float) -> None:
    """Wait until the first rank listens. A store's client that comes too early tries again after half a
    second: longer than all the rest takes.
    """
    began, pause_s = time.monotonic(), POLL_S
    address = (os.environ["MASTER_ADDR"], place.master_port)
    while place.rank != 0:
        try:
            with socket.create_connection(address, timeout=timeout_s):
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
