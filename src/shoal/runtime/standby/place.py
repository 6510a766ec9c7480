"""Where a standby is found, what it is told, and how it is buried.

spool/standby/<attempt_id>.<node>/   its lock, its door, its cgroups, and directories of the share to come
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from shoal.clock import BootClock
from shoal.runtime import removal, spool, tree
from shoal.wire import Credentials, Order

CLOCK = BootClock()
FOLDER = "standby"
BURY_S = 5.0


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """All that a standby is told at its start, in memory that nobody else has."""

    order: Order
    """Of the share that runs now. The one to come is the same but for who its peers are."""
    credentials: Credentials
    expected: dict[str, str]
    """The modules to import, each with the file that it comes from."""
    memory_bytes: int | None
    """What it may use while it waits; None: there is no limit."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Become the supervisor of this share."""

    directory: str
    sent_at: float
    """By the clock that counts from boot. The fence of the share counts from here."""


# Made here, once: what msgspec knows of a type it finds out at the first use.
BRIEF = msgspec.json.Decoder(Brief)
CALL = msgspec.json.Decoder(Call)


def directory_of(share: spool.Share) -> str | None:
    """Where the standby of this share is, if there is one. None: the spool is laid out otherwise."""
    above, node = os.path.split(share.directory)
    live, attempt_id = os.path.split(above)
    root, name = os.path.split(live)
    return f"{root}/{FOLDER}/{attempt_id}.{node}" if name == "live" else None


def door_of(directory: str) -> str:
    """Where it is called."""
    return f"{directory}/door"


def fits(ready_for: Order, order: Order) -> bool:
    """Whether what was made ready for the one order serves the other."""
    same = msgspec.structs.replace(
        order,
        nodes=ready_for.nodes,
        incarnation=ready_for.incarnation,
        master_addr=ready_for.master_addr,
        master_port=ready_for.master_port,
        control_url=ready_for.control_url,
        control_urls=ready_for.control_urls,
        max_restarts=ready_for.max_restarts,
    )
    return same == ready_for and len(order.nodes) == len(ready_for.nodes)


def bury(directory: str, *, timeout_s: float = BURY_S) -> bool:
    """Kill what a dead standby left, and remove its place. False: it lives, or something does not die.

    May be repeated. `OSError`: its place cannot be looked at, or is none.
    """
    at, deadline = spool.Share(directory), CLOCK.monotonic() + timeout_s
    try:
        lock = spool.take_lock(at)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        cgroups: tuple[str, ...] = ()
        with contextlib.suppress(msgspec.DecodeError):
            cgroups = spool.read_cgroups(at)
        for path in cgroups:
            tree.unthrottle(path)
        if not tree.kill_until_gone(lambda: tree.pids_in(cgroups), timeout_s=timeout_s):
            return False
        if not tree.remove_cgroups(cgroups, timeout_s=deadline - CLOCK.monotonic()):
            return False
        return removal.remove(directory, timeout_s=deadline - CLOCK.monotonic())
    finally:
        os.close(lock)
