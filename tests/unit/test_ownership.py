"""A path that other users can change is refused, with a command that fixes it."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import ownership
from shoal.cli.control_plane import home as homes
from shoal.client.credentials import Credentials
from shoal.ownership import Secrecy, UnsafePath, problems_inside, problems_on_path, refuse_unsafe
from shoal.settings import Settings

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
STRANGER = 12345


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "above" / "home"
    homes.prepare_home(made)
    (made / "keys").mkdir(mode=0o700)
    (made / "keys" / "signing.key").write_bytes(bytes(32))
    (made / "keys" / "signing.key").chmod(0o600)
    (made / "spool" / "live" / "att_1" / "n1").mkdir(parents=True)
    yield made
    (tmp_path / "above").chmod(0o700)


def paths(home: Path) -> list[str]:
    return [problem.path for problem in problems_on_path(home)]


def test_a_home_below_the_temporary_directory_is_safe(home: Path) -> None:
    """Every user may write there, but no user can rename another user's files."""
    homes.prepare_home(home)
    assert paths(home) == []
    assert paths(home / "nothing" / "there") == []


@pytest.mark.parametrize(
    "unsafe",
    [
        "above",
        "above/home",
        "above/home/keys",
        "above/home/keys/signing.key",
        "above/home/spool/live/att_1/n1",
    ],
)
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_what_others_can_write_is_refused_and_the_hint_mends_it(
    home: Path, tmp_path: Path, unsafe: str, mode: int
) -> None:
    (tmp_path / unsafe).chmod(mode)
    os.chown(tmp_path / unsafe, -1, 54321 if os.geteuid() == 0 else -1)
    if os.geteuid() != 0 and mode == 0o720:
        pytest.skip("its own group of one may write")
    with pytest.raises(UnsafePath, match=f"{unsafe} belongs to .* and has mode 0{mode:o}") as caught:
        homes.prepare_home(home)
    assert caught.value.hint is not None
    subprocess.run(caught.value.hint.split("`")[1], shell=True, check=True)
    homes.prepare_home(home)


@pytest.mark.parametrize(
    ("gid", "members", "others", "is_safe"),
    [
        (4300, [], [], True),
        (4300, ["ops"], [], True),
        (4300, ["eve"], [], False),
        (4300, [], [("eve", 4301, 4300)], False),
        (4300, [], [("eve", 4301, 4301)], True),
        (0, [], [], False),
    ],
)
def test_group_of_the_owner_is_its_own_while_no_other_account_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gid: int, members: list[str],
    others: list[tuple[str, int, int]], *, is_safe: bool,
) -> None:  # fmt: skip
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o770)
    facts = [*folder.stat()]
    facts[stat.ST_GID] = gid
    accounts = [account("ops", os.geteuid(), gid), *(account(*one) for one in others)]
    monkeypatch.setattr(pwd, "getpwuid", lambda _: accounts[0])
    monkeypatch.setattr(pwd, "getpwall", lambda: accounts)
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group(("ops", "x", gid, members)))
    problem = ownership._problem(str(folder), os.stat_result(facts), Secrecy.NONE, is_passed=True)
    assert (problem is None) == is_safe


def account(name: str, uid: int, gid: int) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))


@needs_root
@pytest.mark.parametrize("unsafe", ["above", "above/home", "above/home/keys/signing.key"])
def test_file_of_another_user_is_refused(home: Path, tmp_path: Path, unsafe: str) -> None:
    os.chown(tmp_path / unsafe, STRANGER, -1)
    with pytest.raises(UnsafePath, match=rf"{unsafe} belongs to uid {STRANGER}") as caught:
        homes.prepare_home(home)
    assert caught.value.hint is not None
    subprocess.run(caught.value.hint.split("`")[1], shell=True, check=True)
    homes.prepare_home(home)


def test_a_key_that_others_can_read_is_refused(home: Path) -> None:
    (home / "keys" / "signing.key").chmod(0o644)
    with pytest.raises(UnsafePath, match="so others can read it") as caught:
        homes.prepare_home(home)
    assert f"chmod go= {home}/keys/signing.key" in str(caught.value.hint)


@needs_root
def test_a_link_on_the_way_counts_with_its_owner_and_with_what_it_leads_to(
    home: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(home.parent)
    assert paths(link / "home") == []
    home.parent.chmod(0o777)
    assert paths(link / "home") == [str(home.parent)]
    home.parent.chmod(0o755)
    os.lchown(link, STRANGER, -1)
    assert paths(link / "home") == [str(link)]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnsafePath, match="more than 40 links"):
        paths(tmp_path / "loop")


@needs_root
def test_the_end_of_a_path_is_not_saved_by_its_sticky_bit(tmp_path: Path) -> None:
    sticky = tmp_path / "sticky"
    (sticky / "own").mkdir(parents=True)
    sticky.chmod(0o1777)
    assert paths(sticky / "own") == []
    assert paths(sticky) == [str(sticky)]
    os.chown(sticky / "own", STRANGER, -1)
    assert paths(sticky / "own") == [str(sticky / "own")]


def test_entries_that_are_links_count_with_where_they_lead(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "elsewhere").chmod(0o777)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere" / "file")
    assert [one.path for one in problems_inside(tmp_path / "folder")] == [str(tmp_path / "elsewhere")]


def test_names_are_quoted_and_a_long_list_is_cut(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"a b;{number}").touch()
        (tmp_path / f"a b;{number}").chmod(0o666)
    with pytest.raises(UnsafePath, match="and 2 more") as caught:
        refuse_unsafe(problems_inside(tmp_path))
    assert shlex.quote(f"{tmp_path}/a b;0") in str(caught.value.hint)


def test_saved_tokens_that_others_can_read_are_refused_as_ssh_refuses_keys(tmp_path: Path) -> None:
    saved = Credentials(tmp_path)
    saved.save("local", "shl_x")
    saved.path.chmod(0o644)
    with pytest.raises(UnsafePath, match="so others can read it"):
        saved.token("local")
    saved.path.chmod(0o600)
    assert saved.token("local") == "shl_x"


def test_files_beside_the_home_that_the_server_believes_are_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "policy.yaml").touch()
    (folder / "tls.key").touch(mode=0o600)
    database = f"sqlite:///{folder}/shoal.db"
    settings = Settings(
        home=tmp_path,
        database_url=database,
        policy=folder / "policy.yaml",
        tls_key=folder / "tls.key",
        tls_cert=folder / "tls.pem",
    )
    homes.refuse_unsafe_files(settings)
    for path, mode in ((folder, 0o777), (folder / "policy.yaml", 0o666), (folder / "tls.key", 0o604)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(UnsafePath, match=str(path)):
            homes.refuse_unsafe_files(settings)
        path.chmod(before)
    (folder / "tls.key").chmod(0o640)
    homes.refuse_unsafe_files(settings)  # as Debian's group ssl-cert has it


def test_secrecy_of_sockets_is_not_asked_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "door"))
        assert list(problems_on_path(tmp_path / "door", Secrecy.NONE)) == []
