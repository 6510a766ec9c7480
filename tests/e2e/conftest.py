"""What tests with real processes share: shares of a supervisor, a gate where ranks wait, and a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cluster_cuts import CutOff, cutting_off
from tests.contract.cluster_survival import Bereft, bereaving
from tests.support import deaf_disk, slurm_accounting, slurm_rest
from tests.support.cluster_plane import ClusterPlane
from tests.support.deaf_disk import DeafDisk
from tests.support.host import PATH
from tests.support.owners_plane import reachable_folder
from tests.support.real_plane import Gate, open_gate
from tests.support.shares import Start, shares_in
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with shares_in(tmp_path / "home") as make:
        yield make


@pytest.fixture
def gate() -> Iterator[Gate]:
    with open_gate() as opened:
        yield opened


@pytest.fixture(scope="session")
def site() -> Iterator[SlurmLab]:
    """One Slurm for all files: three nodes, accounting, REST, in a folder that every user reaches."""
    missing = what_is_missing() or slurm_rest.what_is_missing(PATH) or slurm_accounting.what_is_missing(PATH)
    if missing is not None:
        pytest.skip(missing)
    shape = Shape(slurmd_timeout_s=300, has_accounting=True, has_rest=True)
    with reachable_folder() as folder, slurm_lab(folder / "slurm", shape) as lab:
        yield lab


@pytest.fixture(scope="module")
def slurm(site: SlurmLab) -> SlurmLab:
    """Nothing of the file before is left there."""
    site.clear()
    return site


@pytest.fixture(scope="module")
def cut_off(plane: ClusterPlane) -> Iterator[CutOff]:
    """From before the first test of a file until its last."""
    with cutting_off(plane) as cut:
        yield cut


@pytest.fixture(scope="module")
def bereft(plane: ClusterPlane, cut_off: CutOff) -> Bereft:
    """Before the first test of a file."""
    return bereaving(plane)


@pytest.fixture
def cleared(plane: ClusterPlane, cut_off: CutOff, bereft: Bereft) -> Iterator[None]:
    """What a test submitted has ended afterwards, and nothing but the one node is cut off."""
    before = list(plane.submissions)
    yield
    for name in plane.lab.others(cut_off.node):
        plane.lab.heal(name)
    plane.end_all_but(before)


@pytest.fixture
def disk(plane: ClusterPlane) -> Iterator[DeafDisk]:
    """Where ranks of `witness` get stuck; afterwards nobody is."""
    missing = deaf_disk.what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with deaf_disk.deaf_disk(plane.witness.deaf) as made:
        yield made
