"""Where a keeper puts its shares on a disk that others write to as well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.engines.ray import agent
from shoal.runtime import places
from shoal.wire import Fetch

ASKED = Fetch(attempt_id="att_1", node="n0", process="")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away: `sudo make test`")
NAME = f"shoal-{os.getuid()}"


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    path = tmp_path / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


def test_below_what_is_everybodys_each_user_has_a_place_of_their_own(everybodys: Path) -> None:
    root = places.make_root(str(everybodys))
    assert root == f"{everybodys}/{NAME}"
    assert Path(root).stat().st_mode & 0o777 == 0o700
    assert places.make_root(str(everybodys)) == root
    assert places.roots_of(str(everybodys)) == [root]


@pytest.mark.parametrize("trap", ["link", "dangling", "file", "open"])
def test_a_name_that_was_taken_before_us_is_left_alone_and_another_found_again(
    everybodys: Path, tmp_path: Path, trap: str
) -> None:
    usual = everybodys / NAME
    if trap in ("link", "dangling"):
        usual.symlink_to(tmp_path / ("there" if trap == "link" else "nowhere"))
        (tmp_path / "there").mkdir(mode=0o700)
    elif trap == "file":
        usual.touch()
    else:
        usual.mkdir()
        usual.chmod(0o777)
    root = places.make_root(str(everybodys))
    assert root.startswith(f"{usual}-")
    assert places.make_root(str(everybodys)) == root
    others_know = [str(usual)] if trap == "open" else []
    assert places.roots_of(str(everybodys)) == [*others_know, root]
    assert not (tmp_path / "there" / "spool").exists()
    assert not (tmp_path / "nowhere").exists()


@as_root
def test_a_directory_of_another_user_is_not_used(everybodys: Path) -> None:
    for name in (NAME, f"{NAME}-0", f"{NAME}-1"):
        (everybodys / name).mkdir(mode=0o700)
        os.chown(everybodys / name, 1, 1)
    root = places.make_root(str(everybodys))
    assert Path(root).stat().st_uid == os.getuid()
    assert Path(root).name not in (NAME, f"{NAME}-0", f"{NAME}-1")
    assert places.roots_of(str(everybodys)) == [root]


@as_root
def test_what_is_everybodys_but_belongs_to_another_user_is_refused(everybodys: Path) -> None:
    os.chown(everybodys, 1, 1)  # who could take our place away
    with pytest.raises(PermissionError, match="only user"):
        places.make_root(str(everybodys))


def test_a_root_in_use_stays_in_use_when_the_usual_name_is_free_again(everybodys: Path) -> None:
    usual = everybodys / NAME
    usual.touch()
    root = places.make_root(str(everybodys))
    usual.unlink()
    assert places.make_root(str(everybodys)) == root
    assert not usual.exists()


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_what_is_made_below_a_root_is_for_nobody_else_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        root = places.make_root(str(tmp_path))
    finally:
        os.umask(before)
    place = places.place_of(root, ASKED)
    Path(place).mkdir(parents=True, mode=0o700)
    Path(place).parent.chmod(0o700)
    assert places.foreign_in(root, place) == ""


def test_what_others_could_change_below_a_root_is_mended_by_who_uses_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    root = places.make_root(str(tmp_path))
    (tmp_path / "spool").chmod(0o775)
    assert places.foreign_in(root, f"{root}/spool/live") == f"{root}/spool"
    assert places.make_root(str(tmp_path)) == root
    assert places.foreign_in(root, f"{root}/spool/live") == ""


def test_a_link_below_a_root_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "spool").symlink_to("there")
    with pytest.raises(PermissionError, match="spool"):
        places.make_root(str(tmp_path))
    assert places.foreign_in(str(tmp_path), places.place_of(str(tmp_path), ASKED)) == f"{tmp_path}/spool"


@pytest.mark.parametrize("trap", ["", "link", "file", "open", "another's"])
def test_agents_of_ray_go_by_the_same_rules(everybodys: Path, trap: str) -> None:
    usual = everybodys / NAME
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
    root = places.own_root(str(everybodys))
    assert agent._own_root(str(everybodys)) == root
    assert (root == str(usual)) is (trap == "")
    assert places.own_root(str(everybodys)) == root
