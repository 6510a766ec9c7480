"""The snapshot of a work directory: the same files give the same bytes, and nothing from outside is in it."""

from __future__ import annotations

import os
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from shoal.client import selection
from shoal.client import snapshot as snapshots
from shoal.client.snapshot import take_snapshot
from shoal.errors import SpecError, TooLarge
from shoal.runtime.files.unpack import unpack


def names(root: Path) -> list[str]:
    snapshot = take_snapshot(root)
    if snapshot is None:
        return []
    with snapshot.file as file, tarfile.open(fileobj=file) as tar:
        return tar.getnames()


def write(root: Path, name: str, text: str = "x") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_same_files_give_the_same_digest_whenever_and_wherever(tmp_path: Path) -> None:
    digests = set()
    for place, order in (("one", ["a.py", "b/c.py"]), ("two", ["b/c.py", "a.py"])):
        for stamp, name in enumerate(order):
            path = write(tmp_path / place, name, name)
            os.utime(path, (1000 * stamp, 1000 * stamp))
            path.chmod(0o600 if place == "one" else 0o664)
        snapshot = take_snapshot(tmp_path / place)
        assert snapshot is not None
        digests.add(snapshot.digest)
        with tarfile.open(fileobj=snapshot.file) as tar:
            assert all((m.uid, m.gid, m.uname, m.gname, m.mtime) == (0, 0, "", "", 0) for m in tar)
        snapshot.file.close()
    assert len(digests) == 1


def test_an_edit_or_an_execute_bit_changes_the_digest(tmp_path: Path) -> None:
    path = write(tmp_path, "run.sh")
    digests = []
    for change in (lambda: None, lambda: path.chmod(0o755), lambda: path.write_text("y")):
        change()
        snapshot = take_snapshot(tmp_path)
        assert snapshot is not None
        digests.append(snapshot.digest)
        snapshot.file.close()
    assert len(set(digests)) == 3


def test_git_ignored_files_are_left_out_and_new_ones_are_packed(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, ".gitignore", "data/\n*.ckpt\n")
    for name in ("train.py", "data/big.bin", "model.ckpt", "sub/new.py"):
        write(tmp_path, name)
    subprocess.run(["git", "-C", tmp_path, "add", "train.py"], check=True)
    write(tmp_path, "gone.py")
    subprocess.run(["git", "-C", tmp_path, "add", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert names(tmp_path) == [".gitignore", "sub/new.py", "train.py"]
    assert names(tmp_path / "sub") == ["new.py"]


def test_directory_that_git_ignores_as_a_whole_is_packed_anyway(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write(tmp_path, ".gitignore", "scratch/\n")
    write(tmp_path, "scratch/train.py")
    assert names(tmp_path / "scratch") == ["train.py"]


def test_a_repository_inside_the_repository_is_packed_with_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "init", "-q", tmp_path / "inner"], check=True)
    write(tmp_path, "inner/lib.py")
    write(tmp_path, "train.py")
    assert names(tmp_path) == ["inner/lib.py", "train.py"]


def test_without_git_caches_and_environments_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", ".venv/lib.py", "__pycache__/a.pyc", "node_modules/x.js", "sub/__pycache__/b.pyc"):
        write(tmp_path, name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        os.mkfifo(tmp_path / "pipe")
        assert names(tmp_path) == ["a.py"]


def test_without_git_an_empty_folder_is_packed_unless_excluded(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    for name in ("logs", "out/ckpt", "out/skip", "node_modules", ".venv"):
        (tmp_path / name).mkdir(parents=True)
    snapshot = take_snapshot(tmp_path, exclude=["skip/"])
    assert snapshot is not None
    (tmp_path / "there").mkdir()
    with snapshot.file as file:
        unpack(file.fileno(), snapshot.digest, str(tmp_path / "there"))
    unpacked = sorted(str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*"))
    assert unpacked == ["logs", "out", "out/ckpt", "train.py"]
    assert (tmp_path / "there/logs").is_dir()


@pytest.mark.parametrize("is_git", [True, False])
@pytest.mark.parametrize("is_own", [True, False])
def test_shoal_home_is_never_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_git: bool, is_own: bool
) -> None:
    """Otherwise processes that run as the job's user could read its keys and the admin token."""
    home = tmp_path / "below" / "cluster"
    for name in ("below/cluster/credentials.json", "below/train.py"):
        write(tmp_path, name)
    if is_own:
        monkeypatch.setenv("SHOAL_HOME", str(home))
    else:
        write(home, "home-id")
        write(home, "keys/signing.key")
        write(home, "spool/live/file")
    if is_git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert names(tmp_path) == ["below/train.py"]
    with pytest.raises(SpecError, match="is a home of Shoal, with its keys"):
        take_snapshot(home)
    with pytest.raises(SpecError, match="names no file"):
        take_snapshot(tmp_path, include=["below/cluster/credentials.json"])


def test_an_empty_directory_is_no_snapshot(tmp_path: Path) -> None:
    assert take_snapshot(tmp_path) is None


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "sub/../../secret", "outward/secret"])
def test_a_link_that_leaves_the_tree_is_refused(tmp_path: Path, target: str) -> None:
    root = tmp_path / "work"
    write(root, "sub/a.py")
    write(tmp_path, "secret")
    if target.startswith("outward"):
        (root / "outward").symlink_to("..")
    (root / "link").symlink_to(target)
    with pytest.raises(SpecError, match="leads outside"):
        take_snapshot(root)


@pytest.mark.parametrize("target", ["a file", "a folder"])
def test_hint_about_a_link_out_of_the_tree_works(tmp_path: Path, target: str) -> None:
    root = tmp_path / "my work"
    write(root, "a.py")
    write(tmp_path, "there" if target == "a file" else "there/x")
    (root / "sub").mkdir()
    (root / "sub" / "link").symlink_to("../../there")
    with pytest.raises(SpecError) as refused:
        take_snapshot(root)
    typed = (refused.value.hint or "").split("`")[1]
    subprocess.run(typed, shell=True, check=True, cwd="/")
    assert names(root) == ["a.py", "sub/link" if target == "a file" else "sub/link/x"]


def test_a_link_inside_the_tree_is_kept_as_a_link(tmp_path: Path) -> None:
    write(tmp_path, "data/v1/x")
    (tmp_path / "latest").symlink_to("data/v1")
    snapshot = take_snapshot(tmp_path)
    assert snapshot is not None
    with snapshot.file as file, tarfile.open(fileobj=file) as tar:
        assert tar.getmember("latest").linkname == "data/v1"


def test_names_that_the_control_plane_refuses_are_refused_before_the_upload(tmp_path: Path) -> None:
    write(tmp_path, "a/" * 100 + "x")
    with pytest.raises(SpecError, match=r"entry `a/a/a/.* has 101 parts between slashes") as refused:
        take_snapshot(tmp_path)
    assert "`--exclude PATTERN`" in str(refused.value.hint)


def test_link_that_climbs_behind_another_link_is_refused_before_the_upload(tmp_path: Path) -> None:
    write(tmp_path, "data/v1/x")
    (tmp_path / "latest").symlink_to("data/v1")
    (tmp_path / "all").symlink_to("latest/..")
    with pytest.raises(SpecError, match=r"link `all` leads outside the archive, to `latest/\.\.`"):
        take_snapshot(tmp_path)


def test_a_link_to_itself_is_sent_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert names(tmp_path) == ["loop"]


def test_circular_links_are_packed_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, "work/a.py")
    for link, target in (("one", "two"), ("two", "one"), ("self", "self"), ("below", "one/x")):
        (tmp_path / "work" / link).symlink_to(target)
    snapshot = take_snapshot(tmp_path / "work")
    assert snapshot is not None
    (tmp_path / "there").mkdir()
    with snapshot.file as file:
        unpack(file.fileno(), snapshot.digest, str(tmp_path / "there"))
    assert (tmp_path / "there/one").readlink() == Path("two")
    assert (tmp_path / "there/below").readlink() == Path("one/x")


