"""Without cgroups: what a process can be held to by itself. Applied in the child, inherited by its children.

Weaker, and said so by `shoal nodes`: the memory limit holds for each process, not for their sum.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import zlib

from shoal.wire import Order


def apply_limits(order: Order, *, is_own_user: bool) -> None:
    """Limit this process. `is_own_user`: its user runs nothing else, so its processes may be counted."""
    if order.limits.memory_bytes is not None:
        # Not RLIMIT_AS: CUDA and some allocators reserve far more address space than they ever use.
        _lower(resource.RLIMIT_DATA, order.limits.memory_bytes)
    if is_own_user:
        _lower(resource.RLIMIT_NPROC, order.limits.max_processes)


def pin(order: Order) -> None:
    """Keep this process on as many CPUs as it asked for, spread over the machine by attempt."""
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, chosen_cpus(cpus, order.limits.cpus, f"{order.attempt_id} {order.node}"))


def chosen_cpus(cpus: list[int], wanted: float, seed: str) -> set[int]:
    """Neighbouring CPUs, starting at a place that depends on `seed` alone."""
    count = min(len(cpus), max(1, math.ceil(wanted)))
    start = zlib.crc32(seed.encode()) % len(cpus)
    return {cpus[(start + step) % len(cpus)] for step in range(count)}


def _lower(what: int, limit: int) -> None:
    _, hard = resource.getrlimit(what)
    value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (value, value))
