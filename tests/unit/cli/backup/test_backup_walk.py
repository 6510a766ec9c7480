"""Backup of directories that jobs change meanwhile: jobs can neither redirect it nor make it fail."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from shoal.cli.backup import archive, commands, files
from shoal.cli.backup.archive import BackupManifest
from shoal.settings import Settings, load_settings
from shoal.store import LogHead

SECRET = b"another project's"
UID, OTHER_UID = 2_000_001, 2_000_002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes files of two users")


class Home:
    """A home with a job's checkpoint directory, and a folder outside of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.settings: Settings = replace(load_settings({}), home=place / "home")
        self.job = place / "home" / "checkpoints" / "job_1"
        self.job.mkdir(parents=True)
        self.elsewhere = place / "elsewhere"
        self.elsewhere.mkdir()
        (self.elsewhere / "model.pt").write_bytes(SECRET)

    def file(self, name: str, content: bytes = b"weights") -> Path:
        path = self.job / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def give(self, uid: int) -> None:
        for path in (self.job, *self.job.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)

    def save(
        self, meanwhile: Callable[[str], None] = lambda _: None, with_: str = "checkpoints"
    ) -> BackupManifest:
        """`meanwhile`: called just before each file is opened."""
        choices = {with_} if with_ else set()
        return commands._write(self.settings, self.place / "made.tar", choices, meanwhile)

    def saved(self) -> dict[str, bytes]:
        result: dict[str, bytes] = {}

        def take(name: str, file: IO[bytes], size: int) -> None:
            result[name] = file.read(size)

        archive.read_archive(self.place / "made.tar", take)
        return {
            name.removeprefix("checkpoints/"): content
            for name, content in result.items()
            if name.startswith("checkpoints/")
        }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    database = tmp_path / "copy.db"
    database.write_bytes(b"rows")

    @contextlib.contextmanager
    def copied(*_: object) -> Iterator[tuple[Path, LogHead]]:
        yield database, LogHead(1, "x")

    monkeypatch.setattr(commands, "_database", copied)
    return Home(tmp_path)


def test_directory_that_becomes_a_link_before_its_file_is_opened_leads_nowhere_else(home: Home) -> None:
    home.file("step/model.pt")

    def exchange(progress: str) -> None:
        if progress.endswith("step/model.pt"):
            (home.job / "step").rename(home.place / "aside")
            (home.job / "step").symlink_to(home.elsewhere)

    home.save(exchange)
    assert home.saved() == {"job_1/step/model.pt": b"weights"}


def test_directory_that_becomes_a_link_after_it_was_listed_is_left_out(home: Home) -> None:
    home.file("a/model.pt")
    home.file("b/model.pt")

    def exchange(progress: str) -> None:
        if progress.endswith("job_1/a/model.pt"):
            (home.job / "b" / "model.pt").unlink()
            (home.job / "b").rmdir()
            (home.job / "b").symlink_to(home.elsewhere)

    manifest = home.save(exchange)
    assert home.saved() == {"job_1/a/model.pt": b"weights"}
    assert manifest.skipped == {"checkpoints/job_1/b": "it is a symbolic link"}


def test_folder_that_is_a_link_to_another_disk_is_named_and_does_not_end_the_backup(home: Home) -> None:
    home.job.rmdir()
    home.job.parent.rmdir()
    home.job.parent.symlink_to(home.elsewhere)
    assert home.save(with_="").left_out == {}
    (home.place / "made.tar").unlink()
    manifest = home.save()
    assert home.saved() == {}
    assert list(manifest.skipped) == ["checkpoints"]


def test_what_is_neither_file_nor_directory_is_named(home: Home) -> None:
    home.file("model.pt")
    (home.job / "latest").symlink_to(home.elsewhere / "model.pt")
    os.mkfifo(home.job / "pipe")
    with contextlib.chdir(home.job), socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
    manifest = home.save()
    assert home.saved() == {"job_1/model.pt": b"weights"}
    assert manifest.skipped == {
        "checkpoints/job_1/latest": "it is a symbolic link",
        "checkpoints/job_1/pipe": "it is not a plain file",
        "checkpoints/job_1/socket": "it is not a plain file",
    }


@as_root
def test_hard_link_to_a_file_of_another_project_is_left_out(home: Home) -> None:
    home.file("model.pt")
    home.give(UID)
    os.chown(home.elsewhere / "model.pt", OTHER_UID, OTHER_UID)
    (home.job / "mine.pt").hardlink_to(home.elsewhere / "model.pt")
    manifest = home.save()
    assert home.saved() == {"job_1/model.pt": b"weights"}
    assert str(OTHER_UID) in manifest.skipped["checkpoints/job_1/mine.pt"]


@as_root
def test_hard_link_that_takes_the_place_of_a_file_before_it_is_opened_is_left_out(home: Home) -> None:
    home.file("model.pt")
    home.give(UID)

    def exchange(progress: str) -> None:
        if progress.endswith("model.pt"):
            (home.job / "model.pt").unlink()
            (home.job / "model.pt").hardlink_to(home.elsewhere / "model.pt")

    manifest = home.save(exchange)
    assert home.saved() == {}
    assert list(manifest.skipped) == ["checkpoints/job_1/model.pt"]


