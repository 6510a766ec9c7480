"""Shoal on a real Ray whose processes speak TLS with each other: it is one of them, and strangers are not.
And in front of one that lets everybody in: it does not enter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes.cluster_plane import ONE_NODE, ClusterPlane, cluster_plane
from tests.support.ray.real_ray import MakeRay, RayLab
from tests.support.ray.tls import RayTls

pytestmark = [pytest.mark.engines, pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab(make_ray: MakeRay) -> Iterator[RayLab]:
    with make_ray(1, has_tls=True) as lab:
        yield lab


def test_a_job_runs_on_a_node(lab: RayLab, tmp_path: Path) -> None:
    with cluster_plane(tmp_path / "home", lab) as plane:
        job = plane.start_witness(ONE_NODE)
        plane.finish(job)


def test_who_shows_no_certificate_or_one_of_another_authority_is_refused(lab: RayLab, tmp_path: Path) -> None:
    """At once, and in words: Ray itself answers nobody, and gives up after two minutes."""
    strange, own = RayTls(tmp_path / "tls"), lab.tls
    strange.make({lab.address})
    assert own is not None
    halves = RayTls(tmp_path / "tls")
    halves.ca = own.ca
    shown = {
        "speaks TLS, and no certificate of this machine's is named": (),
        "stands for: ": strange.connect_options(),
        f"does not take {strange.cert}": halves.connect_options(),
    }
    plane = ClusterPlane(tmp_path / "home", lab)
    words = ("--as-root", "--address", lab.head_address, "--token-file", str(lab.token_file))
    for said, certificates in shown.items():
        done = plane.command("connect", "ray", *words, *certificates, "--ray-python", "/nowhere/python")
        assert done.returncode == 2, done.stderr
        assert said in done.stderr, done.stderr
        assert "--tls-" in done.stderr
    assert not (plane.home / "ray.json").exists()


def test_a_ray_that_wants_no_token_is_refused(make_ray: MakeRay, tmp_path: Path) -> None:
    """By its answers alone in `tests/unit/engines/ray/test_ray_probe.py`."""
    with make_ray(0, has_tokens=False) as lab:
        plane = ClusterPlane(tmp_path / "home", lab)
        done = plane.command("connect", "ray", "--as-root", *lab.connect_options())
    assert done.returncode == 2, done.stderr
    assert "answers without a token" in done.stderr
    assert "RAY_AUTH_MODE=token" in done.stderr
