"""Invariants of an attempt, whatever happens to it, in whatever order and however often."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.errors import Bug
from shoal.model.attempt import HOLDING, Attempt, AttemptState, EndReason, NodeTask
from shoal.model.evidence import UNSUPERVISED, Evidence
from shoal.model.moves import (
    TABLE,
    AttemptEvent,
    AttemptPlaced,
    Effect,
    FenceExpired,
    OrphanCleared,
    StopRequested,
    SubmissionAccepted,
    SubmissionRefused,
    TaskEnded,
    TaskOrphaned,
    TaskStarted,
    step,
)
from shoal.wire import EndKind, TaskOutcome

NAMES = ("n1", "n2", "n3")
EPOCH = 7
QUEUED = Attempt(attempt_id="att", job_id="job", project="p", epoch=EPOCH, queued_at=1.0)

NODES = st.sampled_from((*NAMES, "elsewhere"))
STOPS = st.sampled_from(
    [EndReason.CANCELLED, EndReason.PREEMPTED, EndReason.TIME_LIMIT, EndReason.DEPENDENCY]
)
ALLOCATIONS = st.integers(1, len(NAMES)).map(
    lambda count: tuple(NodeTask(node=name, cpus=1.0, memory_bytes=1) for name in NAMES[:count])
)
OUTCOMES = st.builds(
    TaskOutcome,
    attempt_id=st.just("att"),
    epoch=st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1]),
    node=NODES,
    kind=st.sampled_from([EndKind.SUCCEEDED, *EndKind]),
    ended_at=st.just(2.0),
    signal=st.none() | st.just(9),
    exit_code=st.none() | st.just(3),
)
BOOLS = st.booleans()
EVENTS: st.SearchStrategy[AttemptEvent] = st.one_of(
    st.builds(AttemptPlaced, ALLOCATIONS),
    st.builds(SubmissionAccepted, st.sampled_from(["native-1", "native-2"])),
    st.builds(SubmissionRefused, st.just("no such image")),
    st.builds(TaskStarted, NODES),
    st.builds(TaskStarted, NODES),
    st.builds(TaskEnded, OUTCOMES),
    st.builds(TaskEnded, OUTCOMES),
    st.builds(
        TaskOrphaned,
        NODES,
        st.just("it does not die"),
        is_to_stop=BOOLS,
        evidence=st.sampled_from(UNSUPERVISED),
    ),
    st.builds(OrphanCleared, NODES, evidence=st.sampled_from([Evidence.ALIVE, Evidence.CLEARED])),
    st.builds(StopRequested, STOPS, st.just("ana")),
    st.builds(FenceExpired),
)

Recorded = list[tuple[Attempt, AttemptEvent, Attempt, tuple[Effect, ...]]]


@st.composite
def lives(draw: st.DrawFn) -> Recorded:
    """Record one attempt: before, event, after and effects, for every event that could happen."""
    attempt = QUEUED
    recorded: Recorded = []
    first: list[AttemptEvent] = [AttemptPlaced(draw(ALLOCATIONS))] if draw(st.integers(0, 9)) else []
    for event in first + draw(st.lists(EVENTS, max_size=14)):
        if TABLE[attempt.state, type(event)] is None:
            continue
        after, effects = step(attempt, event, 10.0 + len(recorded))
        recorded.append((attempt, event, after, effects))
        attempt = after
    return recorded


def test_the_table_has_an_answer_for_every_state_and_event() -> None:
    events = get_args(AttemptEvent)
    assert set(TABLE) == {(state, event) for state in AttemptState for event in events}


@given(lives(), EVENTS)
def test_a_move_missing_from_the_table_is_a_bug_with_the_history(life: Recorded, event: AttemptEvent) -> None:
    attempt = life[-1][2] if life else QUEUED
    assume(TABLE[attempt.state, type(event)] is None)
    with pytest.raises(Bug) as raised:
        step(attempt, event, 99.0)
    assert raised.value.facts["attempt"]["attempt_id"] == "att"


@given(lives())
def test_the_version_grows_by_one_with_every_change_and_only_then(life: Recorded) -> None:
    for before, _, after, effects in life:
        assert after.version == before.version + (after is not before)
        assert (after == before) == (after is before)
        assert after is not before or effects == ()


@given(lives())
def test_identity_of_an_attempt_never_changes(life: Recorded) -> None:
    for _, _, after, _ in life:
        assert (after.attempt_id, after.job_id, after.project) == ("att", "job", "p")
        assert (after.epoch, after.queued_at) == (EPOCH, 1.0)


@given(lives())
def test_the_allocation_is_fixed_once_it_is_placed(life: Recorded) -> None:
    for before, event, after, _ in life:
        if isinstance(event, AttemptPlaced):
            assert after.allocation == event.allocation
        else:
            assert after.allocation == before.allocation


@given(lives())
def test_resources_are_held_from_placement_to_the_end(life: Recorded) -> None:
    for _, _, after, _ in life:
        if after.state is AttemptState.QUEUED:
            assert after.allocation == ()
        if after.state in HOLDING:
            assert after.nodes_left
            assert after.placed_at is not None
        assert (
            (after.state is AttemptState.ENDED) == (after.reason is not None) == (after.ended_at is not None)
        )


@given(lives(), EVENTS)
def test_ended_is_final(life: Recorded, event: AttemptEvent) -> None:
    assume(life and life[-1][2].state is AttemptState.ENDED)
    ended = life[-1][2]
    if TABLE[AttemptState.ENDED, type(event)] is not None:
        assert step(ended, event, 99.0) == (ended, ())


@given(lives())
def test_the_same_event_again_changes_nothing(life: Recorded) -> None:
    for _, event, after, _ in life:
        if TABLE[after.state, type(event)] is not None:
            assert step(after, event, 99.0) == (after, ())


@given(lives())
def test_each_node_ends_at_most_once_and_only_in_its_own_epoch(life: Recorded) -> None:
    for _, _, after, _ in life:
        names = [outcome.node for outcome in after.outcomes]
        assert len(names) == len(set(names))
        assert set(names) <= set(after.node_names)
        assert all(outcome.epoch == EPOCH for outcome in after.outcomes)


@given(lives())
def test_running_means_that_every_node_started(life: Recorded) -> None:
    for before, _, after, _ in life:
        if after.state is AttemptState.RUNNING:
            assert set(after.started_nodes) == set(after.node_names)
            assert after.started_at is not None
        assert set(before.started_nodes) <= set(after.started_nodes) <= set(after.node_names)


@given(lives())
def test_effects_belong_to_the_moves_that_need_them(life: Recorded) -> None:
    for before, event, after, effects in life:
        has_moved = before.state is not after.state
        assert (Effect.SUBMIT in effects) == isinstance(event, AttemptPlaced)
        assert (Effect.CANCEL in effects) == (has_moved and after.state is AttemptState.STOPPING)
        assert (Effect.CLOSE in effects) == (has_moved and after.state is AttemptState.ENDED)


@given(lives())
def test_an_attempt_succeeds_only_if_every_node_succeeded(life: Recorded) -> None:
    for _, _, after, _ in life:
        if after.reason is EndReason.SUCCEEDED:
            assert {outcome.kind for outcome in after.outcomes} == {EndKind.SUCCEEDED}
            assert not after.nodes_left
            assert after.exit_code == 0


@given(lives())
def test_a_gang_is_stopped_when_one_node_of_it_fails(life: Recorded) -> None:
    for _, _, after, _ in life:
        has_failed = any(outcome.kind is not EndKind.SUCCEEDED for outcome in after.outcomes)
        if has_failed:
            assert after.state in {AttemptState.STOPPING, AttemptState.ENDED}
        if after.state is AttemptState.STOPPING:
            assert after.stop_asked_at is not None
            assert has_failed or after.stop_reason is not None


@given(lives())
def test_a_requested_stop_is_the_reason_unless_every_node_succeeded(life: Recorded) -> None:
    for before, event, after, _ in life:
        has_ended = after.state is AttemptState.ENDED and before.state is not AttemptState.ENDED
        if has_ended and isinstance(event, TaskEnded) and before.stop_reason is not None:
            assert after.reason in {before.stop_reason, EndReason.SUCCEEDED}


def test_a_lost_node_explains_the_failure_of_its_peers_in_any_order_of_reports() -> None:
    """A peer of a dead node exits at once and reports it. The loss of the dead node's supervisor is noticed
    later.
    """
    tasks = tuple(NodeTask(node=name, cpus=1.0, memory_bytes=1) for name in NAMES[:2])
    gang, effects = step(QUEUED, AttemptPlaced(tasks), 1.0)
    for node, kind in (("n2", EndKind.EXITED), ("n1", EndKind.LOST)):
        outcome = TaskOutcome(attempt_id="att", epoch=EPOCH, node=node, kind=kind, ended_at=2.0, exit_code=1)
        gang, effects = step(gang, TaskEnded(outcome), 2.0)
    assert (gang.reason, effects) == (EndReason.LOST, (Effect.CLOSE,))


def end_of_gang(*ends: tuple[EndKind, int | None, bool]) -> EndReason | None:
    """Return why a gang ended whose nodes reported these ends in this order: kind, signal, and whether it was
    unrequested.
    """
    tasks = tuple(NodeTask(node=f"n{number}", cpus=1.0, memory_bytes=1) for number in range(len(ends)))
    gang, _ = step(QUEUED, AttemptPlaced(tasks), 1.0)
    for number, (kind, killed_by, is_unasked) in enumerate(ends):
        outcome = TaskOutcome(
            attempt_id="att",
            epoch=EPOCH,
            node=f"n{number}",
            kind=kind,
            ended_at=2.0,
            signal=killed_by,
            is_external_stop=is_unasked,
        )
        gang, _ = step(gang, TaskEnded(outcome), 2.0)
    return gang.reason


UNASKED, ASKED = (EndKind.STOPPED, None, True), (EndKind.STOPPED, None, False)


@pytest.mark.parametrize(
    "failed",
    [(EndKind.SIGNALED, 15, False), (EndKind.SIGNALED, 9, False), (EndKind.EXITED, None, False)],
)
def test_a_signal_to_all_nodes_explains_the_ranks_that_it_ended_first(
    failed: tuple[EndKind, int | None, bool],
) -> None:
    """Whichever was reported first. Shoal may have stopped the others before the signal reached them."""
    assert end_of_gang(UNASKED, UNASKED, failed) is EndReason.LOST
    assert end_of_gang(failed, ASKED, UNASKED) is EndReason.LOST


@pytest.mark.parametrize(
    ("failed", "reason"),
    [
        ((EndKind.OUT_OF_MEMORY, 9, False), EndReason.OOM),
        ((EndKind.TIME_LIMIT, None, False), EndReason.TIME_LIMIT),
        ((EndKind.SETUP_FAILED, None, False), EndReason.SETUP),
    ],
)
def test_a_signal_to_all_nodes_does_not_hide_what_it_cannot_have_caused(
    failed: tuple[EndKind, int | None, bool], reason: EndReason
) -> None:
    assert end_of_gang(UNASKED, failed) is reason


def test_peers_that_shoal_stopped_do_not_explain_the_rank_that_was_killed_first() -> None:
    assert end_of_gang((EndKind.SIGNALED, 15, False), ASKED) is EndReason.SIGNAL
    assert end_of_gang((EndKind.SIGNALED, 9, False), ASKED) is EndReason.SIGNAL


@given(lives())
def test_no_fence_passes_if_no_supervisor_is_left_to_enforce_it(life: Recorded) -> None:
    for before, event, after, _ in life:
        if isinstance(event, FenceExpired) and before.orphans_left:
            assert after is before


@given(lives())
def test_an_orphan_is_held_until_it_is_confirmed_and_changes_no_state_by_itself(life: Recorded) -> None:
    for before, event, after, effects in life:
        if isinstance(event, OrphanCleared) or (isinstance(event, TaskOrphaned) and not event.is_to_stop):
            assert (after.state, effects) == (before.state, ())
        if isinstance(event, TaskOrphaned) and event.is_to_stop and after.state is not before.state:
            assert (after.state, effects) == (AttemptState.STOPPING, (Effect.CANCEL,))
            assert event.node in after.orphans_left
        assert set(after.doubted_nodes) <= set(after.orphaned_nodes)
        if (
            isinstance(event, OrphanCleared)
            and before.state is not AttemptState.ENDED
            and (event.evidence is Evidence.ALIVE or event.node in before.doubted_nodes)
        ):
            assert event.node not in after.orphaned_nodes
        else:
            assert set(before.orphaned_nodes) <= set(after.orphaned_nodes)
