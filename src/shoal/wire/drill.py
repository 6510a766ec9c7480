"""Orders to a supervisor to run a drill, and its report of what it did."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class DrillAct(StrEnum):
    """What a drill makes one supervisor do."""

    KILL_RANK = "kill_rank"
    KILL_RANKS = "kill_ranks"
    """Every rank of the node."""
    KILL_NODE = "kill_node"
    """The ranks and the supervisor itself, as if the machine were lost."""
    HANG_RANK = "hang_rank"
    """The rank is stopped, and continued after `for_s` if it has not been ended by then."""
    CUT_OFF = "cut_off"
    """The supervisor sends nothing to the control plane and receives nothing from it for `for_s`."""
    CORRUPT = "corrupt"
    """The ranks are stopped, so that they save no more, and bytes of the newest checkpoint are altered."""


class DrillCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An order to run a drill. The supervisor may receive it often and runs it once."""

    drill_id: str
    act: DrillAct
    rank: int | None = None
    for_s: float = 0.0
    rendezvous_round: int | None = None
    """The round that the drill is meant for. No other round is harmed. None: unspecified."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor did for a drill. Every later message carries it."""

    drill_id: str
    act: DrillAct
    at: float
    step: int | None = None
    """Complete steps at that moment. None: the program does not report them."""
    step_s: float | None = None
    refusal: str = ""
    """Why the supervisor did not run the drill."""
    detail: str = ""
