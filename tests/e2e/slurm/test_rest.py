"""A person with a token for a Slurm and no account on its login nodes: connect, up, renew the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.planes.real import until
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def test_jobs_wait_while_the_token_is_no_good_and_run_when_it_is_renewed(
    slurm: SlurmLab, tmp_path: Path
) -> None:
    assert slurm.rest is not None
    file = slurm.rest.token_file(tmp_path / "token")
    plane = ClusterPlane(tmp_path / "home", slurm)
    del plane.env["SLURM_CONF"]
    told = plane.connect("--rest", slurm.rest.url, "--jwt-file", str(file))
    assert (told["nodes"], told["alive"]) == (3, 3)
    plane.up()
    try:
        job = plane.submit("echo from $(hostname)", resources={"nodes": 2, "cpus": 1})
        plane.until_status(job, "succeeded")
        file.write_text(f"{file.read_text().strip()[:-4]}AAAA")  # signed by nobody
        waits = plane.submit("true", resources={"cpus": 1})
        plane.until_explained(waits, "the cluster cannot be asked")
        until(lambda: "the token" in str(plane.shoal.status()["unanswered"]), "operators are told why")
        slurm.rest.token_file(file)
        plane.until_status(waits, "succeeded")
    finally:
        plane.down()
