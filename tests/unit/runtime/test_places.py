"""Where a keeper puts its shares on a disk that others write to as well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.runtime import places

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
    assert places.roots_of(str(everybodys)) == [str(usual), root]
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


@as_root
def test_what_is_everybodys_but_belongs_to_another_user_is_refused(everybodys: Path) -> None:
    os.chown(everybodys, 1, 1)  # who could take our place away
    with pytest.raises(PermissionError, match="only user"):
        places.make_root(str(everybodys))
