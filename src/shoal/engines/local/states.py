"""Turns the facts in one task's files into observations. Pure: `watcher` reads the files."""

from __future__ import annotations

import msgspec

from shoal.engines.base import Observation
from shoal.model.evidence import Evidence
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, TaskOutcome


class TaskKey(msgspec.Struct, frozen=True):
    """Identifies a task. Its directory's name alone gives attempt and node; epoch 0: no readable task
    spec.
    """

    attempt_id: str
    node: str
    epoch: int = 0
    replacement: int = 0


def native_id(attempt_id: str) -> str:
    """Return the local engine's id for an attempt: the same after every restart."""
    return f"local:{attempt_id}"


def make_observation(
    key: TaskKey,
    evidence: Evidence,
    raw: str,
    *,
    started_at: float | None = None,
    outcome: TaskOutcome | None = None,
) -> Observation:
    """Return an observation of the task."""
    return Observation(
        attempt_id=key.attempt_id,
        epoch=key.epoch,
        node=key.node,
        native_id=native_id(key.attempt_id),
        evidence=evidence,
        replacement=key.replacement,
        started_at=started_at,
        outcome=outcome,
        raw=str(raw),
    )


def ended_observation(key: TaskKey, outcome: TaskOutcome) -> Observation:
    """Return the observation of an ended task. An outcome of another task is evidence of nothing."""
    is_ours = (outcome.attempt_id, outcome.node) == (key.attempt_id, key.node)
    if not is_ours or key.epoch not in (0, outcome.epoch):
        raw = f"outcome.json is for {outcome.attempt_id} epoch {outcome.epoch} on {outcome.node}"
        return make_observation(key, Evidence.UNKNOWN, raw)
    key = msgspec.structs.replace(key, epoch=outcome.epoch, replacement=outcome.replacement)
    return make_observation(key, Evidence.ENDED, outcome.kind, started_at=outcome.started_at, outcome=outcome)


def make_outcome(
    key: TaskKey, kind: EndKind, ended_at: float, message: str, started_at: float | None = None
) -> TaskOutcome:
    """Return the outcome that the engine writes if no supervisor will."""
    return TaskOutcome(
        attempt_id=key.attempt_id,
        epoch=key.epoch,
        node=key.node,
        kind=kind,
        ended_at=ended_at,
        message=message[:MAX_OUTCOME_MESSAGE],
        started_at=started_at,
        replacement=key.replacement,
    )
