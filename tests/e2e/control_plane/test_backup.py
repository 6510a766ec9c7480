"""A home is saved while it runs, and a drill restores it beside the original."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host.postgres import PostgresServer, postgres
from tests.support.planes.real import RankGate, RealPlane, running_plane

__all__ = ["postgres"]  # pytest finds the fixture by its name


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[RealPlane]:
    with running_plane(tmp_path / "home", demo="1x2") as real:
        yield real


def saved(plane: RealPlane, to: Path, *flags: str) -> dict[str, object]:
    done = plane.command("backup", str(to), "--json", *flags)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def check_drill(plane: RealPlane, restored: RealPlane, done: str, running: str) -> None:
    """The restored home has the history, event log and tokens of the original, and its jobs do not run."""
    refused = restored.command("up", "--listen", "127.0.0.1:0")
    assert "`shoal up --restored`" in refused.stderr
    token = json.loads((plane.home / "credentials.json").read_text())["servers"]["local"]["token"]
    up = restored.command("up", "--restored", "--listen", "127.0.0.1:0")
    assert up.returncode == 0, up.stderr
    try:
        restored.env["SHOAL_TOKEN"] = token
        assert restored.command("audit", "--verify").returncode == 0
        queue = json.loads(restored.command("queue", "--all", "--json").stdout)
        statuses = {f"{job['project']}/{job['number']}": job["status"] for job in queue}
        assert statuses == {done: "succeeded", running: "cancelled"}
        again = restored.command("retry", done)
        assert again.returncode == 0, again.stderr
        assert restored.command("logs", "-f", done).returncode == 0, "its working directory was saved with it"
    finally:
        restored.down()


def test_a_running_home_is_saved_and_restored_beside_the_original(
    plane: RealPlane, gate: RankGate, tmp_path: Path
) -> None:
    (plane.home.parent / "work").mkdir()
    (plane.home.parent / "work" / "data.txt").write_text("from the snapshot")
    ran = plane.command("run", "--workdir", "work", "--cpus", "0.1", "--", "cat", "data.txt")
    assert ran.returncode == 0, ran.stderr
    job = plane.submit(
        f"echo saved > checkpoint/model.pt; {gate.run_line()}", checkpoint={"path": "checkpoint"}
    )
    gate.wait_for_ranks()
    plane.until_status(job, "running")
    file = tmp_path / "saved.tar"
    report = saved(plane, file, "--with", "logs,checkpoints")
    assert report["skipped"] == {}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert report["path"] == str(file)
    assert not list((plane.home / "backup").iterdir())
    assert sorted(tmp_path.glob(".saved*")) == []
    again = plane.command("backup", str(file))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    assert plane.command("backup", str(plane.home / "inside.tar")).returncode == 2

    assert "is intact" in plane.command("backup", "--verify", str(file)).stdout
    bad = tmp_path / "bad.tar"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    bad.write_bytes(content)
    assert plane.command("backup", "--verify", str(bad)).returncode == 3
    bad.write_bytes(file.read_bytes()[:-20_000])
    assert plane.command("restore", str(bad), "--home", str(tmp_path / "half")).returncode == 3
    assert not (tmp_path / "half" / "shoal.db").exists()

    done = plane.command("restore", str(file), "--home", str(tmp_path / "drill"))
    assert done.returncode == 0, done.stderr
    assert plane.command("restore", str(file), "--home", str(tmp_path / "drill")).returncode == 2
    (ours,), (theirs,) = (
        list(home.glob("checkpoints/*/model.pt")) for home in (plane.home, tmp_path / "drill")
    )
    assert theirs.read_text() == "saved\n"
    assert (theirs.stat().st_uid, theirs.parent.stat().st_uid) == (ours.stat().st_uid, ours.stat().st_uid)
    check_drill(plane, RealPlane(tmp_path / "drill"), "default/1", job.ref)
    assert not gate.is_gone(0)
    gate.open()
    plane.until_status(job, "succeeded")


def test_a_home_on_postgres_is_saved_and_restored_to_another_database_and_to_sqlite(
    postgres: PostgresServer, gate: RankGate, tmp_path: Path
) -> None:
    url = postgres.url(postgres.new_database())
    with running_plane(tmp_path / "home", "--database", url, demo="1x2") as plane:
        plane.until_status(plane.submit("true"), "succeeded")
        job = plane.submit(gate.run_line())
        gate.wait_for_ranks()
        plane.until_status(job, "running")
        saved(plane, tmp_path / "saved.tar")
        assert plane.command("backup", "--verify", str(tmp_path / "saved.tar")).returncode == 0
        for name, flags in (("lite", ()), ("pg", ("--database", postgres.url(postgres.new_database())))):
            drill = RealPlane(tmp_path / name)
            done = drill.command("restore", str(tmp_path / "saved.tar"), "--home", str(drill.home), *flags)
            assert done.returncode == 0, done.stderr
            assert (drill.home / "shoal.db").exists() == (name == "lite")
            check_drill(plane, drill, "default/1", job.ref)
        taken = plane.command(
            "restore", str(tmp_path / "saved.tar"), "--home", str(tmp_path / "no"), "--database", url
        )
        assert (taken.returncode, "is not empty" in taken.stderr) == (3, True)
        assert not gate.is_gone(0)


def test_admin_token_is_made_if_all_were_lost(postgres: PostgresServer, tmp_path: Path) -> None:
    shared = ("--database", postgres.url(postgres.new_database()), "--shared", str(tmp_path / "shared"))
    with running_plane(tmp_path / "first", *shared, demo="1x2") as first:
        assert first.command("up", "--admin-token").returncode == 3, "not under a running one"
        first.command("down")
        with running_plane(tmp_path / "second", *shared, demo="1x2") as second:
            assert "shoal up --admin-token" in second.command("queue").stderr
            second.command("down")
            done = second.command("up", "--admin-token", "--json")
            assert json.loads(done.stdout)["token"], done.stderr
            assert second.command("queue").returncode == 0
            log = second.command("events", "--kind", "token.", "--json").stdout
            assert "in place of a lost one" in log
            second.command("down")


def test_a_backup_that_does_not_fit_leaves_nothing(plane: RealPlane, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = (
        f"mount -t tmpfs -o size=64k none {small} && "
        f"{{ {sys.executable} -m shoal.cli.main backup {small}/b.tar; ls -A {small}; }}"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], env=plane.env, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert "No space left on device" in done.stderr
