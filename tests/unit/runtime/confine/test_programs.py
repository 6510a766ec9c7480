"""Programs in closed homes: the job's PATH, and the directories that the job sees."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.runtime.confine.sandbox_view import is_within, job_path, readable_directories

OTHER_UID = 200_123


@pytest.fixture
def closed_home(tmp_path: Path) -> Path:
    """A home that only its owner may enter, below directories that every user may enter."""
    for above in (tmp_path, *list(tmp_path.parents)[:-2]):
        above.chmod(above.stat().st_mode | 0o011)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return home


def test_shims_in_a_closed_home_give_way_to_the_python_that_runs_shoal(closed_home: Path) -> None:
    shims = closed_home / ".pyenv" / "shims"
    entries = job_path(f"{shims}:/usr/bin", OTHER_UID).split(":")
    assert str(shims) not in entries
    assert entries[0] == f"{sys.prefix}/bin"
    assert entries[-1] == "/usr/bin"


def test_python_environment_in_a_closed_home_stays_and_is_shown_whole(closed_home: Path) -> None:
    environment = closed_home / "project" / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    path = f"{environment}/bin:/usr/bin"
    assert job_path(path, OTHER_UID) == path
    assert str(environment) in readable_directories(path, OTHER_UID, "/nowhere")


def test_path_stays_if_the_user_may_enter_it(closed_home: Path) -> None:
    path = f"{closed_home}/bin:/usr/bin"
    assert job_path(path, os.geteuid()) == path


def test_source_of_a_clone_in_a_closed_home_is_shown(
    closed_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = closed_home / "shoal" / "src"
    source.mkdir(parents=True)
    monkeypatch.setattr("shoal.runtime.confine.sandbox_view.OWN_SOURCE", str(source))
    assert str(source) in readable_directories("/usr/bin", OTHER_UID, "/nowhere")
    assert str(source) not in readable_directories("/usr/bin", OTHER_UID, str(source / "home")), (
        "it holds SHOAL_HOME"
    )


def test_jobs_can_import_the_shoal_that_runs_them() -> None:
    source = str(Path(shoal.__path__[0]).resolve().parent)
    shown = readable_directories("/usr/bin", OTHER_UID, "/nowhere")
    assert any(is_within(source, place) for place in shown)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in the machine's own /tmp, which every user may read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(os.path.realpath(made))


def environment_with(folder: Path, source: Path, *, editable: bool = True) -> str:
    """Return a PATH with an environment that has a package from `source`."""
    record = folder / "env/lib/python3.11/site-packages/thing-1.dist-info/direct_url.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": editable}}))
    (folder / "env/bin").mkdir()
    (folder / "env/pyvenv.cfg").touch()
    return f"{folder}/env/bin:/usr/bin"


def test_package_installed_for_editing_below_tmp_is_shown(open_folder: Path) -> None:
    source = open_folder / "a clone"
    source.mkdir()
    path = environment_with(open_folder, source)
    assert str(source) in readable_directories(path, OTHER_UID, "/nowhere")
    assert str(source) not in readable_directories(path, OTHER_UID, str(source / "home")), (
        "it holds SHOAL_HOME"
    )
    source.chmod(0o700)
    assert str(source) not in readable_directories(path, OTHER_UID, "/nowhere"), (
        "its user could not read it outside"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_package_below_what_another_user_made_is_not_shown(open_folder: Path) -> None:
    source = open_folder / "theirs" / "clone"
    source.mkdir(parents=True)
    os.chown(source.parent, OTHER_UID, OTHER_UID)
    assert str(source) not in readable_directories(
        environment_with(open_folder, source), OTHER_UID, "/nowhere"
    )


def test_package_that_was_copied_or_lies_elsewhere_is_not_shown(open_folder: Path, tmp_path: Path) -> None:
    source = open_folder / "clone"
    source.mkdir()
    path = environment_with(open_folder, source, editable=False)
    assert str(source) not in readable_directories(path, OTHER_UID, "/nowhere")
    elsewhere = environment_with(open_folder / "other", Path("/opt"))
    assert "/opt" not in readable_directories(elsewhere, OTHER_UID, "/nowhere")
