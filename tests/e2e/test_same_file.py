"""The job file that runs on Slurm and on Ray as it is, on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.cluster_same_file import SameFileContract
from tests.support.real_plane import RealPlane, a_plane

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPlane]:
    with a_plane(tmp_path_factory.mktemp("same-file") / "home") as real:
        yield real


class TestHere(SameFileContract):
    pass
