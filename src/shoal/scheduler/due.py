"""The two keys a waiting job is ordered by: when it is due, and what it scores until then.

Who is due goes first, in order of arrival: from then on nobody who came later passes it except by backfill
behind its promise. Everybody else goes by score, smallest first. Both keys are numbers that change only when
the forecast does; `docs/guides/policy.md` has what each constant is worth on real logs.
"""

from __future__ import annotations

from math import sqrt

from shoal.scheduler.expectation import Expectation

PACE = 3.5
"""A job may wait this many times the geometric mean of its expected run and an hour before it is due."""
MOST_S = 10 * 3600.0
"""Nobody is due later, except as below: longer slack cuts the mean and makes the worst job worse."""
WIDE_S = 4 * 3600.0
"""Added for a job as large as the cluster, in proportion for others: to drain a cluster is dear for everybody
who waits, and the longer wide jobs wait the more of them share one draining."""
SURE_WAITS = 50.0
"""Where limits are as good as run times, a job may wait this many times the run that it surely has."""
RESTAMP_FACTOR = 2.0
"""Keys of a waiting job are computed anew once its expected run has changed by this factor."""


def due_at(submitted_at: float, expectation: Expectation, share: float) -> float:
    """From when on the job goes before all that came later. `share` is the part of the cluster it asks for.

    Whole seconds, so that a replay from recorded numbers cannot differ in a last digit.
    """
    slack_s = min(PACE * sqrt(expectation.expected_s * 3600.0), MOST_S) + WIDE_S * min(share, 1.0)
    return float(int(submitted_at + max(slack_s, SURE_WAITS * expectation.sure_s)))


def score(expected_s: float, share: float) -> float:
    """Smaller goes first.

    Slowdown counts a second of waiting as 1 / run time, and the job costs run time x share: Smith's rule
    orders by cost over weight, run time^2 x share. This is its square root.
    """
    return max(expected_s, 10.0) * sqrt(share)


def is_changed(expected_s: float, now_expected_s: float) -> bool:
    """Whether the forecast has moved so far that a waiting job's keys should follow."""
    ratio = now_expected_s / expected_s
    return ratio >= RESTAMP_FACTOR or ratio <= 1 / RESTAMP_FACTOR
