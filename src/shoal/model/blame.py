"""Which of the failures that nodes tell of is the cause of the others. Pure."""

from __future__ import annotations

import signal

from shoal.wire import EndKind, NodeOutcome

AFTERMATH = frozenset({signal.SIGABRT, signal.SIGTERM})
"""How ranks end that notice the loss of a peer, or are told to stop."""


def order_of_blame(outcome: NodeOutcome) -> tuple[int, float]:
    """The cause has the lowest: a rank that was killed, before one that gave up or a node that waited in vain
    for another, before one that we stopped; of equal ones the earliest. The peers of a lost rank give up
    within milliseconds, and their node may be heard first.
    """
    at = outcome.ended_at if outcome.failed_at is None else outcome.failed_at
    if outcome.kind is EndKind.STOPPED:
        return 2, at
    waits_in_vain = outcome.is_hang and outcome.rank is None
    is_aftermath = waits_in_vain or outcome.kind is EndKind.EXITED or outcome.signal in AFTERMATH
    return int(is_aftermath), at
