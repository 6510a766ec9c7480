"""Shoal on a real Ray whose processes speak TLS with each other: it is one of them, and strangers are not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cluster_plane import CONNECT_S, ClusterPlane, cluster_plane
from tests.support.ray_lab import RAY_PYTHON, RayLab, ray_lab, what_is_missing
from tests.support.ray_tls import RayTls

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with ray_lab(tmp_path_factory.mktemp("ray"), 2, has_tls=True) as lab:
        yield lab


def test_a_gang_runs_on_two_nodes(lab: RayLab, tmp_path: Path) -> None:
    with cluster_plane(tmp_path / "home", lab) as plane:
        job = plane.begun({"nodes": 2, "cpus": 1})
        plane.ends_well(job)


def test_who_shows_no_certificate_or_one_of_another_authority_is_refused(lab: RayLab, tmp_path: Path) -> None:
    """At once: Ray answers nobody, and each of them gives up after two minutes."""
    strange = RayTls(tmp_path / "tls")
    strange.make({lab.address})
    planes = {name: ClusterPlane(tmp_path / name / "home", lab) for name in ("none", "strange")}
    shown = {"none": (), "strange": strange.words()}
    words = ("--as-root", "--address", lab.head_address, "--token-file", str(lab.token_file))

    def connect(name: str) -> subprocess.CompletedProcess[str]:
        planes[name].home.parent.mkdir(exist_ok=True)
        asked = (*words, *shown[name], "--ray-python", str(RAY_PYTHON))
        return planes[name].command("connect", "ray", *asked, timeout_s=CONNECT_S)

    with ThreadPoolExecutor() as threads:
        told = dict(zip(planes, threads.map(connect, planes), strict=True))
    for name, done in told.items():
        assert done.returncode != 0, name
        assert "--tls-cert" in done.stderr, done.stderr
        assert not (planes[name].home / "ray.json").exists()
