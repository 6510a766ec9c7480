"""Scripts that are run here, on files of our own."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from pathlib import Path

import pytest

from shoal.cluster import shell
from shoal.cluster.render import File


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(shell, "STATE_DIR", str(tmp_path / "state"))


def run(script: str, stdin: bytes = b"") -> None:
    subprocess.run(["sh", "-c", script], input=stdin, check=True)


def write(path: Path, content: bytes) -> None:
    owner = f"{pwd.getpwuid(os.getuid()).pw_name}:{grp.getgrgid(os.getgid()).gr_name}"
    run(shell.write(File(str(path), content, owner=owner), is_foreign=True), content)


def test_what_was_there_first_is_what_is_kept(tmp_path: Path) -> None:
    path, kept = tmp_path / "slurm.conf", tmp_path / "slurm.conf.before-shoal"
    path.write_bytes(b"theirs")
    write(path, b"ours")
    for changed in (b"changed once", b"changed twice"):
        path.write_bytes(changed)
        write(path, b"ours")
    assert (path.read_bytes(), kept.read_bytes()) == (b"ours", b"theirs")
    later = {found.read_bytes() for found in tmp_path.glob("slurm.conf.before-shoal.later*")}
    assert later == {b"changed once", b"changed twice"}


def test_names_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.9 old # shoal-cluster\n")
    before = os.open(hosts, os.O_RDONLY)  # who reads it meanwhile
    monkeypatch.setattr(shell, "HOSTS", str(hosts))
    run(shell.write_names(["10.0.0.1 a", "10.0.0.2 b"]))
    wanted = "127.0.0.1 localhost\n10.0.0.1 a # shoal-cluster\n10.0.0.2 b # shoal-cluster\n"
    assert hosts.read_text() == wanted
    assert b"10.0.0.9 old" in os.read(before, 1000)
    os.close(before)
    run(shell.has_names(["10.0.0.1 a", "10.0.0.2 b"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts", "state"]
