"""What tests with real processes share: shares of a supervisor, a gate where ranks wait, and a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cluster.partitions import CutOffJob, cut_off_job
from tests.contract.cluster.survival import OrphanedJob, orphan_job
from tests.support.faults import hung_disk
from tests.support.faults.hung_disk import HungDisk
from tests.support.host.processes import PATH
from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.planes.real import RankGate, open_gate
from tests.support.runtime.tasks import StartTask, tasks_in
from tests.support.slurm import daemons
from tests.support.slurm.owners_plane import reachable_folder
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartTask]:
    with tasks_in(tmp_path / "home") as make:
        yield make


@pytest.fixture
def gate() -> Iterator[RankGate]:
    with open_gate() as opened:
        yield opened


@pytest.fixture(scope="session")
def site() -> Iterator[SlurmLab]:
    """One Slurm for all files: three nodes, accounting, REST, in a folder that every user reaches."""
    missing = what_is_missing() or daemons.missing_for_rest(PATH) or daemons.missing_for_accounting(PATH)
    if missing is not None:
        pytest.skip(missing)
    shape = SlurmShape(slurmd_timeout_s=300, has_accounting=True, has_rest=True)
    with reachable_folder() as folder, slurm_lab(folder / "slurm", shape) as lab:
        yield lab


@pytest.fixture(scope="module")
def slurm(site: SlurmLab) -> SlurmLab:
    """Nothing of the file before is left there."""
    site.reset()
    return site


@pytest.fixture(scope="module")
def cut_off(plane: ClusterPlane) -> Iterator[CutOffJob]:
    """From before the first test of a file until its last."""
    with cut_off_job(plane) as cut:
        yield cut


@pytest.fixture(scope="module")
def bereft(plane: ClusterPlane, cut_off: CutOffJob) -> OrphanedJob:
    """Before the first test of a file."""
    return orphan_job(plane)


@pytest.fixture
def cleared(plane: ClusterPlane, cut_off: CutOffJob, bereft: OrphanedJob) -> Iterator[None]:
    """What a test submitted has ended afterwards, and nothing but the one node is cut off."""
    before = list(plane.submissions)
    yield
    for name in plane.lab.others(cut_off.node):
        plane.lab.heal(name)
    plane.stop_all_except(before)


@pytest.fixture
def disk(plane: ClusterPlane) -> Iterator[HungDisk]:
    """Where ranks of `witness` get stuck; afterwards nobody is."""
    missing = hung_disk.what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with hung_disk.hung_disk(plane.witness.hung_dir) as made:
        yield made
