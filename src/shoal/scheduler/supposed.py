"""How long a run may take where only one expected time and a limit are known."""

from __future__ import annotations

from shoal.scheduler.expectation import Expectation
from shoal.scheduler.snapshot import Candidate, Holding

SHARES = (0.1, 0.3, 0.6, 1.0, 1.5, 2.3, 4.0)
"""Of the expected time: half of the runs are shorter and half are longer, by factors that are common."""
UNKNOWN_S = 3600.0


def supposed(work: Candidate | Holding) -> Expectation:
    """Quantiles around what was expected when it was submitted; without that, around half its limit."""
    limit_s = work.time_limit_s if isinstance(work, Holding) else work.request.time_limit_s
    expected_s = work.expected_s or (UNKNOWN_S if limit_s is None else limit_s / 2)
    runs = tuple(share * expected_s for share in SHARES)
    return Expectation(expected_s=expected_s, sure_s=0.0, limit_s=limit_s, runs=runs)