@pytest.mark.parametrize("pattern", ["one/x", "one/"])
def test_pattern_below_circular_links_matches_nothing(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, "a.py")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(SpecError, match="names no file"):
        take_snapshot(tmp_path, include=[pattern])


def test_circular_link_is_refused_as_a_work_directory(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("one")
    with pytest.raises(SpecError, match="is not a directory"):
        take_snapshot(tmp_path / "one")


def test_too_many_bytes_name_the_largest_entries_and_what_to_type(tmp_path: Path) -> None:
    write(tmp_path, "checkpoints/a", "x" * 3_000_000)
    write(tmp_path, "small.py")
    with pytest.raises(TooLarge) as caught:
        take_snapshot(tmp_path, max_bytes=1 << 20)
    assert "checkpoints (3 MiB)" in str(caught.value.hint)
    assert "--workdir" in str(caught.value.hint)
    assert ".gitignore" not in str(caught.value.hint)
    assert caught.value.exit_code == 2
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    with pytest.raises(TooLarge) as caught:
        take_snapshot(tmp_path, max_bytes=1 << 20)
    assert "ignore them in .gitignore" in str(caught.value.hint)


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path, f"many/{number}")
    with pytest.raises(TooLarge) as caught:
        take_snapshot(tmp_path, max_files=10)
    assert "more than 10 files" in str(caught.value)
    assert "many (11 files)" in str(caught.value.hint)


def test_huge_directory_reports_progress_and_is_not_counted_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        write(tmp_path, f"many/{number}")
    monkeypatch.setattr(selection, "PROGRESS_EVERY", 5)
    monkeypatch.setattr(snapshots, "PROGRESS_EVERY", 5)
    messages: list[str] = []
    with pytest.raises(TooLarge):
        take_snapshot(tmp_path, max_files=10, progress=messages.append)
    assert messages == [f"reading the work directory: {count} files ..." for count in (5, 10)]
    messages.clear()
    snapshot = take_snapshot(tmp_path, progress=messages.append)
    assert snapshot is not None
    snapshot.file.close()
    assert messages[-1] == "packing the work directory: 25 of 30 files ..."


def test_root_directory_is_refused_as_a_work_directory() -> None:
    with pytest.raises(SpecError, match="is the whole machine") as caught:
        take_snapshot(Path("/"))
    assert "`--workdir DIR`" in str(caught.value.hint)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not a directory"):
        take_snapshot(tmp_path / "nowhere")
