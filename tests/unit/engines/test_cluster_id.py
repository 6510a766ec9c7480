"""Which cluster is another one, by what is known of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.engines.cluster_id import DESK, ClusterId, all_left, left_of, read_cluster, write_cluster
from shoal.engines.desk import Desk
from shoal.engines.ray.config import RayConfig
from shoal.engines.slurm.config import SlurmConfig
from shoal.wire import EndKind
from tests.support.paper_slurm import order

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


def test_what_is_laid_down_is_open_until_somebody_has_said_how_it_ended(tmp_path: Path) -> None:
    assert list(all_left(tmp_path, DESK)) == []
    desk = Desk(tmp_path, SystemClock())
    desk.add((order(nodes=("n0",)),), None)
    [left] = all_left(tmp_path, DESK)
    assert (left.open_nodes, str(left)) == (["n0"], f"{left.job} on n0")
    assert left_of(tmp_path, DESK, "att_2").shares == {}
    [share] = desk.shares()
    desk.bury(share, EndKind.LOST, "gone")
    [left] = all_left(tmp_path, DESK)
    assert left.open_nodes == []
    Path(share.files.outcome).write_text("{")  # nobody can tell
    [left] = all_left(tmp_path, DESK)
    assert left.open_nodes == ["n0"]
