"""One real Slurm for the tests of both transports to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.host.processes import PATH
from tests.support.slurm import daemons
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """It gives a silent node up within seconds; with REST."""
    missing = what_is_missing() or daemons.missing_for_rest(PATH)
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), SlurmShape(has_rest=True)) as lab:
        yield lab
