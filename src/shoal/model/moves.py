"""The attempt's state machine: one literal table, one pure function, no other way to change a state.

`step(attempt, event, now)` returns the attempt after the event and what must be done about it. The
caller records both in one transaction; effects are hints for speed, since the control loops derive
the same work from the recorded state after a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from shoal.errors import Bug
from shoal.model.attempt import Allocation, Attempt, AttemptState, EndReason, NodeShare, Replacement
from shoal.model.blame import order_of_blame
from shoal.wire import EndKind, NodeOutcome, Recovery

QUEUED, STARTING, RUNNING, STOPPING, ENDED = AttemptState

LOSS_KINDS = frozenset({EndKind.LOST, EndKind.FENCED})
"""Ends of a share that explain those of its peers."""
EXPLAINED = frozenset({EndKind.EXITED, EndKind.SIGNALED, EndKind.STOPPED})
"""Ends of a share that are explained by one that somebody else's signal stopped: it goes to all nodes, and
peers of those whom it ended first fail. Limits that were passed, and a `setup` that failed, say more."""


class Placed(msgspec.Struct, frozen=True, tag=True):
    """The scheduler chose nodes."""

    allocation: Allocation


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The engine took it, under its own id."""

    native_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine will never take it; nothing was started."""

    message: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The supervisor on `node` started its ranks."""

    node: str
    incarnation: int = 0


class NodeEnded(msgspec.Struct, frozen=True, tag=True):
    """There is evidence that one node's share is over."""

    outcome: NodeOutcome


class Regrouped(msgspec.Struct, frozen=True, tag=True):
    """Ranks of this generation failed on a node, and all are started anew where they are."""

    generation: int
    failure: NodeOutcome
    share: NodeShare | None = None
    """What was lost with the ranks, where it was their share: the one that is begun in its place."""
    is_excused: bool = False
    """Another share dies, and is waited for: that explains it, as its loss would."""


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """A node tells how its part of the newest group began."""

    recovery: Recovery


class Orphaned(msgspec.Struct, frozen=True, tag=True):
    """The supervisor on `node` is dead, or may be, and what it left is not known to be."""

    node: str
    told: str
    """What the engine saw."""
    incarnation: int = 0
    is_to_stop: bool = False
    """No other share could take its place, or not in time: the rest is stopped, and all of it held."""
    is_hearsay: bool = False
    """The cluster says so, which may withdraw it; else only who is there can."""


class OrphanCleared(msgspec.Struct, frozen=True, tag=True):
    """Whoever doubted that the supervisor on `node` keeps its fence is contradicted: by its own voice, or by
    the cluster that had said so.
    """

    node: str
    incarnation: int = 0
    is_hearsay: bool = False
    """The cluster withdraws what it said. What anybody else has said stands."""


class StopAsked(msgspec.Struct, frozen=True, tag=True):
    """A person, a drain, a limit or the scheduler wants it stopped."""

    reason: EndReason
    by: str
    because: str = ""
    """The whole sentence, where `stopped by ...` would not be the reason."""
    grows_to: int | None = None
    """With how many nodes it goes on, where that is what it stops for."""


class FencePassed(msgspec.Struct, frozen=True, tag=True):
    """Silent for so long that its supervisors have certainly stopped it."""


AttemptEvent = (
    Placed
    | Accepted
    | Refused
    | Started
    | NodeEnded
    | Regrouped
    | Recovered
    | Orphaned
    | OrphanCleared
    | StopAsked
    | FencePassed
)


class Effect(StrEnum):
    SUBMIT = "submit"
    CANCEL = "cancel"
    CLOSE = "close"
    """It ended: decide whether the job ends or tries again, and let the engine forget it."""


Step = tuple[Attempt, tuple[Effect, ...]]
Handler = Callable[[Attempt, AttemptEvent, float], Step]


