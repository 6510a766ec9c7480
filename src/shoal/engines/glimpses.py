"""What a cluster says of the shares that were started on it, in its own words, and what those are worth."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Stage(StrEnum):
    """Where the cluster says that a share is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The cluster has no trace of it."""
    AWAY = "away"
    """The cluster could not be asked."""


class Glimpse(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster says of one share, in its own words."""

    stage: Stage = Stage.UNKNOWN
    raw: str = ""
    is_over: bool = False
    """It is certain that nothing of it runs: who answers has looked, or the machine was restarted."""
    is_left: bool = False
    """Who has looked saw that something of it does not die, and that nobody keeps it any more."""
    is_doubtful: bool = False
    """Something does not die on its node that may be of it, or of somebody else's work."""
    is_clear: bool = False
    """Who would say that something does not die there does not. That withdraws a doubt, and ends nothing."""
    stranded: str = ""
    """Why what it waits for does not come, and elsewhere might, in words; empty: it may."""


THERE = (Stage.QUEUED, Stage.RUNNING, Stage.SUSPENDED)
"""The cluster still has what was started."""
NO_TRACE = Glimpse(raw="the cluster has no trace of it")
Glimpses = dict[tuple[str, str], Glimpse]
"""By attempt and node."""
