"""A person with a token for a Slurm and no account on its login nodes: connect, up, renew the token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import slurm_rest
from tests.support.cluster_plane import ClusterPlane
from tests.support.networks import PATH
from tests.support.real_plane import until
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing() or slurm_rest.what_is_missing(PATH)
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), Shape(nodes=2, has_rest=True)) as lab:
        yield lab


def test_jobs_wait_while_the_token_is_no_good_and_run_when_it_is_renewed(
    lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert lab.rest is not None
    folder = tmp_path_factory.mktemp("rest-plane")
    file = lab.rest.token_file(folder / "token")
    plane = ClusterPlane(folder / "home", lab)
    del plane.env["SLURM_CONF"]
    told = plane.connect("--rest", lab.rest.url, "--jwt-file", str(file))
    assert (told["nodes"], told["alive"]) == (2, 2)
    plane.up()
    try:
        job = plane.submit("echo from $(hostname)", resources={"nodes": 2, "cpus": 1})
        plane.until_status(job, "succeeded")
        file.write_text(f"{file.read_text().strip()[:-4]}AAAA")  # signed by nobody
        waits = plane.submit("true", resources={"cpus": 1})
        until(lambda: "token" in plane.command("why", waits.ref).stdout, "why names the token")
        lab.rest.token_file(file)
        plane.until_status(waits, "succeeded")
    finally:
        plane.down()
