"""Where a node agent puts its tasks on a disk that other users write to as well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.engines.ray import agent
from shoal.runtime.agent import spool_root
from shoal.wire import TaskSpecRequest

ASKED = TaskSpecRequest(attempt_id="att_1", node="n0", process="")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away: `sudo make test`")
NAME = f"shoal-{os.getuid()}"


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def test_each_user_has_a_directory_below_a_shared_one(shared_folder: Path) -> None:
    root = spool_root.prepare_root(str(shared_folder))
    assert root == f"{shared_folder}/{NAME}"
    assert Path(root).stat().st_mode & 0o777 == 0o700
    assert spool_root.prepare_root(str(shared_folder)) == root
    assert spool_root.existing_roots(str(shared_folder)) == [root]


@pytest.mark.parametrize("trap", ["link", "dangling", "file", "open"])
def test_taken_name_is_left_alone_and_another_one_is_found_again(
    shared_folder: Path, tmp_path: Path, trap: str
) -> None:
    usual = shared_folder / NAME
    if trap in ("link", "dangling"):
        usual.symlink_to(tmp_path / ("there" if trap == "link" else "nowhere"))
        (tmp_path / "there").mkdir(mode=0o700)
    elif trap == "file":
        usual.touch()
    else:
        usual.mkdir()
        usual.chmod(0o777)
    root = spool_root.prepare_root(str(shared_folder))
    assert root.startswith(f"{usual}-")
    assert spool_root.prepare_root(str(shared_folder)) == root
    others_know = [str(usual)] if trap == "open" else []
    assert spool_root.existing_roots(str(shared_folder)) == [*others_know, root]
    assert not (tmp_path / "there" / "spool").exists()
    assert not (tmp_path / "nowhere").exists()


@as_root
def test_directory_of_another_user_is_not_used(shared_folder: Path) -> None:
    for name in (NAME, f"{NAME}-0", f"{NAME}-1"):
        (shared_folder / name).mkdir(mode=0o700)
        os.chown(shared_folder / name, 1, 1)
    root = spool_root.prepare_root(str(shared_folder))
    assert Path(root).stat().st_uid == os.getuid()
    assert Path(root).name not in (NAME, f"{NAME}-0", f"{NAME}-1")
    assert spool_root.existing_roots(str(shared_folder)) == [root]


@as_root
def test_shared_directory_of_another_user_is_refused(shared_folder: Path) -> None:
    os.chown(shared_folder, 1, 1)  # its owner could rename our directory
    with pytest.raises(PermissionError, match="only user"):
        spool_root.prepare_root(str(shared_folder))


def test_root_in_use_stays_in_use_when_the_usual_name_is_free_again(shared_folder: Path) -> None:
    usual = shared_folder / NAME
    usual.touch()
    root = spool_root.prepare_root(str(shared_folder))
    usual.unlink()
    assert spool_root.prepare_root(str(shared_folder)) == root
    assert not usual.exists()


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_directories_below_a_root_are_private_with_any_umask(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        root = spool_root.prepare_root(str(tmp_path))
    finally:
        os.umask(before)
    place = spool_root.task_directory(root, ASKED)
    Path(place).mkdir(parents=True, mode=0o700)
    Path(place).parent.chmod(0o700)
    assert spool_root.first_foreign_path(root, place) == ""


def test_write_access_of_others_below_a_root_is_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    root = spool_root.prepare_root(str(tmp_path))
    (tmp_path / "spool").chmod(0o775)
    assert spool_root.first_foreign_path(root, f"{root}/spool/live") == f"{root}/spool"
    assert spool_root.prepare_root(str(tmp_path)) == root
    assert spool_root.first_foreign_path(root, f"{root}/spool/live") == ""


def test_link_below_a_root_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "spool").symlink_to("there")
    with pytest.raises(PermissionError, match="spool"):
        spool_root.prepare_root(str(tmp_path))
    assert (
        spool_root.first_foreign_path(str(tmp_path), spool_root.task_directory(str(tmp_path), ASKED))
        == f"{tmp_path}/spool"
    )


@pytest.mark.parametrize("trap", ["", "link", "file", "open", "another's"])
def test_ray_agents_follow_the_same_rules(shared_folder: Path, trap: str) -> None:
    usual = shared_folder / NAME
    if trap == "link":
        usual.symlink_to("/nowhere")
    elif trap == "file":
        usual.touch()
    elif trap:
        usual.mkdir()
        usual.chmod(0o777 if trap == "open" else 0o700)
    if trap == "another's":
        if os.getuid() != 0:
            pytest.skip("only root gives files away: `sudo make test`")
        os.chown(usual, 1, 1)
    root = spool_root.find_or_make_root(str(shared_folder))
    assert agent._own_root(str(shared_folder)) == root
    assert (root == str(usual)) is (trap == "")
    assert spool_root.find_or_make_root(str(shared_folder)) == root
