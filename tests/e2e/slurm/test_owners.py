"""Several people on one control plane over Slurm, each under a Unix account of their own; one means harm."""

from __future__ import annotations

import json
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.support.planes.real import until
from tests.support.slurm import owners_plane
from tests.support.slurm.owners_plane import (
    OwnersPlane,
    account_name,
    reachable_folder,
    run_as_user,
    slurm_name,
    unix_accounts,
)
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(300)]


NAMES = account_name("ana"), account_name("bob")


class Person(NamedTuple):
    name: str
    uid: int
    shoal: Shoal


@pytest.fixture(scope="module")
def plane(slurm: SlurmLab) -> Iterator[OwnersPlane]:
    missing = owners_plane.what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with reachable_folder() as folder:
        real = OwnersPlane(folder / "home", slurm)
        real.connect()
        real.up()
        with unix_accounts(*NAMES):
            try:
                yield real
            finally:
                real.down()


@pytest.fixture(scope="module")
def people(plane: OwnersPlane) -> tuple[Person, Person]:
    ana, bob = (Person(name, pwd.getpwnam(name).pw_uid, plane.new_user(name)) for name in NAMES)
    return ana, bob


def log_of(person: Person, job: JobHandle) -> list[str]:
    return [line["text"] for line in person.shoal.logs(job.job_id)]


def test_jobs_of_two_people_run_under_two_accounts(plane: OwnersPlane, people: tuple[Person, Person]) -> None:
    jobs = [plane.run_as(one.shoal, "echo uid=$(id -u) groups=$(id -G)") for one in people]
    for one, job in zip(people, jobs, strict=True):
        plane.until_status(job, "succeeded")
        until(lambda one=one, job=job: log_of(one, job) == [f"uid={one.uid} groups={one.uid}"], "its log")  # type: ignore[misc]
    for one, job in zip(people, jobs, strict=True):
        named = ("-n", slurm_name(job, plane.attempt(job)["attempt_id"]))
        assert plane.lab.run("squeue", "-h", "--states=all", *named, "-o", "%u").split() == [one.name]


def test_nobody_reads_what_is_another_persons(plane: OwnersPlane, people: tuple[Person, Person]) -> None:
    ana, bob = people
    saves = "echo weights > $SHOAL_CHECKPOINT_DIR/model; echo saved; sleep 600"
    hers = plane.run_as(ana.shoal, saves, checkpoint={}, env={"HIDDEN": "hers"})
    plane.until_status(hers, "running")
    until(lambda: log_of(ana, hers) == ["saved"], "it has saved")
    [attempt] = plane.attempts(hers)
    kept = plane.shared / "checkpoints" / hers.job_id
    said = plane.shared / "slurm" / ana.name / f"shoal-{attempt['attempt_id']}.0.out"
    share = plane.spool / f"shoal-{ana.uid}" / "spool" / "live" / attempt["attempt_id"] / attempt["nodes"][0]
    for path in (kept, kept / "model", said.parent, said, share, share / "work"):
        assert path.stat().st_uid == ana.uid, path
    pids = [pid for pid in plane.lab.pids_on(attempt["nodes"][0]) if _uid(pid) == ana.uid]
    assert len(pids) >= 3  # a keeper, a supervisor, a rank
    secrets = [kept, kept / "model", said, said.parent, share, share / "task_spec.json", share / "log"]
    secrets += [plane.home / "shoal.db", plane.home / "keys" / "signing.key"]
    look = "; ".join(
        [
            *(f"cat {path} && echo READ {path}; ls {path} && echo READ {path}" for path in secrets),
            *(f"cat /proc/{pid}/environ && echo READ {pid}" for pid in pids),
            f"kill -9 {' '.join(map(str, pids))} && echo KILLED",
            "echo looked",
        ]
    )
    spying = plane.run_as(bob.shoal, f"({look}) 2>/dev/null")
    plane.until_status(spying, "succeeded")
    until(lambda: log_of(bob, spying)[-1:] == ["looked"], "his log")
    assert log_of(bob, spying) == ["looked"]
    # And without the walls of a job, as he is when he logs in.
    assert run_as_user(bob.uid, "sh", "-c", look, lab=plane.lab).stdout == "looked\n"
    number = _job_id(plane, ana, slurm_name(hers, attempt["attempt_id"]))
    script = run_as_user(bob.uid, "scontrol", "write", "batch_script", number, "-", lab=plane.lab)
    assert ("Invalid user id" in script.stderr, script.stdout) == (True, "")
    assert "denied" in run_as_user(bob.uid, "scancel", number, lab=plane.lab).stderr
    assert hers.refresh().status == "running"
    hers.stop()
    plane.until_status(hers, "cancelled")


