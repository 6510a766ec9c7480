"""What a backup includes, leaves out and restores while jobs change the home."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from shoal.cli.backup import archive, commands
from shoal.cli.backup.archive import BackupManifest
from shoal.cli.backup.files import SkippedFiles
from shoal.cli.control_plane import daemon
from shoal.cli.control_plane.home import REMEMBERED
from shoal.errors import ShoalError, SpecError, StateError
from shoal.settings import load_settings
from shoal.store import LogHead

NAMES = ("epoch=3-step=100.ckpt", "a b,c:d.pt", "ünï.pt", "100%.pt", "x\ny", os.fsdecode(b"\xff.pt"))


def packed(folder: Path, names: tuple[str, ...]) -> Path:
    target = folder / "made.tar"
    with archive.open_writer(target) as writer:
        for name in names:
            (folder / "content").write_bytes(os.fsencode(name))
            writer.add(f"checkpoints/job_1/{name}", folder / "content")
        writer.finish(
            BackupManifest(
                shoal="0", made_at=0.0, seq=0, head="", left_out={}, skipped={}, num_skipped=0, cut=(),
                members=writer.members,
            )
        )  # fmt: skip
    return target


def test_checkpoints_are_restored_under_any_file_name(tmp_path: Path) -> None:
    result: dict[str, bytes] = {}

    def take(name: str, file: IO[bytes], size: int) -> None:
        result[name] = file.read(size)

    archive.read_archive(packed(tmp_path, NAMES), take)
    assert result == {f"checkpoints/job_1/{name}": os.fsencode(name) for name in NAMES}


@pytest.mark.parametrize("name", ["../../out", "a/../../../out", ".", "", "a//b"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="does not belong in it"):
        archive.read_archive(packed(tmp_path, (name,)), lambda _name, _file, _size: None)


def test_member_that_is_mostly_holes_is_refused(tmp_path: Path) -> None:
    """A backup of one kilobyte could ask for exabytes of disk."""
    created = tmp_path / "made.tar"
    with tarfile.open(created, "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("checkpoints/a")
        sparse = {"major": "0", "minor": "1", "map": "0,0", "size": str(1 << 62)}
        info.pax_headers = {f"GNU.sparse.{name}": value for name, value in sparse.items()}
        tar.addfile(info, io.BytesIO())
    with pytest.raises(StateError, match="does not belong in it"):
        archive.read_archive(created, lambda _name, _file, _size: None)


def test_manifest_that_is_nested_deeply_is_damage(tmp_path: Path) -> None:
    created, manifest = tmp_path / "made.tar", b'{"other": ' + b"[" * 100_000
    with tarfile.open(created, "w") as tar:
        info = tarfile.TarInfo(archive.MANIFEST)
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    with pytest.raises(StateError, match="is not a complete backup"):
        archive.read_archive(created, lambda _name, _file, _size: None)


def test_caches_and_notes_of_this_machine_are_no_part_of_a_backup(tmp_path: Path) -> None:
    cache = tmp_path / "caches" / "default-1000" / "huggingface"
    cache.mkdir(parents=True)
    (cache / "model.bin").write_text("many bytes")
    (tmp_path / "uids").mkdir()
    (tmp_path / "uids" / "1900000000").write_text("another home's")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "signing").write_text("key")
    result = commands._files(replace(load_settings({}), home=tmp_path), set(), SkippedFiles())
    assert [file.name for file in result] == ["keys/signing"]


def test_a_backup_without_its_database_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def removed(*_: object) -> Iterator[tuple[Path, LogHead]]:
        yield tmp_path / "removed.copy", LogHead(1, "x")

    monkeypatch.setattr(commands, "_database", removed)
    settings = replace(load_settings({}), home=tmp_path / "home")
    (tmp_path / "home").mkdir()
    with pytest.raises(StateError, match="copy of the database"):
        commands._write(settings, tmp_path / "made.tar", set(), lambda _: None)
    assert not (tmp_path / "made.tar").exists()


def test_link_in_a_circle_is_a_place_like_others(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("one")
    settings = replace(load_settings({}), home=tmp_path / "home")
    assert commands._target(tmp_path / "one", settings) == tmp_path / "one"
    assert not daemon._is_in_home(tmp_path / "home", f"sqlite:///{tmp_path}/one")


def test_restored_home_writes_no_anchor_where_the_original_does(tmp_path: Path) -> None:
    options = {"anchor_copy": "/mnt/second", "listen": "127.0.0.1:1"}
    (tmp_path / REMEMBERED).write_text(json.dumps(options))
    commands._save_options(tmp_path, None)
    assert json.loads((tmp_path / REMEMBERED).read_text()) == {"listen": "127.0.0.1:1"}


def saved(folder: Path) -> Path:
    """A backup of a home with one file in it."""
    target = folder / "saved.tar"
    with archive.open_writer(target) as writer:
        (folder / "content").write_text("x")
        writer.add("archives/a", folder / "content")
        writer.finish(
            BackupManifest(
                shoal="0", made_at=0.0, seq=0, head="", left_out={}, skipped={}, num_skipped=0, cut=(),
                members=writer.members,
            )
        )  # fmt: skip
    return target


@pytest.mark.parametrize("is_there", [False, True])
def test_home_can_be_restored_where_another_backup_was_refused(tmp_path: Path, *, is_there: bool) -> None:
    good, home = saved(tmp_path), tmp_path / "home"
    bad = tmp_path / "bad.tar"
    bad.write_bytes(good.read_bytes()[:1_024])  # its first member, and no manifest
    if is_there:
        home.mkdir()
    with pytest.raises(StateError, match="not a complete backup"):
        commands.restore(bad, home=home)
    assert commands.restore(good, home=home) == 0
    assert (home / "archives" / "a").read_text() == "x"
    assert home.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.glob(".home*")) == []


def test_restore_replaces_nothing_that_was_put_into_the_new_home_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, keep = tmp_path / "home", commands._save_options

    def put_and_keep(part: Path, database: str | None) -> None:
        home.mkdir()
        (home / "precious").write_text("x")
        keep(part, database)

    monkeypatch.setattr(commands, "_save_options", put_and_keep)
    with pytest.raises(StateError, match="cannot move the restored home"):
        commands.restore(saved(tmp_path), home=home)
    assert [path.name for path in home.iterdir()] == ["precious"]


@pytest.mark.parametrize("when", ["a full disk", "a target before", "a target meanwhile"])
def test_restore_fills_the_database_last_and_says_where_it_has_to_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    home, filled, keep = tmp_path / "home", list[str](), commands._save_options

    def keep_options(part: Path, database: str | None) -> None:
        if when == "a full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        keep(part, database)
        if when == "a target before":
            home.mkdir()
            (home / "precious").touch()

    def load(source: Path, url: str, _: object) -> None:
        filled.append(url)
        source.touch()
        home.mkdir()
        (home / "precious").touch()

    monkeypatch.setattr(commands, "_save_options", keep_options)
    monkeypatch.setattr(commands, "load_postgres", load)
    with pytest.raises((OSError, ShoalError)) as failed:
        commands.restore(saved(tmp_path), home=home, database="postgresql://127.0.0.1/d")
    assert bool(filled) is (when == "a target meanwhile")
    if isinstance(failed.value, ShoalError):
        assert ("`dropdb NAME`" in str(failed.value.hint)) is bool(filled)
    assert list(tmp_path.glob(".home*")) == []


def test_backup_goes_to_a_disk_that_has_no_hard_links_and_replaces_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_source: Path, target: Path) -> None:
        if target.parent.name == "race":
            target.write_text("another's")
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    for name in ("stick", "race"):
        (tmp_path / name).mkdir()
    created = saved(tmp_path / "stick")
    archive.read_archive(created, lambda _name, file, _size: archive.copy_out(file, None))
    with pytest.raises(StateError, match="not permitted"):
        saved(tmp_path / "race")
    assert (tmp_path / "race" / "saved.tar").read_text() == "another's"


def test_backup_that_is_not_there_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="No such file"):
        commands.backup(tmp_path / "missing.tar", verify=True)


def test_restore_refuses_a_mount_point_before_it_unpacks() -> None:
    with pytest.raises(SpecError):
        commands.restore(Path("/nowhere.tar"), home=Path("/proc"))
