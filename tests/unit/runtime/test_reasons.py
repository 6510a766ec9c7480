"""How long ranks may go on once the fence has passed: whoever replaces them counts from the same answer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.control.leases import FENCE_MARGIN_S
from shoal.engines.fake import VirtualClock
from shoal.runtime import spool
from shoal.runtime.ending import Ending
from shoal.runtime.reasons import FENCED_GRACE_S, Reasons
from shoal.runtime.renewal import Renewer
from shoal.wire import Credentials, EndKind, RenewalAnswer
from tests.support.shares import an_order

FENCE_S = 1800.0


def grace_after(silence_s: float, tmp_path: Path, *, grace_s: float = 30.0) -> float | None:
    """The grace of a share whose control plane answered last so long ago; None: it goes on."""
    clock = VirtualClock(1_800_000_000.0)
    renewer: Any = SimpleNamespace(answered_at=clock.monotonic(), order_to_stop=None, stale_because=None)
    order = an_order(fence_s=FENCE_S, grace_s=grace_s)
    reasons = Reasons(spool.Share(tmp_path), order, clock, renewer)
    clock.advance(silence_s)
    end = reasons.now()
    assert end is None or end.kind is EndKind.FENCED
    return None if end is None else end.grace_s


@pytest.mark.parametrize(
    ("late_s", "grace_s"), [(-1.0, None), (0.0, 10.0), (4.0, 6.0), (10.0, 0.0), (FENCE_MARGIN_S + 3600, 0.0)]
)
def test_the_grace_is_what_is_left_of_it_since_the_fence(
    late_s: float, grace_s: float | None, tmp_path: Path
) -> None:
    assert grace_after(FENCE_S + late_s, tmp_path) == grace_s


def test_a_shorter_grace_of_the_jobs_own_counts(tmp_path: Path) -> None:
    assert grace_after(FENCE_S, tmp_path, grace_s=2.0) == 2.0
    assert grace_after(FENCE_S + 9.0, tmp_path, grace_s=2.0) == 1.0


def test_no_grace_reaches_into_the_time_of_a_successor() -> None:
    assert FENCED_GRACE_S < FENCE_MARGIN_S


@pytest.mark.parametrize(("late_s", "is_over"), [(-1.0, False), (0.0, True), (3600.0, True)])
def test_an_answer_after_the_fence_takes_nothing_back(late_s: float, is_over: bool, tmp_path: Path) -> None:
    """One that was frozen may renew before it looks at its clock: somebody may have its place by then."""
    clock, order = VirtualClock(1_800_000_000.0), an_order(fence_s=FENCE_S)
    meter: Any = None
    renewer = Renewer(order, Credentials(proof_key="k"), None, clock, -1, clock.monotonic(), meter)
    clock.advance(FENCE_S + late_s)
    renewer._take(RenewalAnswer(), asked_at=clock.monotonic())
    end = Reasons(spool.Share(tmp_path), order, clock, renewer).now()
    assert (end is not None) == is_over


@pytest.mark.parametrize(
    ("because", "told", "is_unasked"),
    [
        ("", "stopped as asked", False),
        ("for a drill", "stopped as asked: for a drill", False),
        ("SIGTERM came", "stopped: SIGTERM came", True),
    ],
)
def test_who_else_than_the_control_plane_asked_for_the_end_is_told(
    because: str, told: str, is_unasked: bool, tmp_path: Path
) -> None:
    clock, share = VirtualClock(1_800_000_000.0), spool.Share(tmp_path)
    spool.write_stop(share, spool.Stop(grace_s=3.0, at=clock.now(), because=because, is_unasked=is_unasked))
    reasons = Reasons(share, an_order(fence_s=FENCE_S), clock, None)
    end = reasons.now()
    assert end is not None
    assert (end.kind, end.message, end.grace_s) == (EndKind.STOPPED, told, 3.0)
    assert reasons.signalled() == (end if is_unasked else None)


def test_a_signal_without_a_word_of_ours_is_somebody_elses(tmp_path: Path) -> None:
    reasons = Reasons(spool.Share(tmp_path), an_order(fence_s=FENCE_S), VirtualClock(1_800_000_000.0), None)
    assert reasons.signalled() is None
    reasons.on_sigterm(15, None)
    end = reasons.signalled()
    assert end is not None
    assert (end.kind, end.is_unasked) == (EndKind.STOPPED, True)


def after_sigterm(tmp_path: Path) -> Ending:
    order = an_order(fence_s=FENCE_S, grace_s=7.0)
    reasons = Reasons(spool.Share(tmp_path), order, VirtualClock(1_800_000_000.0), None)
    reasons.on_sigterm(15, None)
    end = reasons.now()
    assert end is not None
    assert (end.kind, end.grace_s) == (EndKind.STOPPED, 7.0)
    assert reasons.signalled() == (end if end.is_unasked else None)
    return end


def test_a_signal_where_the_disk_takes_no_word_may_be_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose stop file a full disk refuses sends the signal alone."""

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        assert not after_sigterm(tmp_path).is_unasked
    assert after_sigterm(tmp_path).is_unasked
    assert list(tmp_path.iterdir()) == []


def test_a_signal_beside_a_stop_that_cannot_be_read_is_ours(tmp_path: Path) -> None:
    (tmp_path / "stop").write_bytes(b"{")
    assert not after_sigterm(tmp_path).is_unasked


def test_whose_a_signal_is_does_not_change_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[spool.Share] = []
    monkeypatch.setattr(spool, "can_take_stop", tried.append)  # None: it cannot
    order = an_order(fence_s=FENCE_S)
    reasons = Reasons(spool.Share(tmp_path), order, VirtualClock(1_800_000_000.0), None)
    reasons.on_sigterm(15, None)
    ends = [reasons.now() for _ in range(3)]
    assert [end is not None and end.is_unasked for end in ends] == [False] * 3
    assert len(tried) == 1, "and is not tried again at every turn"


@pytest.mark.parametrize("by", ["signal", "stop"])
def test_signal_counts_from_when_it_came(by: str, tmp_path: Path) -> None:
    clock, share = VirtualClock(1_800_000_000.0), spool.Share(tmp_path)
    reasons = Reasons(share, an_order(fence_s=FENCE_S), clock, None)
    if by == "signal":
        reasons.on_sigterm(15, None)
    else:
        spool.write_stop(share, spool.Stop(grace_s=3.0, at=clock.now(), is_unasked=True))
    clock.advance(2.0)
    reasons.on_sigterm(15, None)  # sent again, or by a keeper after its word
    assert [reasons.signalled(least_s) is not None for least_s in (-1.0, 2.0, 2.5)] == [True, True, False]


def test_signal_that_came_before_the_word_of_a_keeper_is_the_older_one(tmp_path: Path) -> None:
    clock, share = VirtualClock(1_800_000_000.0), spool.Share(tmp_path)
    reasons = Reasons(share, an_order(fence_s=FENCE_S), clock, None)
    reasons.on_sigterm(15, None)
    clock.advance(2.0)
    spool.write_stop(share, spool.Stop(grace_s=3.0, at=clock.now(), is_unasked=True))
    assert reasons.signalled(2.0) is not None