def step(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    """The attempt after `event`. The same object back means the event was late or repeated.

    Raises `Bug` where the table has no move: nothing was changed.
    """
    handler = TABLE[attempt.state, type(event)]
    if handler is None:
        raise Bug(
            f"attempt {attempt.attempt_id} is {attempt.state}; {type(event).__name__} cannot happen",
            attempt=msgspec.to_builtins(attempt),
            event=msgspec.to_builtins(event),
        )
    after, effects = handler(attempt, event, now)
    if after is not attempt:
        after = msgspec.structs.replace(after, version=attempt.version + 1)
    return after, effects


def _change(attempt: Attempt, **changes: object) -> Attempt:
    return msgspec.structs.replace(attempt, **changes)


def _ignore(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    return attempt, ()


def _place(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, Placed)
    placed = _change(attempt, state=STARTING, allocation=event.allocation, placed_at=now)
    return placed, (Effect.SUBMIT,)


def _accept(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, Accepted)
    if attempt.native_id == event.native_id:
        return attempt, ()
    return _change(attempt, native_id=event.native_id), ()


def _refuse(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, Refused)
    return _end(attempt, EndReason.REFUSED, now, message=event.message)


def _start(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, Started)
    if event.node in attempt.started_nodes or event.node not in attempt.node_names:
        return attempt, ()
    if event.incarnation != attempt.incarnation(event.node):
        return attempt, ()
    nodes = (*attempt.started_nodes, event.node)
    return _run_when_all_started(_change(attempt, started_nodes=nodes), now), ()


def _run_when_all_started(attempt: Attempt, now: float) -> Attempt:
    if attempt.state is not STARTING or len(attempt.started_nodes) < len(attempt.allocation):
        return attempt
    return _change(attempt, state=RUNNING, started_at=now)


def _stop_queued(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, StopAsked)
    told = event.because or f"stopped by {event.by} before it started"
    return _end(attempt, event.reason, now, message=told)


def _stop(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, StopAsked)
    stopping = _change(
        attempt,
        state=STOPPING,
        stop_reason=event.reason,
        stop_asked_at=now,
        message=event.because or f"stopped by {event.by}",
        grows_to=event.grows_to,
    )
    return stopping, (Effect.CANCEL,)


def _node_ended(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, NodeEnded)
    outcome = event.outcome
    if outcome.node not in attempt.nodes_left or outcome.epoch != attempt.epoch:
        return attempt, ()
    if outcome.incarnation != attempt.incarnation(outcome.node):
        return attempt, ()
    noted = _change(attempt, outcomes=(*attempt.outcomes, outcome))
    if not noted.nodes_left:
        return _end(noted, *_verdict(noted, now))
    if outcome.kind is EndKind.SUCCEEDED and outcome.node not in noted.started_nodes:
        # Over before anybody saw it start. Without this the others would be `starting` to their end.
        noted = _change(noted, started_nodes=(*noted.started_nodes, outcome.node))
    if outcome.kind is EndKind.SUCCEEDED or attempt.state is STOPPING:
        return _run_when_all_started(noted, now), ()
    # A gang lives and dies together: the first failure stops the others.
    return _change(noted, state=STOPPING, stop_asked_at=now), (Effect.CANCEL,)


def _regroup(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    """Once for each generation: the peers of a rank that failed fail too, and all of them say so. Who says so
    later may still be the one whose rank was the cause, unless a share was lost: that explains the others.
    """
    assert isinstance(event, Regrouped)
    if event.generation == attempt.generation:
        excused = attempt.excused + event.is_excused
        after = _change(attempt, generation=attempt.generation + 1, failure=event.failure, excused=excused)
        return (after, ()) if event.share is None else _replace(after, event.failure, event.share, now)
    known = attempt.failure if event.generation == attempt.generation - 1 else None
    if known is None or event.share is not None or known.kind in LOSS_KINDS:
        return attempt, ()
    if order_of_blame(known) <= order_of_blame(event.failure):
        return attempt, ()
    return _change(attempt, failure=event.failure), ()


def _replace(attempt: Attempt, lost: NodeOutcome, share: NodeShare, now: float) -> Step:
    """The new share has the lost one's place among the ranks, and is yet to be started."""
    if lost.node not in attempt.nodes_left or lost.incarnation != attempt.incarnation(lost.node):
        raise Bug(
            f"attempt {attempt.attempt_id}: the share of {lost.node} that was lost is not its present one",
            attempt=msgspec.to_builtins(attempt),
            lost=msgspec.to_builtins(lost),
        )
    done = Replacement(generation=attempt.generation, at=now, lost=lost, node=share.node)
    after = _change(
        attempt,
        allocation=tuple(share if old.node == lost.node else old for old in attempt.allocation),
        started_nodes=_without(attempt.started_nodes, lost.node),
        replacements=(*attempt.replacements, done),
    )
    # It is over: what was said of it is not about the next one, which may be on the same node.
    return _cleared(after, lost.node), (Effect.SUBMIT,)


def _recover(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, Recovered)
    told = event.recovery
    known = [one for one in attempt.recoveries if one.generation == attempt.generation]
    if told.generation != attempt.generation or any(one.node == told.node for one in known):
        return attempt, ()
    return _change(attempt, recoveries=(*known, told)), ()


def _orphan(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    """Nobody is known to supervise a part of it: no fence passes there. What becomes of the rest is for
    whoever knows whether another share could take its place. Said of a share that another has replaced by
    now, nothing does.
    """
    assert isinstance(event, Orphaned)
    if event.node not in attempt.nodes_left or event.incarnation != attempt.incarnation(event.node):
        return attempt, ()
    if event.node not in attempt.orphaned_nodes:
        doubted = (*attempt.doubted_nodes, event.node) if event.is_hearsay else attempt.doubted_nodes
        orphaned = (*attempt.orphaned_nodes, event.node)
        attempt = _change(attempt, orphaned_nodes=orphaned, doubted_nodes=doubted)
    elif event.node in attempt.doubted_nodes and not event.is_hearsay:
        attempt = _change(attempt, doubted_nodes=_without(attempt.doubted_nodes, event.node))
    if not event.is_to_stop or attempt.state is STOPPING:
        return attempt, ()
    told = f"{event.node}: {event.told}"
    return _stop(attempt, StopAsked(EndReason.LOST, by="the control plane", because=told), now)


def _clear(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, OrphanCleared)
    known = attempt.doubted_nodes if event.is_hearsay else attempt.orphaned_nodes
    if event.node not in known or event.incarnation != attempt.incarnation(event.node):
        return attempt, ()
    return _cleared(attempt, event.node), ()


def _cleared(attempt: Attempt, node: str) -> Attempt:
    orphaned, doubted = _without(attempt.orphaned_nodes, node), _without(attempt.doubted_nodes, node)
    return _change(attempt, orphaned_nodes=orphaned, doubted_nodes=doubted)


def _without(nodes: tuple[str, ...], node: str) -> tuple[str, ...]:
    return tuple(name for name in nodes if name != node)


def _fence(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    if attempt.orphans_left:
        return attempt, ()  # a fence is kept by a supervisor, and there is none
    silent = ", ".join(attempt.nodes_left)
    return _end(attempt, EndReason.FENCED, now, message=f"no sign of life from {silent}")


REASON_OF_KIND = {
    EndKind.SUCCEEDED: EndReason.SUCCEEDED,
    EndKind.EXITED: EndReason.EXIT,
    EndKind.SIGNALED: EndReason.SIGNAL,
    EndKind.OUT_OF_MEMORY: EndReason.OOM,
    EndKind.SPLIT_WORLD: EndReason.WORLD,
    EndKind.SETUP_FAILED: EndReason.SETUP,
    EndKind.TIME_LIMIT: EndReason.TIME_LIMIT,
    EndKind.STOPPED: EndReason.LOST,
    EndKind.FENCED: EndReason.FENCED,
    EndKind.LOST: EndReason.LOST,
}
"""STOPPED without a stop of ours is somebody else's signal to the supervisor: the cluster's loss."""


def _verdict(attempt: Attempt, now: float) -> tuple[EndReason, float, int | None, str]:
    """Why it ended, once every node has: our own stop, else what was lost, else the first failure.

    The peers of a lost node fail at once and say so sooner than anybody notices the loss, so a loss
    explains every other failure, whichever was heard of first. A signal to stop that was not ours is one,
    but for failures which it cannot have been the cause of.
    """
    failed = [o for o in attempt.outcomes if o.kind is not EndKind.SUCCEEDED]
    if not failed:
        return EndReason.SUCCEEDED, now, 0, ""
    lost = [o for o in failed if o.kind in LOSS_KINDS]
    first = min(lost or _unexplained(failed), key=order_of_blame)
    if attempt.stop_reason is not None:
        return attempt.stop_reason, now, _exit_code(first), attempt.message
    told = f"{first.node}: {first.message}" if first.message else f"{first.node}: {first.kind}"
    return REASON_OF_KIND[first.kind], now, _exit_code(first), told


def _unexplained(failed: list[NodeOutcome]) -> list[NodeOutcome]:
    if not any(one.is_unasked for one in failed):
        return failed
    return [one for one in failed if one.is_unasked or one.kind not in EXPLAINED]


def _exit_code(outcome: NodeOutcome) -> int | None:
    """As a shell would say it."""
    return 128 + outcome.signal if outcome.signal is not None else outcome.exit_code


def _end(
    attempt: Attempt, reason: EndReason, now: float, exit_code: int | None = None, message: str = ""
) -> Step:
    ended = _change(attempt, state=ENDED, reason=reason, ended_at=now, exit_code=exit_code, message=message)
    return ended, (Effect.CLOSE,)


TABLE: dict[tuple[AttemptState, type], Handler | None] = {
    (QUEUED, Placed): _place,
    (QUEUED, Accepted): None,
    (QUEUED, Refused): None,
    (QUEUED, Started): None,
    (QUEUED, NodeEnded): None,
    (QUEUED, Regrouped): None,
    (QUEUED, Recovered): None,
    (QUEUED, Orphaned): None,
    (QUEUED, OrphanCleared): None,
    (QUEUED, StopAsked): _stop_queued,
    (QUEUED, FencePassed): None,
    (STARTING, Placed): None,
    (STARTING, Accepted): _accept,
    (STARTING, Refused): _refuse,
    (STARTING, Started): _start,
    (STARTING, NodeEnded): _node_ended,
    (STARTING, Regrouped): _ignore,
    (STARTING, Recovered): _ignore,
    (STARTING, Orphaned): _orphan,
    (STARTING, OrphanCleared): _clear,
    (STARTING, StopAsked): _stop,
    (STARTING, FencePassed): _fence,
    (RUNNING, Placed): None,
    (RUNNING, Accepted): _accept,
    (RUNNING, Refused): None,
    (RUNNING, Started): _start,
    (RUNNING, NodeEnded): _node_ended,
    (RUNNING, Regrouped): _regroup,
    (RUNNING, Recovered): _recover,
    (RUNNING, Orphaned): _orphan,
    (RUNNING, OrphanCleared): _clear,
    (RUNNING, StopAsked): _stop,
    (RUNNING, FencePassed): _fence,
    (STOPPING, Placed): None,
    (STOPPING, Accepted): _accept,
    (STOPPING, Refused): _refuse,
    (STOPPING, Started): _ignore,
    (STOPPING, NodeEnded): _node_ended,
    (STOPPING, Regrouped): _ignore,
    (STOPPING, Recovered): _ignore,
    (STOPPING, Orphaned): _orphan,
    (STOPPING, OrphanCleared): _clear,
    (STOPPING, StopAsked): _ignore,
    (STOPPING, FencePassed): _fence,
    (ENDED, Placed): None,
    (ENDED, Accepted): _ignore,
    (ENDED, Refused): _ignore,
    (ENDED, Started): _ignore,
    (ENDED, NodeEnded): _ignore,
    (ENDED, Regrouped): _ignore,
    (ENDED, Recovered): _ignore,
    (ENDED, Orphaned): _ignore,
    (ENDED, OrphanCleared): _ignore,
    (ENDED, StopAsked): _ignore,
    (ENDED, FencePassed): _ignore,
}
"""Every state against every event. None: cannot happen, and saying so is better than guessing."""
