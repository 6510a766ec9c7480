"""One real Slurm for the tests of both doors to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import slurm_rest
from tests.support.host import PATH
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """It gives a silent node up within seconds; with REST."""
    missing = what_is_missing() or slurm_rest.what_is_missing(PATH)
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), Shape(has_rest=True)) as lab:
        yield lab
