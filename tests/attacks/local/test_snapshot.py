"""Rows 28 and 29 at the client: working directories that should send away more than they hold, or hang it."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.client import selection, snapshot
from shoal.client.snapshot import take_snapshot
from shoal.errors import SpecError, TooLarge


def packed(root: Path) -> dict[str, bytes]:
    taken = take_snapshot(root)
    if taken is None:
        return {}
    with taken.file as file, tarfile.open(fileobj=file) as tar:
        return {m.name: (tar.extractfile(m) or file).read() if m.isreg() else b"" for m in tar.getmembers()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    place = tmp_path / "work"
    place.mkdir()
    (place / "train.py").write_text("print()")
    return place


def exchange(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Let somebody act after the files were listed and before the first is read."""
    listed = snapshot._refuse_excess

    def then_change(*args: object) -> None:
        listed(*args)  # type: ignore[arg-type]
        change()

    monkeypatch.setattr(snapshot, "_refuse_excess", then_change)


def test_pipes_sockets_and_devices_are_neither_sent_nor_waited_for(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
        if os.geteuid() == 0:
            os.mknod(root / "device", 0o20644, os.makedev(1, 5))
        assert packed(root) == {"train.py": b"print()"}


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "a link to a secret": lambda path: path.symlink_to("../secret"),
    "a pipe": os.mkfifo,
    "another file": lambda path: path.write_text("another"),
    "a directory": lambda path: path.mkdir(),
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
@pytest.mark.timeout(20)
def test_file_exchanged_while_it_is_packed_is_not_sent(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = root / "train.py"
    keep = path.open("rb")  # its number must not be given to the other

    def replace() -> None:
        path.unlink()
        REPLACEMENTS[kind](path)

    exchange(monkeypatch, replace)
    with keep, pytest.raises(SpecError, match="changed while it was packed"):
        take_snapshot(root)


def in_folder(root: Path, kind: str) -> Path:
    """Something with the same name in `sub` and in `outside`, which is not in the tree."""
    for folder in (root / "sub", root.parent / "outside"):
        folder.mkdir()
        if kind == "a folder":
            (folder / "x").mkdir()
        elif kind == "a link":
            (folder / "x").symlink_to("y")
        else:
            (folder / "x").write_text("secret")
    return root / "sub"


@pytest.mark.parametrize("kind", ["a file", "a link", "a folder"])
@pytest.mark.parametrize("is_put_back", [False, True])
def test_nothing_travels_that_was_found_through_a_folder_exchanged_for_a_link(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_put_back: bool
) -> None:
    folder = in_folder(root, kind)
    looked_at = selection._facts

    def exchange_first(above: Path, name: str) -> os.stat_result | None:
        if name == "sub/x" and not folder.is_symlink():
            folder.rename(root.parent / "mine")
            folder.symlink_to("../outside")
        return looked_at(above, name)

    def put_back() -> None:
        if is_put_back:
            folder.unlink()
            (root.parent / "mine").rename(folder)

    monkeypatch.setattr(selection, "_facts", exchange_first)
    monkeypatch.setattr(selection, "_refuse_outside", lambda *_: None)  # it looked before the exchange
    exchange(monkeypatch, put_back)
    with pytest.raises(SpecError, match="changed while it was packed"):
        take_snapshot(root)


def test_a_workdir_exchanged_for_a_link_while_it_is_read_is_not_sent(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "train.py").write_text("secret")
    chosen = selection.select

    def exchange_first(*args: object) -> object:
        root.rename(root.parent / "mine")
        root.symlink_to("outside")
        return chosen(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot, "select", exchange_first)
    with pytest.raises(SpecError, match="changed while it was packed"):
        take_snapshot(root)


def test_a_tracked_folder_that_became_an_ignored_link_inside_the_tree_travels_as_files(root: Path) -> None:
    for name in ("sub", "other"):
        (root / name).mkdir()
        (root / name / "a").write_text(name)
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    (root / "sub" / "a").unlink()
    (root / "sub").rmdir()
    (root / "sub").symlink_to("other")
    (root / ".gitignore").write_text("sub\n")
    assert packed(root)["sub/a"] == b"other"


@pytest.mark.parametrize("new", [b"", b"pr", b"print() and more and more"])
def test_a_file_that_shrinks_or_grows_while_it_is_packed_gives_no_broken_archive(
    root: Path, monkeypatch: pytest.MonkeyPatch, new: bytes
) -> None:
    exchange(monkeypatch, lambda: (root / "train.py").write_bytes(new))
    if len(new) < len(b"print()"):
        with pytest.raises(SpecError, match="changed while it was packed"):
            take_snapshot(root)
    else:
        assert packed(root) == {"train.py": new[:7]}


def test_a_folder_that_became_a_link_out_is_not_followed_where_git_still_lists_it(root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "a").write_text("secret")
    (root / "sub").mkdir()
    (root / "sub" / "a").write_text("mine")
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    (root / ".gitignore").write_text("sub\n")
    (root / "sub" / "a").unlink()
    (root / "sub").rmdir()
    (root / "sub").symlink_to("../outside")
    with pytest.raises(SpecError, match="leads outside"):
        take_snapshot(root)


def test_a_file_of_holes_larger_than_any_disk_is_refused_before_it_is_read(root: Path) -> None:
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(TooLarge, match="MiB"):
        take_snapshot(root)


def test_a_tree_deeper_than_pythons_stack_is_refused_in_words(root: Path) -> None:
    before = os.open(".", os.O_RDONLY)
    os.chdir(root)
    try:
        for _ in range(1200):
            Path("d").mkdir()
            os.chdir("d")
        Path("deep.py").touch()
    finally:
        os.fchdir(before)
        os.close(before)
    with pytest.raises(SpecError, match=r"entry `d/d/d/.* has 1201 parts between slashes; at most 100"):
        packed(root)
    subprocess.run(["rm", "-r", str(root)], check=True)


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from shoal.client.snapshot import take_snapshot
from shoal.errors import SpecError
os.setgid(65534); os.setuid(65534)
try:
    take_snapshot(Path({root!r}))
except SpecError as error:
    print(error.message, "|", error.hint)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
@pytest.mark.parametrize("name", ["train.py", "closed/", "open/closed/"])
def test_unreadable_file_is_named_with_a_command(open_place: Path, name: str) -> None:
    (open_place / "train.py").write_text("print()")
    path = open_place / name
    if name.endswith("/"):
        path.mkdir(parents=True)
    path.chmod(0)
    program = AS_NOBODY.format(path=sys.path, root=str(open_place))
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output.startswith(f"cannot read `{name.rstrip('/')}`")
    assert "ls -ld" in output


@pytest.mark.parametrize("name", ["$(touch canary)", "; touch canary", "-rf", "a b", "it's"])
def test_the_hint_for_a_hostile_name_can_be_typed_without_harm(root: Path, name: str) -> None:
    (root / name).symlink_to("../secret")
    with pytest.raises(SpecError) as caught:
        take_snapshot(root)
    command = str(caught.value.hint).split("`")[1]
    link, there = str(root / name), str((root / name).resolve())
    assert shlex.split(command) == ["rm", link, "&&", "cp", "-r", there, link]
