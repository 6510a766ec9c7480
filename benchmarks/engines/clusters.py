"""The clusters that are measured: a real Slurm, a real Ray, and a control plane of Shoal's over each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines.commands import Ledger
from benchmarks.engines.say import say
from benchmarks.processes import BenchmarkError
from tests.support import ray_lab, slurm_lab
from tests.support.cluster_lab import ClusterLab
from tests.support.cluster_plane import ClusterPlane
from tests.support.ray_lab import RayLab
from tests.support.slurm_lab import Shape, SlurmLab


@contextlib.contextmanager
def slurm_cluster(root: Path, shape: Shape) -> Iterator[SlurmLab]:
    if why := slurm_lab.what_is_missing():
        raise BenchmarkError(why)
    say(f"starting a Slurm of {shape.nodes} nodes")
    with slurm_lab.slurm_lab(root / "slurm", shape) as lab:
        yield lab


@contextlib.contextmanager
def ray_cluster(root: Path, python: Path = ray_lab.RAY_PYTHON) -> Iterator[RayLab]:
    """Of two nodes, with Ray's own job server."""
    if why := ray_lab.what_is_missing():
        raise BenchmarkError(why)
    say("starting a Ray of 2 nodes")
    place = root / "ray"
    place.mkdir(parents=True)
    with ray_lab.ray_lab(place, has_job_server=True, python=python) as lab:
        yield lab


@contextlib.contextmanager
def plane_on(root: Path, lab: ClusterLab, ledger: Ledger) -> Iterator[ClusterPlane]:
    """One that is up, whose commands are in the ledger; afterwards nothing of it runs."""
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
