"""What it costs to stop a job that runs: the work since its last durable checkpoint, and starting it again.

A bill says the most that is lost, never less. So where nobody knows of a checkpoint it is the whole run,
though half of it would be the better guess: who keeps checkpoints where Shoal sees them is evicted sooner,
and loses little. What a job saves between the signal and its end makes the loss smaller than the bill.
"""

from __future__ import annotations

from shoal.scheduler.devices import held_by
from shoal.scheduler.fair import devices
from shoal.scheduler.snapshot import Holding

RESTART_S = 120.0
"""Until a job that was stopped is back where its checkpoint was: taking it down, starting, reading it."""


def safe_until(holding: Holding) -> float:
    """Up to when its work survives a stop. What earlier attempts left is where this one began."""
    return max(holding.checkpoint_at or holding.placed_at, holding.placed_at)


def lost_s(holding: Holding, now: float) -> float:
    """Seconds of its run that are done again. Less for whoever saved later, whatever it holds."""
    return max(now - safe_until(holding), 0.0) + RESTART_S


def lost(holding: Holding, now: float) -> float:
    """Device-seconds; CPUs count as parts of a GPU. Nothing for one that leaves anyway."""
    return 0.0 if holding.is_leaving else lost_s(holding, now) * devices(held_by(holding.allocation))
