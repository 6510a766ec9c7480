"""A restored checkpoint belongs to the user that its job runs as."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from shoal.cli.backup import archive, commands
from shoal.cli.backup.archive import BackupManifest
from shoal.cli.backup.files import walk_of_jobs
from shoal.clock import SystemClock
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.model.people import Project
from shoal.store import Tx, open_store
from tests.support.store_records import a_job

SAVED_AS = 2_000_001
"""The project's uid in the home that was saved."""
PROJECTS = {"vision": FIRST_PROJECT_UID + 7, "speech": FIRST_PROJECT_UID + 8}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def database(path: Path) -> Path:
    def fill(tx: Tx) -> None:
        for number, (name, uid) in enumerate(PROJECTS.items(), start=1):
            tx.people.add_project(Project(name=name, uid=uid, created_at=1.0))
            tx.jobs.add(a_job(number, job_id=f"job_{name}", project=name))

    async def make() -> None:
        store = open_store(f"sqlite:///{path}", clock=SystemClock())
        await store.write(fill)
        await store.close()

    anyio.run(make)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A restored home with checkpoints of two projects, and of a job it does not know."""
    source = tmp_path / "original"
    for job in ("job_vision", "job_speech", "job_later"):
        (source / "checkpoints" / job / "step-1" / "shard").mkdir(parents=True)
        (source / "checkpoints" / job / "step-1" / "shard" / "model.pt").write_text(job)
        for path in ((top := source / "checkpoints" / job), *top.rglob("*")):
            os.chown(path, SAVED_AS, SAVED_AS)
    with archive.open_writer(tmp_path / "made.tar") as writer:
        writer.add(commands.DATABASE, database(tmp_path / "saved.db"))
        for walked in walk_of_jobs(source, "checkpoints", writer.left_out):
            writer.add_walked(walked)
        writer.finish(
            BackupManifest(
                shoal="0", made_at=0.0, seq=0, head="", left_out={}, skipped={}, num_skipped=0, cut=(),
                members=writer.members,
            )
        )  # fmt: skip
    model = writer.members["checkpoints/job_vision/step-1/shard/model.pt"]
    assert (model.uid, model.gid) == (SAVED_AS, SAVED_AS)
    place = tmp_path / "restored"
    assert commands.restore(tmp_path / "made.tar", home=place) == 0
    return place


@as_root
def test_each_checkpoint_belongs_to_its_project_in_the_restored_home(home: Path) -> None:
    for name, uid in PROJECTS.items():
        job = home / "checkpoints" / f"job_{name}"
        result = {(path.stat().st_uid, path.stat().st_gid) for path in (job, *job.rglob("*"))}
        assert result == {(uid, uid)}
    assert (home / "checkpoints").stat().st_uid == 0


@as_root
def test_checkpoint_of_a_job_that_the_restored_home_does_not_know_stays_with_root(home: Path) -> None:
    assert {path.stat().st_uid for path in (home / "checkpoints" / "job_later").rglob("*")} == {0}


@as_root
def test_no_folder_of_a_restored_home_is_open_to_other_users(home: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in home.rglob("*") if path.is_dir()} == {0o700}


@as_root
def test_resumed_job_writes_beside_what_it_saved_and_not_beside_what_others_saved(home: Path) -> None:
    """Write through an open directory, as a sandbox does, because root owns the way to it."""
    code = (
        "import os, sys\n"
        "own, other, uid = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
        "os.setgroups([]), os.setgid(uid), os.setuid(uid)\n"
        "write = os.O_WRONLY | os.O_CREAT\n"
        "os.write(os.open('step-1/shard/model.pt', write, dir_fd=own), b'new')\n"
        "os.mkdir('step-2', dir_fd=own)\n"
        "try:\n"
        "    os.open('step-1/shard/model.pt', os.O_RDONLY, dir_fd=other)\n"
        "except PermissionError:\n"
        "    print('refused')\n"
    )
    own_folder, other = (os.open(home / "checkpoints" / f"job_{name}", os.O_RDONLY) for name in PROJECTS)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(own_folder), str(other), str(PROJECTS["vision"])],
            pass_fds=(own_folder, other), capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(own_folder)
        os.close(other)
    assert (done.stdout, done.stderr) == ("refused\n", "")
    assert (home / "checkpoints" / "job_vision" / "step-2").is_dir()
