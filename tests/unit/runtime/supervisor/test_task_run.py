"""The order of steps in a task's run, and the signals that explain an ending."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from shoal.runtime.files import checkpoint_storage
from shoal.runtime.rank.board import StopRequest
from shoal.runtime.replica import listeners
from shoal.runtime.supervisor.endings import SUCCEEDED, Ending, Hang
from shoal.runtime.supervisor.task_run import TOGETHER_S, TaskRun
from shoal.wire import EndKind
from tests.support.runtime.tasks import a_task_spec


class FakeRun:
    """A run whose parts only record the calls they receive."""

    def __init__(self) -> None:
        self.parts = MagicMock()
        run: Any = TaskRun.__new__(TaskRun)
        self.run = run
        for name in (
            "standby_monitor",
            "confinement",
            "rank_group",
            "restarts",
            "watcher",
            "meter",
            "log",
            "stop_reasons",
        ):
            setattr(run, f"_{name}", getattr(self.parts, name))
        run._running, run._renewer = [], None
        run._server = SimpleNamespace(
            failure=None, should_end=False, check_sidecar=lambda: None, release=lambda: None
        )
        run._task_spec = a_task_spec()
        run._grace_s = 30.0
        run._task = SimpleNamespace(
            home="/nowhere", scratch="/nowhere/scratch", stand_ins="/nowhere/stand-ins"
        )
        run._clock = SimpleNamespace(monotonic=lambda: 0.0)
        run._ranks_ended_at = 0.0

    def calls(self) -> list[str]:
        return [name for name, _, _ in self.parts.mock_calls if "()" not in name]


def test_standby_yields_its_memory_before_ranks_are_asked_to_save() -> None:
    fake = FakeRun()
    fake.run._stop(Ending(kind=EndKind.STOPPED, message="preempted", grace_s=30.0))
    assert fake.calls()[:2] == ["standby_monitor.yield_memory", "rank_group.set_stop_request"]


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        (EndKind.STOPPED, StopRequest.SAVE),
        (EndKind.TIME_LIMIT, StopRequest.SAVE),
        (EndKind.EXITED, StopRequest.EXIT),
        (EndKind.FENCED, StopRequest.EXIT),
    ],
)
def test_stop_request_says_whether_ranks_can_save_together(kind: EndKind, request_: StopRequest) -> None:
    fake = FakeRun()
    fake.run._stop(Ending(kind=kind, grace_s=30.0))
    fake.parts.rank_group.set_stop_request.assert_called_once_with(request_)


def test_standby_yields_its_memory_before_ranks_wait_for_another_group() -> None:
    fake = FakeRun()
    fake.run._wait_for_next_group(Ending(kind=EndKind.EXITED, message="rank 0 exited"), None)
    assert fake.calls()[:2] == ["standby_monitor.yield_memory", "restarts.begin"]


def test_ranks_are_killed_before_the_standby_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_storage, "remove_memory_folder", lambda *_: None)
    monkeypatch.setattr(listeners, "remove_socket_folder", lambda *_: None)
    fake = FakeRun()
    fake.run._reap()
    assert fake.calls()[:2] == ["confinement.kill", "standby_monitor.stop"]


def test_task_with_an_unkillable_rank_ends() -> None:
    """It stops, where people see it, and says why."""
    fake = FakeRun()
    fake.run._running = [SimpleNamespace(status=None)]
    fake.run._drill_runner = MagicMock()
    fake.parts.watcher.first_failed = fake.parts.stop_reasons.current.return_value = None
    fake.parts.restarts.is_wanted = False
    hung = Hang(description="no step for 9 s", rank=3, frame="read (data.py:7)")
    fake.parts.rank_group.hang_detector.hang = fake.parts.rank_group.unkillable_hang = hung
    end = fake.run._wait_for_ending(MagicMock(), "a rank", fake.parts.rank_group)
    assert (end.kind, end.rank, end.is_hang, end.grace_s) == (EndKind.SIGNALED, 3, True, 30.0)
    message = (
        "rank 3 hung and was killed: no step for 9 s; it stood in read (data.py:7); its process does not die"
    )
    assert end.message == message


STOPPED = Ending(kind=EndKind.STOPPED, message="stopped by SIGTERM", is_external_stop=True)


def explain(end: Ending, signalled_at: float | None) -> tuple[Ending | None, float]:
    """Return the stop that explains the ending if SIGTERM comes at `signalled_at`, and the length of
    the wait.
    """
    fake, now = FakeRun(), [0.0]
    fake.run._clock = SimpleNamespace(monotonic=lambda: now[0])

    def stop_reason() -> Ending | None:
        return STOPPED if signalled_at is not None and now[0] >= signalled_at else None

    def poll(timeout_s: float) -> None:
        until = now[0] + timeout_s
        now[0] = until if signalled_at is None or signalled_at <= now[0] else min(until, signalled_at)

    fake.parts.stop_reasons.current, fake.parts.stop_reasons.signalled, fake.parts.watcher.poll = (
        stop_reason,
        stop_reason,
        poll,
    )
    return fake.run._stop_reason_behind(end), now[0]


def ended_by(number: signal.Signals | None = None, code: int | None = None) -> Ending:
    kind = EndKind.EXITED if number is None else EndKind.SIGNALED
    return Ending(kind=kind, message="rank 0", signal=number, exit_code=code, rank=0)


@pytest.mark.parametrize("end", [ended_by(signal.SIGTERM), ended_by(code=143)])
def test_rank_that_died_of_sigterm_is_blamed_only_if_the_supervisor_got_none(end: Ending) -> None:
    assert explain(end, 0.0) == (STOPPED, 0.0)
    assert explain(end, 0.3) == (STOPPED, 0.3)
    assert explain(end, None) == (None, TOGETHER_S)


@pytest.mark.parametrize("end", [ended_by(signal.SIGKILL), ended_by(signal.SIGSEGV), ended_by(code=1)])
def test_restart_after_any_other_death_is_not_delayed(end: Ending) -> None:
    assert explain(end, 0.0) == (STOPPED, 0.0), "it may have ended because it was told to"
    assert explain(end, 0.3) == (None, 0.0)


@pytest.mark.parametrize(
    ("end", "signalled_at", "behind"),
    [
        (Ending(kind=EndKind.OUT_OF_MEMORY, exit_code=143, rank=0), 0.0, None),
        (Ending(kind=EndKind.OUT_OF_MEMORY, signal=signal.SIGKILL, rank=0), 0.0, None),
        (Ending(kind=EndKind.SETUP_FAILED, exit_code=1), 0.0, None),
        (Ending(kind=EndKind.SETUP_FAILED, signal=signal.SIGTERM), 0.3, STOPPED),
    ],
)
def test_signal_does_not_explain_out_of_memory_or_a_failed_setup(
    end: Ending, signalled_at: float, behind: Ending | None
) -> None:
    assert explain(end, signalled_at)[0] == behind


def reconsidered(end: Ending, signalled_at: float | None, reaped_at: float = 10.0) -> tuple[Ending, float]:
    """Return the reported ending of ranks that ended at 10, and when, if SIGTERM came at `signalled_at`."""
    fake, now, outcomes = FakeRun(), [10.0], list[Ending]()

    def live() -> Ending:
        fake.run._ranks_ended_at = now[0]
        return end

    def signalled(least_s: float) -> Ending | None:
        return STOPPED if signalled_at is not None and now[0] - signalled_at >= max(least_s, 0.0) else None

    def poll(timeout_s: float) -> None:
        until = now[0] + timeout_s
        now[0] = until if signalled_at is None or signalled_at <= now[0] else min(until, signalled_at)

    fake.run._clock = SimpleNamespace(monotonic=lambda: now[0])
    fake.parts.stop_reasons.signalled, fake.parts.watcher.poll = signalled, poll
    fake.run._install_signal_handlers, fake.run._run_to_ending = lambda: None, live
    fake.run._reap = lambda: now.__setitem__(0, reaped_at)
    fake.run._outcome, fake.run._report = lambda end: end, outcomes.append
    fake.run.run()
    return outcomes[0], now[0]


def test_success_is_a_stop_if_a_signal_came_before_the_report() -> None:
    assert reconsidered(SUCCEEDED, 9.9) == (STOPPED, 10.0)
    assert reconsidered(SUCCEEDED, 10.2, reaped_at=10.3) == (STOPPED, 10.3)
    assert reconsidered(SUCCEEDED, None) == (SUCCEEDED, 10.0), "no wait"


@pytest.mark.parametrize("end", [ended_by(code=1), ended_by(code=75), ended_by(signal.SIGKILL)])
def test_failure_is_a_stop_if_a_signal_to_all_follows(end: Ending) -> None:
    assert reconsidered(end, 10.1) == (STOPPED, 10.1)
    assert reconsidered(end, None) == (end, 10.0 + TOGETHER_S)
    assert reconsidered(end, None, reaped_at=11.0) == (end, 11.0), "no second wait"
    assert reconsidered(end, 10.8, reaped_at=11.0) == (end, 11.0), "the signal came too late to be the reason"


def test_report_does_not_wait_for_a_signal_that_explains_nothing() -> None:
    end = Ending(kind=EndKind.OUT_OF_MEMORY, rank=0)
    assert reconsidered(end, 10.1) == (end, 10.0)


@pytest.mark.parametrize(("signalled_at", "expected"), [(5.0, STOPPED), (10.4, STOPPED), (11.0, SUCCEEDED)])
def test_signal_during_slow_reaping_does_not_undo_a_success(signalled_at: float, expected: Ending) -> None:
    fake, now = FakeRun(), [10.0]
    fake.run._clock = SimpleNamespace(monotonic=lambda: now[0])
    fake.run._running = [SimpleNamespace(status=0)]
    fake.run._drill_runner = MagicMock()
    fake.parts.watcher.first_failed = None
    assert fake.run._wait_for_ending(MagicMock(), "a rank", fake.parts.rank_group) == SUCCEEDED
    now[0] = 70.0  # the reaping took a minute
    fake.parts.stop_reasons.signalled = lambda least_s: STOPPED if now[0] - signalled_at >= least_s else None
    assert fake.run._reconsider(SUCCEEDED) == expected
