"""How many descriptors this process may have, and when a connection fails for want of our own."""

from __future__ import annotations

import errno
import resource

RESERVED = 128
"""For listeners, the feed, checks, reports and operators."""
ALL = 1 << 30
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


def raised(most: int = ALL) -> int:
    """As many descriptors as may be had, from now on, up to `most`; more, if there are more already. What
    this process starts inherits them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ALL if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def clients_within(descriptors: int, asked: int) -> int:
    """Connections of callers to take: each may need another one to a replica."""
    return max(1, min(asked, (descriptors - RESERVED) // 2))
