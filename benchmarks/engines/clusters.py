"""The clusters that are measured: a real Slurm, a real Ray, and a Shoal control plane over each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines.commands import Ledger
from benchmarks.engines.say import say
from benchmarks.processes import BenchmarkError
from tests.support.host.cluster_lab import ClusterLab
from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.ray import real_ray
from tests.support.ray.real_ray import RayLab
from tests.support.slurm import real_slurm
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape


@contextlib.contextmanager
def slurm_cluster(root: Path, shape: SlurmShape) -> Iterator[SlurmLab]:
    if why := real_slurm.what_is_missing():
        raise BenchmarkError(why)
    say(f"starting a Slurm of {shape.nodes} nodes")
    with real_slurm.slurm_lab(root / "slurm", shape) as lab:
        yield lab


@contextlib.contextmanager
def ray_cluster(root: Path, python: Path = real_ray.RAY_PYTHON) -> Iterator[RayLab]:
    """Two nodes, with Ray's own job server."""
    if why := real_ray.what_is_missing():
        raise BenchmarkError(why)
    say("starting a Ray of 2 nodes")
    place = root / "ray"
    place.mkdir(parents=True)
    with real_ray.ray_lab(place, has_job_server=True, python=python) as lab:
        yield lab


@contextlib.contextmanager
def plane_on(root: Path, lab: ClusterLab, ledger: Ledger) -> Iterator[ClusterPlane]:
    """Yield a running control plane whose commands are recorded in the ledger. Afterwards none of its
    processes runs.
    """
    home = root / "plane" / "home"
    home.parent.mkdir(parents=True)
    plane = ClusterPlane(home, lab)
    plane.env["PATH"] = f"{ledger.folder}:{plane.env['PATH']}"
    plane.connect(python=str(ledger.add("python", sys.executable)))
    plane.up()
    say("Shoal is connected to it")
    try:
        yield plane
    finally:
        plane.down()
