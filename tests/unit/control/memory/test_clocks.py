"""Leases and backoff: durations are measured, never read off a wall clock that may jump."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from shoal.control.memory.attempt_table import AttemptMemories
from shoal.control.memory.leases import FENCE_MARGIN_S, Leases
from shoal.control.memory.queue import Backoff
from shoal.control.memory.running import RunningAttempts
from shoal.engines.fake import Act, VirtualClock, always
from shoal.model.attempt import Attempt, AttemptState, NodeTask
from shoal.scheduler import Planner, Policy
from shoal.wire import EndKind, TaskOutcome
from tests.support.planes.bench import ControlPlaneLab

HOUR = 3600.0


def attempt(*nodes: str, backoff_s: float = 0.0, queued_at: float = 0.0) -> Attempt:
    return Attempt(
        attempt_id="att",
        job_id="job",
        project="lab",
        epoch=1,
        state=AttemptState.RUNNING,
        queued_at=queued_at,
        backoff_s=backoff_s,
        allocation=tuple(NodeTask(node=node, cpus=1.0, memory_bytes=1) for node in nodes),
    )


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_silence_is_counted_from_the_last_sign_of_life(clock: VirtualClock) -> None:
    leases = Leases(clock, AttemptMemories())
    leases.note_alive("att", "n1")
    clock.advance(30)
    assert leases.silence_s("att", "n1") == 30
    leases.note_alive("att", "n1")
    assert leases.silence_s("att", "n1") == 0


def test_task_without_a_sign_of_life_is_silent_since_it_is_followed(clock: VirtualClock) -> None:
    leases = Leases(clock, AttemptMemories())
    clock.advance(HOUR)
    leases.follow([attempt("n1")])
    clock.advance(5)
    leases.follow([attempt("n1")])
    assert leases.silence_s("att", "n1") == 5
    assert not leases.has_sign_of_life("att", "n1")


def test_asking_for_a_silence_changes_nothing(
    clock: VirtualClock,
) -> None:
    attempts = AttemptMemories()
    leases = Leases(clock, attempts)
    leases.silent_nodes(attempt("n1", "n2"), 0)
    leases.supervisor_silence_s(attempt("n1"), "n1")
    assert list(attempts) == []


def test_older_sign_of_life_does_not_replace_a_later_one(clock: VirtualClock) -> None:
    leases = Leases(clock, AttemptMemories())
    clock.advance(HOUR)
    leases.note_alive("att", "n1", ago_s=9)
    assert leases.silence_s("att", "n1") == 9
    leases.note_alive("att", "n1")
    leases.note_alive("att", "n1", ago_s=9)
    assert leases.silence_s("att", "n1") == 0


def test_hearsay_holds_off_the_fence_and_is_no_sign_of_the_supervisor(clock: VirtualClock) -> None:
    running, gang = RunningAttempts(clock, Planner(Policy())), attempt("n1")
    leases = running.leases
    running.follow([gang])
    leases.note_alive("att", "n1")
    clock.advance(HOUR)
    leases.note_alive("att", "n1", is_hearsay=True)
    assert (leases.silence_s("att", "n1"), leases.supervisor_silence_s(gang, "n1")) == (0, HOUR)
    running.follow([])
    running.follow([gang])
    assert leases.supervisor_silence_s(gang, "n1") == 0, "an attempt that holds nothing is forgotten"


def test_queued_task_has_no_supervisor_until_it_speaks(
    clock: VirtualClock,
) -> None:
    leases, gang = Leases(clock, AttemptMemories()), attempt("n1")
    leases.note_alive("att", "n1", is_hearsay=True)
    leases.note_trouble("att", "n1", "PENDING", is_queued=True)
    assert leases.supervisor_silence_s(gang, "n1") == inf
    leases.note_alive("att", "n1")
    assert (leases.supervisor_silence_s(gang, "n1"), leases.queue_reasons("att")) == (0, ())
    leases.note_trouble("att", "n1", "PENDING", is_queued=True)
    assert leases.supervisor_silence_s(gang, "n1") == 0


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_jump_of_the_wall_clock_moves_no_fence(clock: VirtualClock, by: float) -> None:
    leases = Leases(clock, AttemptMemories())
    gang = attempt("n1")
    leases.note_alive("att", "n1")
    clock.advance(40 + FENCE_MARGIN_S)
    clock.jump(by)
    assert leases.fenced_nodes(gang, 40) == ()
    clock.advance(0.1)
    assert leases.fenced_nodes(gang, 40) == ("n1",)


def test_each_node_has_a_fence_of_its_own(clock: VirtualClock) -> None:
    leases = Leases(clock, AttemptMemories())
    gang = attempt("n1", "n2")
    for node in ("n1", "n2"):
        leases.note_alive("att", node)
    clock.advance(101)
    leases.note_alive("att", "n2")
    assert leases.fenced_nodes(gang, 40) == ("n1",)


def test_a_node_whose_end_is_recorded_is_not_silent(clock: VirtualClock) -> None:
    leases = Leases(clock, AttemptMemories())
    ended = TaskOutcome(attempt_id="att", epoch=1, node="n1", kind=EndKind.SUCCEEDED, ended_at=0.0)
    gang = msgspec.structs.replace(attempt("n1", "n2"), outcomes=(ended,))
    leases.follow([gang])
    clock.advance(HOUR)
    assert leases.silent_nodes(gang, 10) == ("n2",)


def test_leases_of_attempts_that_hold_nothing_are_forgotten(clock: VirtualClock) -> None:
    running = RunningAttempts(clock, Planner(Policy()))
    leases = running.leases
    leases.note_alive("att", "n1")
    leases.ran_for_s("att")
    clock.advance(10)
    running.follow([])
    assert (leases.silence_s("att", "n1"), leases.ran_for_s("att")) == (0, 0)


def test_a_backoff_ends_when_it_is_over_and_not_before(clock: VirtualClock) -> None:
    backoff = Backoff(clock)
    waiting = attempt(backoff_s=10, queued_at=clock.now())
    assert backoff.remaining_s(waiting) == 10
    clock.advance(9)
    assert backoff.remaining_s(waiting) == 1
    clock.advance(2)
    assert backoff.remaining_s(waiting) == 0


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_jump_during_a_backoff_does_not_change_it(clock: VirtualClock, by: float) -> None:
    backoff = Backoff(clock)
    waiting = attempt(backoff_s=10, queued_at=clock.now())
    backoff.remaining_s(waiting)
    clock.jump(by)
    clock.advance(4)
    assert backoff.remaining_s(waiting) == 6


def test_a_clock_set_back_before_we_looked_never_makes_the_wait_longer(clock: VirtualClock) -> None:
    waiting = attempt(backoff_s=10, queued_at=clock.now())
    clock.jump(-HOUR)
    assert Backoff(clock).remaining_s(waiting) == 10


def test_a_restarted_control_plane_counts_what_has_already_passed(clock: VirtualClock) -> None:
    waiting = attempt(backoff_s=10, queued_at=clock.now())
    Backoff(clock).remaining_s(waiting)
    clock.advance(7)
    assert Backoff(clock).remaining_s(waiting) == 3


@pytest.mark.parametrize("by", [HOUR, -HOUR])
def test_a_jump_right_after_a_failure_does_not_change_the_backoff(by: float) -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)))
    lab.running_job(retry={"max": 1, "backoff": "10s"})
    lab.clock.advance(1)
    lab.watch()
    lab.clock.jump(by)  # before the placer has seen the next attempt
    lab.clock.advance(4)
    assert lab.place() == pytest.approx(6)


def test_a_failed_attempt_is_tried_again_when_its_backoff_is_over() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)))
    job = lab.running_job(retry={"max": 2, "backoff": "10s"})
    for backoff_s in (10, 20):
        lab.clock.advance(1)
        lab.watch()
        assert lab.place() == pytest.approx(backoff_s)
        lab.clock.advance(backoff_s - 0.1)
        lab.place()
        assert lab.status(job) == "queued"
        lab.clock.advance(0.2)
        lab.run_loops()
        assert lab.status(job) == "running"
    lab.clock.advance(1)
    lab.watch()
    assert (lab.status(job), len(lab.attempts(job))) == ("failed", 3)
