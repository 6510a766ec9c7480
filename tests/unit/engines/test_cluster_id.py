"""Which cluster is another one, by what is known of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.engines.home_records import (
    MAILBOX,
    ClusterId,
    read_cluster,
    unfinished_attempt,
    unfinished_attempts,
    write_cluster,
)
from shoal.engines.ray.config import RayConfig
from shoal.engines.remote.mailbox import Mailbox
from shoal.engines.slurm.config import SlurmConfig
from shoal.wire import EndKind
from tests.support.slurm.fake_slurm import slurm_task_spec

LAB = SlurmConfig(cluster="lab", heads=("a", "b")).cluster_id


@pytest.mark.parametrize(
    ("other", "is_other"),
    [
        (SlurmConfig(cluster="lab", heads=("b", "c"), ssh="ana@login").cluster_id, False),
        (SlurmConfig(cluster="lab", heads=("c",)).cluster_id, True),
        (SlurmConfig(cluster="prod", heads=("a",)).cluster_id, True),
        # By REST an older slurmrestd does not say its name.
        (SlurmConfig(heads=("a",), rest="unix:/x").cluster_id, False),
        (SlurmConfig(heads=("c",), rest="unix:/x").cluster_id, True),
        # Connected by an older Shoal, which asked for neither: the way there is all that is known.
        (SlurmConfig().cluster_id, False),
        (SlurmConfig(ssh="ana@login").cluster_id, True),
        (RayConfig(address="a").cluster_id, True),
        (ClusterId(engine="local"), True),
    ],
)
def test_a_cluster_is_another_by_its_name_by_who_controls_it_or_else_by_the_way_there(
    other: ClusterId, is_other: bool
) -> None:
    assert LAB.is_other(other) is is_other
    assert other.is_other(LAB) is is_other


def test_a_ray_is_another_at_another_address() -> None:
    here = RayConfig().cluster_id
    assert not here.is_other(RayConfig(spool="/x").cluster_id)
    assert here.is_other(RayConfig(address="10.0.0.1:6379").cluster_id)


def test_a_cluster_is_said_in_words() -> None:
    assert str(LAB) == "the Slurm `lab` (a, b)"
    assert str(RayConfig(address="10.0.0.1:6379").cluster_id) == "the Ray (10.0.0.1:6379)"
    assert str(ClusterId(engine="local")) == "this machine"


def test_it_is_written_down_in_the_home(tmp_path: Path) -> None:
    assert read_cluster(tmp_path) is None
    write_cluster(tmp_path, LAB)
    assert read_cluster(tmp_path) == LAB


def test_stored_attempt_is_open_until_an_outcome_exists(tmp_path: Path) -> None:
    assert list(unfinished_attempts(tmp_path, MAILBOX)) == []
    mailbox = Mailbox(tmp_path, SystemClock())
    mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    [left] = unfinished_attempts(tmp_path, MAILBOX)
    assert (left.open_nodes, str(left)) == (["n0"], f"{left.job} on n0")
    assert unfinished_attempt(tmp_path, MAILBOX, "att_2").outcomes == {}
    [task] = mailbox.tasks()
    mailbox.reap(task, EndKind.LOST, "gone")
    [left] = unfinished_attempts(tmp_path, MAILBOX)
    assert left.open_nodes == []
    Path(task.files.outcome).write_text("{")  # nobody can tell
    [left] = unfinished_attempts(tmp_path, MAILBOX)
    assert left.open_nodes == ["n0"]