def test_jobs_of_another_user_named_like_ours_are_neither_believed_nor_cancelled(
    plane: OwnersPlane, people: tuple[Person, Person]
) -> None:
    ana, bob = people
    whole = ["--job-name=filler", "--exclusive", "--wrap=sleep 600", "-o/dev/null"]
    for node in plane.lab.names:
        plane.lab.run("sbatch", *whole, f"--nodelist={node}")
    fillers = ("squeue", "-h", "-t", "R", "-n", "filler")
    plane.lab.until(lambda: len(plane.lab.run(*fillers).splitlines()) == 3, "the fillers run")
    job = plane.run_as(ana.shoal, "true")
    plane.until_explained(job, "is PENDING (")
    attempt_id = plane.attempts(job)[-1]["attempt_id"]
    name = slurm_name(job, attempt_id)
    forged = f"mine\n99999|RUNNING|{ana.name}|N/A|{name}|Forged"
    twins = [
        _twin(plane, bob, one, f"Shoal job default/1, attempt {attempt_id}, replacement 0")
        for one in (name, forged)
    ]
    number = _job_id(plane, ana, name)
    plane.lab.run("scontrol", "hold", number)  # so that what is told afterwards was seen after the twins came
    held = f"Slurm job {number} is PENDING (JobHeldAdmin)"
    plane.until_explained(job, held)
    job.stop()
    plane.until_status(job, "cancelled")
    hers = ("squeue", "-h", "-t", "PD", "-u", ana.name)
    plane.lab.until(lambda: not plane.lab.run(*hers).strip(), "hers has left Slurm's queue")
    assert [_state(plane, twin) for twin in twins] == ["PENDING", "PENDING"]
    plane.lab.run("scancel", "--name=filler")
    plane.lab.run("scancel", *twins)


def test_owners_without_an_account_and_root_are_told_why_nothing_runs(
    plane: OwnersPlane, people: tuple[Person, Person]
) -> None:
    ghost = plane.new_user("ghost-of-nobody")
    job = plane.run_as(ghost, "true")
    plane.until_status(job, "failed")
    told = plane.command("why", job.ref).stdout
    assert "none is called `ghost-of-nobody`" in told
    assert "submit as a user who has one" in " ".join(told.split())
    mine = plane.submit("true", resources={"cpus": 1})  # the first admin is named after root
    plane.until_status(mine, "failed")
    assert "root's (uid 0)" in plane.command("why", mine.ref).stdout
    number = plane.new_user("0")
    odd = plane.run_as(number, "true")
    plane.until_status(odd, "failed")
    assert "none is called `0`" in plane.command("why", odd.ref).stdout


def test_a_place_that_another_user_took_first_is_not_used(
    plane: OwnersPlane, people: tuple[Person, Person]
) -> None:
    _, bob = people
    with unix_accounts(account_name("eve")) as uids:
        [(name, uid)] = uids.items()
        taken = plane.spool / f"shoal-{uid}"
        assert run_as_user(bob.uid, "mkdir", "-m", "777", str(taken), lab=plane.lab).returncode == 0
        eve = Person(name, uid, plane.new_user(name))
        job = plane.run_as(eve.shoal, "echo fine")
        plane.until_status(job, "succeeded")
        until(lambda: log_of(eve, job) == ["fine"], "its log")
        assert list(taken.iterdir()) == []


def test_a_lost_node_is_begun_anew_under_its_owners_account(
    plane: OwnersPlane, people: tuple[Person, Person]
) -> None:
    ana, _ = people
    saves = "id -u > $SHOAL_CHECKPOINT_DIR/$SHOAL_RANK.$SHOAL_RENDEZVOUS_ROUND; exec sleep 600"
    job = plane.run_as(ana.shoal, saves, resources={"nodes": 2, "cpus": 1}, checkpoint={}, retry={"max": 3})
    kept = plane.shared / "checkpoints" / job.job_id
    until(lambda: {"0.0", "1.0"} <= {path.name for path in kept.glob("*")}, "both ranks have saved")
    done = plane.command("drill", "kill-node", job.ref, "--window", "0s", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)["result"]
    assert (told["outcome"], told["new_attempts"]) == ("recovered", 0)
    until(lambda: {"0.1", "1.1"} <= {path.name for path in kept.glob("*")}, "both have saved again")
    assert {path.stat().st_uid for path in kept.rglob("*")} == {ana.uid}
    assert {path.read_text() for path in kept.rglob("*") if path.is_file()} == {f"{ana.uid}\n"}
    job.stop()
    plane.until_status(job, "cancelled")


def _uid(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def _twin(plane: OwnersPlane, whose: Person, name: str, told: str) -> str:
    words = ["--parsable", "--hold", f"--job-name={name}", f"--comment={told}", "--chdir=/", "-o/dev/null"]
    done = run_as_user(whose.uid, "sbatch", *words, "--wrap=true", lab=plane.lab)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _job_id(plane: OwnersPlane, whose: Person, name: str) -> str:
    return plane.lab.run("squeue", "-h", "-t", "PD,R", "-n", name, "-u", whose.name, "-o", "%i").strip()


def _state(plane: OwnersPlane, job_id: str) -> str:
    return plane.lab.run("squeue", "-h", "--states=all", "-j", job_id, "-o", "%T").strip()
