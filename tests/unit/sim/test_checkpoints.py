"""Modelled checkpoints: their cost, and the work that an attempt keeps when it is cut short."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.sim.assumptions import CheckpointModel, InterruptedWork

HOURLY = CheckpointModel(interval_s=3600, cost_s=60, restart_s=120)


def test_no_checkpoint_is_written_at_the_end() -> None:
    assert HOURLY.overhead_s(3600, is_restart=False) == 0
    assert HOURLY.overhead_s(3601, is_restart=False) == 60
    assert HOURLY.overhead_s(7200, is_restart=True) == 60 + 120


def test_work_since_the_last_checkpoint_is_lost() -> None:
    assert HOURLY.cut_short(3660 + 1000, is_restart=False) == InterruptedWork(3600, 1000, 60)


def test_a_checkpoint_that_was_being_written_does_not_count() -> None:
    assert HOURLY.cut_short(3630, is_restart=False) == InterruptedWork(0, 3600, 30)


def test_an_attempt_that_only_read_its_checkpoint_has_lost_no_work() -> None:
    assert HOURLY.cut_short(100, is_restart=True) == InterruptedWork(0, 0, 100)


def test_without_checkpoints_all_is_lost_and_nothing_costs() -> None:
    assert CheckpointModel().overhead_s(1e6, is_restart=False) == 0
    assert CheckpointModel().cut_short(500, is_restart=True) == InterruptedWork(0, 500, 0)


def test_a_checkpoint_of_no_interval_is_refused() -> None:
    with pytest.raises(SpecError, match="every 0 s"):
        CheckpointModel(interval_s=0)
