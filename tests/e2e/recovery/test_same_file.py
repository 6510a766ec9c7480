"""The job file that runs unchanged on Slurm and on Ray, here on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.cluster.drills import SameFileContract
from tests.support.planes.real import RealPlane, running_plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with running_plane(tmp_path_factory.mktemp("same-file") / "home") as real:
        yield real


class TestHere(SameFileContract):
    pass
