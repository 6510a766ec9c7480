"""The slot of a standby: its directory, its messages, and how a dead standby is reaped.

spool/standby/<attempt_id>.<node>/   its lock, socket, cgroups, and the directories of the future task
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from shoal.clock import BootClock
from shoal.runtime.files import removal, spool
from shoal.runtime.process import tree
from shoal.wire import TaskCredentials, TaskSpec

CLOCK = BootClock()
FOLDER = "standby"
REAP_S = 5.0


class StandbyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a standby, in memory that no other process can read."""

    task_spec: TaskSpec
    """The spec of the current task. The future task differs only in its peers."""
    credentials: TaskCredentials
    expected: dict[str, Any]
    """What the zygote of the ranks has imported: its plan, and the modules with their files."""
    memory_bytes: int | None
    """The memory limit while it waits. None: there is no limit."""


class TakeoverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to become the supervisor of the task in `directory`."""

    directory: str
    sent_at: float
    """By the clock that counts from boot. The task's fence counts from here."""


# Made once at import, because msgspec inspects a type at its first use.
CONFIG_DECODER = msgspec.json.Decoder(StandbyConfig)
REQUEST_DECODER = msgspec.json.Decoder(TakeoverRequest)


def directory_of(task: spool.SpoolTask) -> str | None:
    """Return the slot's directory for this task. None: the spool has another layout."""
    above, node = os.path.split(task.directory)
    live, attempt_id = os.path.split(above)
    root, name = os.path.split(live)
    return f"{root}/{FOLDER}/{attempt_id}.{node}" if name == "live" else None


def socket_path(directory: str) -> str:
    """Return the path of the socket on which the standby takes requests."""
    return f"{directory}/socket"


def fits(ready_for: TaskSpec, task_spec: TaskSpec) -> bool:
    """Whether a standby that was prepared for one task spec can run the other."""
    replace, ranks, lease = msgspec.structs.replace, ready_for.ranks, ready_for.lease
    same = replace(
        task_spec,
        identity=replace(task_spec.identity, replacement=ready_for.identity.replacement),
        ranks=replace(
            task_spec.ranks,
            nodes=ranks.nodes,
            master_addr=ranks.master_addr,
            master_port=ranks.master_port,
            max_restarts=ranks.max_restarts,
        ),
        lease=replace(task_spec.lease, control_url=lease.control_url, control_urls=lease.control_urls),
    )
    return same == ready_for and len(task_spec.ranks.nodes) == len(ranks.nodes)


def reap(directory: str, *, timeout_s: float = REAP_S) -> bool:
    """Kill what a dead standby left, and remove its slot. False: it is alive, or a process does not die.

    May be repeated. `OSError`: the slot is unreadable, or is no slot.
    """
    at, deadline = spool.SpoolTask(directory), CLOCK.monotonic() + timeout_s
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
        if not tree.kill_until_gone(lambda: tree.pids_in_cgroups(cgroups), timeout_s=timeout_s):
            return False
        if not tree.remove_cgroups(cgroups, timeout_s=deadline - CLOCK.monotonic()):
            return False
        return removal.remove(directory, timeout_s=deadline - CLOCK.monotonic())
    finally:
        os.close(lock)