def test_many_names_of_one_file_are_saved_once(home: Home) -> None:
    first = home.file("a.pt")
    (home.job / "b.pt").hardlink_to(first)
    manifest = home.save()
    assert home.saved() == {"job_1/a.pt": b"weights"}
    assert manifest.skipped == {"checkpoints/job_1/b.pt": "it is another name of checkpoints/job_1/a.pt"}


def test_file_that_becomes_shorter_while_it_is_read_is_filled_up_and_not_restored(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home.file("model.pt", b"x" * 3_000_000)
    home.file("next.pt")
    info = archive._info

    def shorten(name: str, size: int, *more: int) -> object:
        if name.endswith("model.pt"):
            os.truncate(path, 1_000_000)  # its size was read, its content was not
        return info(name, size, *more)

    monkeypatch.setattr(archive, "_info", shorten)
    manifest = home.save()
    assert manifest.skipped == {
        "checkpoints/job_1/model.pt": "it became 2,000,000 bytes shorter while it was read"
    }
    assert home.saved()["job_1/next.pt"] == b"weights"
    unpacked = home.place / "unpacked"
    unpacked.mkdir()
    commands._unpack(home.place / "made.tar", unpacked, lambda _: None)
    assert [path.name for path in (unpacked / "checkpoints" / "job_1").iterdir()] == ["next.pt"]


def test_file_and_directory_that_are_removed_meanwhile_are_named(home: Home) -> None:
    for name in ("a/f.pt", "b/f.pt", "c.pt"):
        home.file(name)

    def remove(progress: str) -> None:
        if progress.endswith("job_1/a/f.pt"):
            (home.job / "a" / "f.pt").unlink()
            (home.job / "b" / "f.pt").unlink()
            (home.job / "b").rmdir()

    manifest = home.save(remove)
    assert home.saved() == {"job_1/c.pt": b"weights"}
    assert manifest.skipped == dict.fromkeys(
        ("checkpoints/job_1/a/f.pt", "checkpoints/job_1/b"), "it was removed meanwhile"
    )


def test_file_of_holes_takes_no_room_in_what_is_told_and_is_left_out(home: Home) -> None:
    home.file("model.pt", b"x" * 5_000)
    home.file("sparse.pt", b"x")
    os.truncate(home.job / "sparse.pt", 1 << 40)
    manifest = home.save(with_="")
    assert 5_000 <= manifest.left_out["checkpoints"] < 1 << 20
    (home.place / "made.tar").unlink()
    manifest = home.save()
    assert list(home.saved()) == ["job_1/model.pt"]
    assert manifest.skipped == {"checkpoints/job_1/sparse.pt": "it has more than 64 MiB of holes"}


def test_file_that_grows_after_it_was_judged_is_saved_as_long_as_it_was(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job could make the file 16 TiB of holes at that moment, and a backup writes every hole."""
    path, judge = home.file("model.pt"), files._too_sparse

    def judge_and_grow(fd: int, *more: os.stat_result) -> str:
        problem = judge(fd, *more)
        if os.path.samestat(os.fstat(fd), path.stat()):
            os.truncate(path, 1 << 26)
        return problem

    monkeypatch.setattr(files, "_too_sparse", judge_and_grow)
    assert home.save().skipped == {}
    assert home.saved() == {"job_1/model.pt": b"weights"}


def test_file_with_few_holes_is_saved_whole(home: Home) -> None:
    path = home.file("model.pt", b"x")
    os.truncate(path, 1 << 20)
    assert home.save().skipped == {}
    assert home.saved()["job_1/model.pt"] == b"x" + bytes((1 << 20) - 1)


def test_one_job_takes_no_more_than_its_share_of_a_backup(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    monkeypatch.setattr(files, "MAX_NAMED", 2)
    for number in range(9):
        home.file(f"{number}.pt")
    other = home.settings.home / "checkpoints" / "job_2" / "model.pt"
    other.parent.mkdir()
    other.write_bytes(b"weights")
    for name in ("pipe1", "pipe2", "pipe3"):
        os.mkfifo(other.with_name(name))
    manifest = home.save()
    assert len([name for name in home.saved() if name.startswith("job_1/")]) == 5
    assert "job_2/model.pt" in home.saved()
    assert "more than 5 files" in manifest.skipped["checkpoints/job_1"]
    assert (len(manifest.skipped), manifest.num_skipped) == (2, 4)


def test_trees_deeper_and_names_longer_than_a_restored_home_could_have_are_left_out(home: Home) -> None:
    home.file("model.pt")
    with contextlib.chdir(home.job):
        for _ in range(70):
            Path("d").mkdir()
            os.chdir("d")
    with contextlib.chdir(home.job):
        for _ in range(10):
            Path("x" * 250).mkdir()
            os.chdir("x" * 250)
    manifest = home.save()
    assert home.saved() == {"job_1/model.pt": b"weights"}
    reasons = sorted(manifest.skipped.values())
    assert reasons == ["it lies more than 64 directories deep", "its path has more than 2,000 bytes"]
