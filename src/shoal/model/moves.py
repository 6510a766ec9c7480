"""The attempt's state machine: one literal table and one pure function, the only way to change a state.

`step(attempt, event, now)` returns the attempt after the event and its effects. The caller records both in
one transaction. Effects only make things faster: after a crash the control loops derive the same work from
the recorded state.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from shoal.errors import Bug
from shoal.model.attempt import (
    Allocation,
    Attempt,
    AttemptState,
    EndReason,
    NodeTask,
    TaskReplacement,
    blame_order,
)
from shoal.model.evidence import Evidence
from shoal.wire import EndKind, Recovery, TaskOutcome

QUEUED, STARTING, RUNNING, STOPPING, ENDED = AttemptState

LOSS_KINDS = frozenset({EndKind.LOST, EndKind.FENCED})
"""Ends of a task that explain the ends of its peers."""
EXPLAINED = frozenset({EndKind.EXITED, EndKind.SIGNALED, EndKind.STOPPED})
"""Ends of a task that an external stop signal explains. The signal goes to all nodes, and the peers of the
first tasks it ends fail. An exceeded limit or a failed `setup` is not explained by it.
"""


class AttemptPlaced(msgspec.Struct, frozen=True, tag=True):
    """The scheduler chose nodes."""

    allocation: Allocation


class SubmissionAccepted(msgspec.Struct, frozen=True, tag=True):
    """The engine accepted the attempt, under its own id."""

    native_id: str


class SubmissionRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine will never take the attempt. No process was started."""

    message: str


class TaskStarted(msgspec.Struct, frozen=True, tag=True):
    """The supervisor on `node` started its ranks."""

    node: str
    replacement: int = 0


class TaskEnded(msgspec.Struct, frozen=True, tag=True):
    """There is evidence that one node's task has ended."""

    outcome: TaskOutcome


class RanksRestarted(msgspec.Struct, frozen=True, tag=True):
    """Ranks of this rendezvous round failed on a node, and all ranks restart where they are."""

    rendezvous_round: int
    failure: TaskOutcome
    task: NodeTask | None = None
    """The task that replaces the lost one. None if no task was lost."""
    is_excused: bool = False
    """Shoal waits for another task that is dying. That explains this failure, as a loss would."""


class TaskRecovered(msgspec.Struct, frozen=True, tag=True):
    """A node reports how its part of the newest round began."""

    recovery: Recovery


class TaskOrphaned(msgspec.Struct, frozen=True, tag=True):
    """The supervisor on `node` is dead or may be dead, and the processes it left may still run."""

    node: str
    engine_message: str
    """What the engine saw."""
    replacement: int = 0
    is_to_stop: bool = False
    """No other task could take its place, or not in time: stop the rest, and hold all of it."""
    evidence: Evidence = Evidence.ORPHANED
    """ORPHANED, ORPHANED_PER_CLUSTER or DOUBTFUL."""


class OrphanCleared(msgspec.Struct, frozen=True, tag=True):
    """The doubt that the supervisor on `node` keeps its fence is contradicted: by the supervisor itself, or
    by the cluster that had reported it.
    """

    node: str
    replacement: int = 0
    evidence: Evidence = Evidence.ALIVE
    """ALIVE, or CLEARED: then the cluster withdraws its own report, and reports from other sources stand."""


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """A person, a drain, a limit or the scheduler wants it stopped."""

    reason: EndReason
    by: str
    because: str = ""
    """The whole sentence, if `stopped by ...` is not the reason."""
    grows_to: int | None = None
    """The number of nodes the job continues with, if the attempt stops in order to grow."""


class FenceExpired(msgspec.Struct, frozen=True, tag=True):
    """Silent for longer than its fence, so its supervisors have certainly stopped it."""


AttemptEvent = (
    AttemptPlaced
    | SubmissionAccepted
    | SubmissionRefused
    | TaskStarted
    | TaskEnded
    | RanksRestarted
    | TaskRecovered
    | TaskOrphaned
    | OrphanCleared
    | StopRequested
    | FenceExpired
)


