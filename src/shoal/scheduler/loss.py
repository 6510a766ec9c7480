"""What it costs to stop a job that runs: the work since its last durable checkpoint, and starting it again.

Two figures. A bill says the most that is lost, never less: where nobody knows of a checkpoint, the whole
run. Victims are chosen by what is expected instead: of a job without a known checkpoint, what the median of
those with one would lose, since it may well save where nobody sees it; and never more than its whole run.
What a job saves between the signal and its end makes the loss smaller than both.
"""

from __future__ import annotations

from math import inf

from shoal.scheduler.devices import held_by
from shoal.scheduler.fair import devices
from shoal.scheduler.snapshot import Holding

RESTART_S = 120.0
"""Until a job that was stopped is back where its checkpoint was: taking it down, starting, reading it."""
UNKNOWN = -inf
"""Where nobody's checkpoints are known: work that is nowhere safe."""


def safe_until(holding: Holding) -> float:
    """Up to when its work surely survives a stop. What earlier attempts left is where this one began."""
    return max(holding.checkpoint_at or holding.placed_at, holding.placed_at)


def likely_until(holding: Holding, typical: float) -> float:
    """Up to when its work is taken to survive. `typical`: the median of those whose checkpoints are known."""
    return safe_until(holding) if holding.checkpoint_at is not None else max(holding.placed_at, typical)


def lost_s(holding: Holding, now: float, typical: float = UNKNOWN) -> float:
    """Seconds of its run that are done again, the restart among them: at most, or by what is typical."""
    return max(now - likely_until(holding, typical), 0.0) + RESTART_S


def lost(holding: Holding, now: float, typical: float = UNKNOWN) -> float:
    """Device-seconds; CPUs count as parts of a GPU. Nothing for one that leaves anyway."""
    if holding.is_leaving:
        return 0.0
    return lost_s(holding, now, typical) * devices(held_by(holding.allocation))
