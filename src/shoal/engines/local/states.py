"""What the files of one share mean, as an observation. Pure: reading them is for `shares`."""

from __future__ import annotations

import msgspec

from shoal.engines.base import Observation, Sight
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, NodeOutcome


class ShareKey(msgspec.Struct, frozen=True):
    """Which share: known from its directory's name alone. Epoch 0: its order could not be read."""

    attempt_id: str
    node: str
    epoch: int = 0
    incarnation: int = 0


def native_id(attempt_id: str) -> str:
    """The local engine's own name for an attempt: the same after every restart."""
    return f"local:{attempt_id}"


def seen(
    key: ShareKey,
    sight: Sight,
    raw: str,
    *,
    started_at: float | None = None,
    outcome: NodeOutcome | None = None,
) -> Observation:
    """One look at the share."""
    return Observation(
        attempt_id=key.attempt_id,
        epoch=key.epoch,
        node=key.node,
        native_id=native_id(key.attempt_id),
        sight=sight,
        incarnation=key.incarnation,
        started_at=started_at,
        outcome=outcome,
        raw=str(raw),
    )


def ended(key: ShareKey, outcome: NodeOutcome) -> Observation:
    """The share is over. The outcome must be this share's own, else it is evidence of nothing."""
    is_ours = (outcome.attempt_id, outcome.node) == (key.attempt_id, key.node)
    if not is_ours or key.epoch not in (0, outcome.epoch):
        raw = f"outcome.json is for {outcome.attempt_id} epoch {outcome.epoch} on {outcome.node}"
        return seen(key, Sight.UNKNOWN, raw)
    key = msgspec.structs.replace(key, epoch=outcome.epoch, incarnation=outcome.incarnation)
    return seen(key, Sight.ENDED, outcome.kind, started_at=outcome.started_at, outcome=outcome)


def end_of(
    key: ShareKey, kind: EndKind, ended_at: float, message: str, started_at: float | None = None
) -> NodeOutcome:
    """The outcome the engine writes where no supervisor will."""
    return NodeOutcome(
        attempt_id=key.attempt_id,
        epoch=key.epoch,
        node=key.node,
        kind=kind,
        ended_at=ended_at,
        message=message[:MAX_OUTCOME_MESSAGE],
        started_at=started_at,
        incarnation=key.incarnation,
    )