class Effect(StrEnum):
    SUBMIT = "submit"
    CANCEL = "cancel"
    CLOSE = "close"
    """The attempt ended: decide whether the job ends or tries again, and let the engine forget
    the attempt.
    """


Step = tuple[Attempt, tuple[Effect, ...]]
Handler = Callable[[Attempt, AttemptEvent, float], Step]


def step(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    """Return the attempt after `event` and its effects. If the same object comes back, the event was late or
    repeated.

    Raises `Bug` if the table has no move. Nothing was changed then.
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
    assert isinstance(event, AttemptPlaced)
    placed = _change(attempt, state=STARTING, allocation=event.allocation, placed_at=now)
    return placed, (Effect.SUBMIT,)


def _accept(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, SubmissionAccepted)
    if attempt.native_id == event.native_id:
        return attempt, ()
    return _change(attempt, native_id=event.native_id), ()


def _refuse(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, SubmissionRefused)
    return _end(attempt, EndReason.REFUSED, now, message=event.message)


def _start(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, TaskStarted)
    if event.node in attempt.started_nodes or event.node not in attempt.node_names:
        return attempt, ()
    if event.replacement != attempt.replacement_on(event.node):
        return attempt, ()
    nodes = (*attempt.started_nodes, event.node)
    return _run_when_all_started(_change(attempt, started_nodes=nodes), now), ()


def _run_when_all_started(attempt: Attempt, now: float) -> Attempt:
    if attempt.state is not STARTING or len(attempt.started_nodes) < len(attempt.allocation):
        return attempt
    return _change(attempt, state=RUNNING, started_at=now)


def _stop_queued(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, StopRequested)
    message = event.because or f"stopped by {event.by} before it started"
    return _end(attempt, event.reason, now, message=message)


def _stop(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, StopRequested)
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
    assert isinstance(event, TaskEnded)
    outcome = event.outcome
    if outcome.node not in attempt.nodes_left or outcome.epoch != attempt.epoch:
        return attempt, ()
    if outcome.replacement != attempt.replacement_on(outcome.node):
        return attempt, ()
    noted = _change(attempt, outcomes=(*attempt.outcomes, outcome))
    if not noted.nodes_left:
        return _end(noted, *_verdict(noted, now))
    if outcome.kind is EndKind.SUCCEEDED and outcome.node not in noted.started_nodes:
        # The task ended before its start was reported. Without this, the other tasks would be `starting`
        # until they end.
        noted = _change(noted, started_nodes=(*noted.started_nodes, outcome.node))
    if outcome.kind is EndKind.SUCCEEDED or attempt.state is STOPPING:
        return _run_when_all_started(noted, now), ()
    # A gang lives and dies together, so the first failure stops the other tasks.
    return _change(noted, state=STOPPING, stop_asked_at=now), (Effect.CANCEL,)


def _regroup(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    """Begin the next rendezvous round, once per round, and keep the likeliest cause of the failure.

    The peers of a failed rank fail too, and all of their nodes report it. A later report may still come from
    the node whose rank was the cause, so it can replace the cause. If a task was lost, that explains the
    other failures and stands.
    """
    assert isinstance(event, RanksRestarted)
    if event.rendezvous_round == attempt.rendezvous_round:
        num_excused = attempt.num_excused + event.is_excused
        after = _change(
            attempt,
            rendezvous_round=attempt.rendezvous_round + 1,
            failure=event.failure,
            num_excused=num_excused,
        )
        return (after, ()) if event.task is None else _replace(after, event.failure, event.task, now)
    failure = attempt.failure if event.rendezvous_round == attempt.rendezvous_round - 1 else None
    if failure is None or event.task is not None or failure.kind in LOSS_KINDS:
        return attempt, ()
    if blame_order(failure) <= blame_order(event.failure):
        return attempt, ()
    return _change(attempt, failure=event.failure), ()


def _replace(attempt: Attempt, lost: TaskOutcome, task: NodeTask, now: float) -> Step:
    """Put the new task in the lost task's place among the ranks. The new task still has to start."""
    if lost.node not in attempt.nodes_left or lost.replacement != attempt.replacement_on(lost.node):
        raise Bug(
            f"attempt {attempt.attempt_id}: the lost task of {lost.node} is not its present one",
            attempt=msgspec.to_builtins(attempt),
            lost=msgspec.to_builtins(lost),
        )
    done = TaskReplacement(rendezvous_round=attempt.rendezvous_round, at=now, lost=lost, node=task.node)
    after = _change(
        attempt,
        allocation=tuple(task if old.node == lost.node else old for old in attempt.allocation),
        started_nodes=_without_node(attempt.started_nodes, lost.node),
        replacements=(*attempt.replacements, done),
    )
    # The lost task is over. Doubts about it do not apply to its successor, which may be on the same node.
    return _cleared(after, lost.node), (Effect.SUBMIT,)


def _recover(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, TaskRecovered)
    recovery = event.recovery
    recoveries = [
        recorded for recorded in attempt.recoveries if recorded.rendezvous_round == attempt.rendezvous_round
    ]
    if recovery.rendezvous_round != attempt.rendezvous_round or any(
        recorded.node == recovery.node for recorded in recoveries
    ):
        return attempt, ()
    return _change(attempt, recoveries=(*recoveries, recovery)), ()


def _orphan(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    """Note that no supervisor is known for a part of the attempt, so no fence holds there.

    The caller knows whether another task could take its place, and decides about the rest by `is_to_stop`. A
    report about a task that has been replaced changes nothing.
    """
    assert isinstance(event, TaskOrphaned)
    if event.node not in attempt.nodes_left or event.replacement != attempt.replacement_on(event.node):
        return attempt, ()
    if event.node not in attempt.orphaned_nodes:
        is_hearsay = event.evidence.rule.is_hearsay
        doubted = (*attempt.doubted_nodes, event.node) if is_hearsay else attempt.doubted_nodes
        orphaned = (*attempt.orphaned_nodes, event.node)
        attempt = _change(attempt, orphaned_nodes=orphaned, doubted_nodes=doubted)
    elif event.node in attempt.doubted_nodes and not event.evidence.rule.is_hearsay:
        attempt = _change(attempt, doubted_nodes=_without_node(attempt.doubted_nodes, event.node))
    if not event.is_to_stop or attempt.state is STOPPING:
        return attempt, ()
    message = f"{event.node}: {event.engine_message}"
    return _stop(attempt, StopRequested(EndReason.LOST, by="the control plane", because=message), now)


def _clear(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    assert isinstance(event, OrphanCleared)
    nodes = attempt.doubts_withdrawn_by(event.evidence)
    if event.node not in nodes or event.replacement != attempt.replacement_on(event.node):
        return attempt, ()
    return _cleared(attempt, event.node), ()


def _cleared(attempt: Attempt, node: str) -> Attempt:
    orphaned, doubted = (
        _without_node(attempt.orphaned_nodes, node),
        _without_node(attempt.doubted_nodes, node),
    )
    return _change(attempt, orphaned_nodes=orphaned, doubted_nodes=doubted)


def _without_node(nodes: tuple[str, ...], node: str) -> tuple[str, ...]:
    return tuple(name for name in nodes if name != node)


def _fence(attempt: Attempt, event: AttemptEvent, now: float) -> Step:
    if attempt.orphans_left:
        return attempt, ()  # a supervisor keeps the fence, and there is none
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
"""STOPPED without a stop of ours means that another party sent the supervisor a signal: the
cluster's loss.
"""


def _verdict(attempt: Attempt, now: float) -> tuple[EndReason, float, int | None, str]:
    """Why the attempt ended, once every node has: our own stop, else a loss, else the first failure.

    The peers of a lost node fail at once and report it before the loss is noticed, so a loss explains every
    other failure, in any order of reports. An external stop signal counts as a loss, except for failures
    that it cannot have caused.
    """
    failed = [o for o in attempt.outcomes if o.kind is not EndKind.SUCCEEDED]
    if not failed:
        return EndReason.SUCCEEDED, now, 0, ""
    lost = [o for o in failed if o.kind in LOSS_KINDS]
    first = min(lost or _unexplained(failed), key=blame_order)
    if attempt.stop_reason is not None:
        return attempt.stop_reason, now, _exit_code(first), attempt.message
    message = f"{first.node}: {first.message}" if first.message else f"{first.node}: {first.kind}"
    return REASON_OF_KIND[first.kind], now, _exit_code(first), message


def _unexplained(failed: list[TaskOutcome]) -> list[TaskOutcome]:
    if not any(outcome.is_external_stop for outcome in failed):
        return failed
    return [outcome for outcome in failed if outcome.is_external_stop or outcome.kind not in EXPLAINED]


def _exit_code(outcome: TaskOutcome) -> int | None:
    """The exit code as a shell reports it."""
    return 128 + outcome.signal if outcome.signal is not None else outcome.exit_code


def _end(
    attempt: Attempt, reason: EndReason, now: float, exit_code: int | None = None, message: str = ""
) -> Step:
    ended = _change(attempt, state=ENDED, reason=reason, ended_at=now, exit_code=exit_code, message=message)
    return ended, (Effect.CLOSE,)


TABLE: dict[tuple[AttemptState, type], Handler | None] = {
    (QUEUED, AttemptPlaced): _place,
    (QUEUED, SubmissionAccepted): None,
    (QUEUED, SubmissionRefused): None,
    (QUEUED, TaskStarted): None,
    (QUEUED, TaskEnded): None,
    (QUEUED, RanksRestarted): None,
    (QUEUED, TaskRecovered): None,
    (QUEUED, TaskOrphaned): None,
    (QUEUED, OrphanCleared): None,
    (QUEUED, StopRequested): _stop_queued,
    (QUEUED, FenceExpired): None,
    (STARTING, AttemptPlaced): None,
    (STARTING, SubmissionAccepted): _accept,
    (STARTING, SubmissionRefused): _refuse,
    (STARTING, TaskStarted): _start,
    (STARTING, TaskEnded): _node_ended,
    (STARTING, RanksRestarted): _ignore,
    (STARTING, TaskRecovered): _ignore,
    (STARTING, TaskOrphaned): _orphan,
    (STARTING, OrphanCleared): _clear,
    (STARTING, StopRequested): _stop,
    (STARTING, FenceExpired): _fence,
    (RUNNING, AttemptPlaced): None,
    (RUNNING, SubmissionAccepted): _accept,
    (RUNNING, SubmissionRefused): None,
    (RUNNING, TaskStarted): _start,
    (RUNNING, TaskEnded): _node_ended,
    (RUNNING, RanksRestarted): _regroup,
    (RUNNING, TaskRecovered): _recover,
    (RUNNING, TaskOrphaned): _orphan,
    (RUNNING, OrphanCleared): _clear,
    (RUNNING, StopRequested): _stop,
    (RUNNING, FenceExpired): _fence,
    (STOPPING, AttemptPlaced): None,
    (STOPPING, SubmissionAccepted): _accept,
    (STOPPING, SubmissionRefused): _refuse,
    (STOPPING, TaskStarted): _ignore,
    (STOPPING, TaskEnded): _node_ended,
    (STOPPING, RanksRestarted): _ignore,
    (STOPPING, TaskRecovered): _ignore,
    (STOPPING, TaskOrphaned): _orphan,
    (STOPPING, OrphanCleared): _clear,
    (STOPPING, StopRequested): _ignore,
    (STOPPING, FenceExpired): _fence,
    (ENDED, AttemptPlaced): None,
    (ENDED, SubmissionAccepted): _ignore,
    (ENDED, SubmissionRefused): _ignore,
    (ENDED, TaskStarted): _ignore,
    (ENDED, TaskEnded): _ignore,
    (ENDED, RanksRestarted): _ignore,
    (ENDED, TaskRecovered): _ignore,
    (ENDED, TaskOrphaned): _ignore,
    (ENDED, OrphanCleared): _ignore,
    (ENDED, StopRequested): _ignore,
    (ENDED, FenceExpired): _ignore,
}
"""Every state against every event. None: cannot happen, and raising `Bug` is better than guessing."""
