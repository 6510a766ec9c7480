"""How many descriptors this process may have, and when a connection fails for want of our own."""

from __future__ import annotations

import errno
import resource

RESERVED = 128
"""For listeners, the feed, checks, reports and operators."""
OURS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.EADDRNOTAVAIL,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EAGAIN,  # a Unix socket with a full backlog: somebody listens there
    }
)


def is_ours(error: Exception) -> bool:
    """Whether a connection failed for a reason that says nothing against the one called."""
    return isinstance(error, OSError) and error.errno in OURS


def raised() -> int:
    """As many descriptors as may be had, from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30


def clients_within(descriptors: int, asked: int) -> int:
    """Connections of callers to take: each may need another one to a replica."""
    return max(1, min(asked, (descriptors - RESERVED) // 2))
