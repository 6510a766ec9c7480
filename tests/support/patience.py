"""How long to sleep between two looks at what a test waits for: the longer it waits, the longer.

A look may be a request to a control plane, or a command of Slurm's: made twenty times a second by each test
that waits, they keep two cores busy with nothing else.
"""

from __future__ import annotations

import time

SHORTEST_S, LONGEST_S = 0.02, 0.3


def pause_s(since: float) -> float:
    """So long, for one who waits since then (monotonic): a tenth of the time that it took so far."""
    return min(LONGEST_S, max(SHORTEST_S, (time.monotonic() - since) / 10))
