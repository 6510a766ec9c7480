"""When a task must stop and how long its ranks have, above all after the fence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.engines.fake import VirtualClock
from shoal.runtime.files import spool
from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.lease.stop_reasons import FENCED_GRACE_S, StopReasons
from shoal.runtime.supervisor.endings import Ending
from shoal.wire import EndKind, RenewalReply, TaskCredentials
from tests.support.runtime.tasks import a_task_spec

FENCE_S = 1800.0


def grace_after(silence_s: float, tmp_path: Path, *, grace_s: float = 30.0) -> float | None:
    """Return the grace of a task after this silence of the control plane. None: it goes on."""
    clock = VirtualClock(1_800_000_000.0)
    renewer: Any = SimpleNamespace(answered_at=clock.monotonic(), stop_reply=None, stale_because=None)
    task_spec = a_task_spec(fence_s=FENCE_S, grace_s=grace_s)
    reasons = StopReasons(spool.SpoolTask(tmp_path), task_spec, clock, renewer)
    clock.advance(silence_s)
    end = reasons.current()
    assert end is None or end.kind is EndKind.FENCED
    return None if end is None else end.grace_s


@pytest.mark.parametrize(
    ("late_s", "grace_s"), [(-1.0, None), (0.0, 10.0), (4.0, 6.0), (10.0, 0.0), (FENCE_MARGIN_S + 3600, 0.0)]
)
def test_grace_counts_from_the_fence(late_s: float, grace_s: float | None, tmp_path: Path) -> None:
    assert grace_after(FENCE_S + late_s, tmp_path) == grace_s


def test_shorter_grace_of_the_job_counts(tmp_path: Path) -> None:
    assert grace_after(FENCE_S, tmp_path, grace_s=2.0) == 2.0
    assert grace_after(FENCE_S + 9.0, tmp_path, grace_s=2.0) == 1.0


def test_grace_ends_before_a_replacement_may_start() -> None:
    assert FENCED_GRACE_S < FENCE_MARGIN_S


@pytest.mark.parametrize(("late_s", "is_over"), [(-1.0, False), (0.0, True), (3600.0, True)])
def test_reply_after_the_fence_does_not_renew_the_lease(late_s: float, is_over: bool, tmp_path: Path) -> None:
    """A frozen supervisor may renew before it looks at its clock. Another may have its place by then."""
    clock, task_spec = VirtualClock(1_800_000_000.0), a_task_spec(fence_s=FENCE_S)
    meter: Any = None
    renewer = LeaseRenewer(
        task_spec, TaskCredentials(proof_key="k"), None, clock, -1, clock.monotonic(), meter
    )
    clock.advance(FENCE_S + late_s)
    renewer._apply(RenewalReply(), asked_at=clock.monotonic())
    end = StopReasons(spool.SpoolTask(tmp_path), task_spec, clock, renewer).current()
    assert (end is not None) == is_over


@pytest.mark.parametrize(
    ("because", "expected", "is_unasked"),
    [
        ("", "stopped as asked", False),
        ("for a drill", "stopped as asked: for a drill", False),
        ("SIGTERM came", "stopped: SIGTERM came", True),
    ],
)
def test_stop_message_says_who_asked_for_it(
    because: str, expected: str, is_unasked: bool, tmp_path: Path
) -> None:
    clock, task = VirtualClock(1_800_000_000.0), spool.SpoolTask(tmp_path)
    spool.write_stop(
        task, spool.SpoolStop(grace_s=3.0, at=clock.now(), because=because, is_external_stop=is_unasked)
    )
    reasons = StopReasons(task, a_task_spec(fence_s=FENCE_S), clock, None)
    end = reasons.current()
    assert end is not None
    assert (end.kind, end.message, end.grace_s) == (EndKind.STOPPED, expected, 3.0)
    assert reasons.signalled() == (end if is_unasked else None)


def test_signal_without_a_stop_file_is_external(tmp_path: Path) -> None:
    reasons = StopReasons(
        spool.SpoolTask(tmp_path), a_task_spec(fence_s=FENCE_S), VirtualClock(1_800_000_000.0), None
    )
    assert reasons.signalled() is None
    reasons.on_sigterm(15, None)
    end = reasons.signalled()
    assert end is not None
    assert (end.kind, end.is_external_stop) == (EndKind.STOPPED, True)


def after_sigterm(tmp_path: Path) -> Ending:
    task_spec = a_task_spec(fence_s=FENCE_S, grace_s=7.0)
    reasons = StopReasons(spool.SpoolTask(tmp_path), task_spec, VirtualClock(1_800_000_000.0), None)
    reasons.on_sigterm(15, None)
    end = reasons.current()
    assert end is not None
    assert (end.kind, end.grace_s) == (EndKind.STOPPED, 7.0)
    assert reasons.signalled() == (end if end.is_external_stop else None)
    return end


def test_signal_may_be_shoals_if_the_disk_takes_no_stop_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a full disk refuses the stop file, the engine sends only the signal."""

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        assert not after_sigterm(tmp_path).is_external_stop
    assert after_sigterm(tmp_path).is_external_stop
    assert list(tmp_path.iterdir()) == []


def test_signal_with_an_unreadable_stop_file_is_shoals(tmp_path: Path) -> None:
    (tmp_path / "stop").write_bytes(b"{")
    assert not after_sigterm(tmp_path).is_external_stop


def test_origin_of_a_signal_does_not_change_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[spool.SpoolTask] = []
    monkeypatch.setattr(spool, "can_write_stop", tried.append)  # None: it cannot be written
    task_spec = a_task_spec(fence_s=FENCE_S)
    reasons = StopReasons(spool.SpoolTask(tmp_path), task_spec, VirtualClock(1_800_000_000.0), None)
    reasons.on_sigterm(15, None)
    ends = [reasons.current() for _ in range(3)]
    assert [end is not None and end.is_external_stop for end in ends] == [False] * 3
    assert len(tried) == 1, "it is not tried again in every turn"


@pytest.mark.parametrize("by", ["signal", "stop"])
def test_signal_counts_from_when_it_came(by: str, tmp_path: Path) -> None:
    clock, task = VirtualClock(1_800_000_000.0), spool.SpoolTask(tmp_path)
    reasons = StopReasons(task, a_task_spec(fence_s=FENCE_S), clock, None)
    if by == "signal":
        reasons.on_sigterm(15, None)
    else:
        spool.write_stop(task, spool.SpoolStop(grace_s=3.0, at=clock.now(), is_external_stop=True))
    clock.advance(2.0)
    reasons.on_sigterm(15, None)  # sent again, or by a node agent after its stop file
    assert [reasons.signalled(least_s) is not None for least_s in (-1.0, 2.0, 2.5)] == [True, True, False]


def test_signal_before_a_node_agents_stop_file_counts_as_older(tmp_path: Path) -> None:
    clock, task = VirtualClock(1_800_000_000.0), spool.SpoolTask(tmp_path)
    reasons = StopReasons(task, a_task_spec(fence_s=FENCE_S), clock, None)
    reasons.on_sigterm(15, None)
    clock.advance(2.0)
    spool.write_stop(task, spool.SpoolStop(grace_s=3.0, at=clock.now(), is_external_stop=True))
    assert reasons.signalled(2.0) is not None
