"""Programs in closed homes: what the job's PATH keeps, and what is shown to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shoal.runtime.confine.programs import job_path, programs

OTHER_UID = 200_123


@pytest.fixture
def closed_home(tmp_path: Path) -> Path:
    """A home nobody but its owner may enter, below directories that everybody may."""
    for above in (tmp_path, *list(tmp_path.parents)[:-2]):
        above.chmod(above.stat().st_mode | 0o011)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return home


def test_shims_in_a_closed_home_give_way_to_the_python_that_runs_shoal(closed_home: Path) -> None:
    shims = closed_home / ".pyenv" / "shims"
    found = job_path(f"{shims}:/usr/bin", OTHER_UID).split(":")
    assert str(shims) not in found
    assert found[0] == f"{sys.prefix}/bin"
    assert found[-1] == "/usr/bin"


def test_python_environment_in_a_closed_home_stays_and_is_shown_whole(closed_home: Path) -> None:
    environment = closed_home / "project" / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    path = f"{environment}/bin:/usr/bin"
    assert job_path(path, OTHER_UID) == path
    assert str(environment) in programs(path)


def test_path_of_somebody_who_may_enter_is_left_alone(closed_home: Path) -> None:
    path = f"{closed_home}/bin:/usr/bin"
    assert job_path(path, os.geteuid()) == path
