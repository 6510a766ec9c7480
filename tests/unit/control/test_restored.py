"""What becomes of open jobs, services, records and users of a restored home, cut at any point."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal import home_identity
from shoal.control import project_uids, restored
from shoal.control.actor import SHOAL
from shoal.control.bootstrap import HOME_ID, SITE_ID, claim_database, home_id_path
from shoal.control.commands import arrays
from shoal.control.commands.audit import verify_transaction
from shoal.control.project_uids import BLOCK, blocks, keep_blocks
from shoal.control.record import record_event
from shoal.control.restored import finish_restore, settle_restored
from shoal.engines.home_records import outcomes_of, set_aside
from shoal.home_identity import RestoreRequest
from shoal.identity.replay import Difference
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.model.people import Project
from shoal.model.service import Service
from shoal.runtime.files import spool
from shoal.store import JobFilter, Tx
from shoal.wire import EndKind, TaskOutcome
from tests.support.planes.bench import ControlPlaneLab, result_of
from tests.support.runtime.tasks import a_task_spec

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's homes are noted")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlPlaneLab:
    monkeypatch.setattr(project_uids, "REGISTRY", tmp_path / "uids")
    home = tmp_path / "home"
    home.mkdir()
    home_id_path(home).write_text("x\n")
    return ControlPlaneLab(home=home)


def word(lab: ControlPlaneLab, *, runs_again: bool) -> RestoreRequest:
    home = lab.settings.home
    request = RestoreRequest(runs_again=runs_again, directory=home_identity.identify(home), site_id="22bb")
    (home / home_identity.REQUEST).write_bytes(home_identity.encode_record(request))
    return request


def share_in(home: Path, attempt_id: str, node: str) -> spool.SpoolTask:
    place = home / "spool" / "live" / attempt_id / node
    place.mkdir(parents=True)
    return spool.SpoolTask(place)


async def test_open_jobs_end_and_can_be_tried_again(lab: ControlPlaneLab) -> None:
    ran, waits = lab.running_job(resources={"cpus": 8}), lab.submit(resources={"cpus": 8})
    many = [lab.submit(resources={"cpus": 8, "nodes": 2}) for _ in range(3)]
    await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=False))
    for job in (ran, waits, *many):
        assert lab.status(job) == "cancelled"
        assert "restored from a copy" in lab.stored_job(job).because
    (event,) = lab.events("home.restored")
    assert (event.data["jobs"], event.data["runs_again"]) == (5, False)
    recorded = home_identity.read_identity(lab.settings.home)
    assert recorded is not None
    assert lab.read(lambda tx: tx.meta.get(SITE_ID)) == recorded.site_id
    assert not (lab.settings.home / home_identity.REQUEST).exists()
    lab.retry(ran)
    assert lab.status(ran) == "queued"


async def test_running_jobs_restart_and_queued_jobs_wait_if_the_original_is_gone(
    lab: ControlPlaneLab,
) -> None:
    ran, waits = lab.running_job(resources={"cpus": 8, "nodes": 2}), lab.submit(resources={"cpus": 8})
    await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=True))
    assert [attempt.reason for attempt in lab.attempts(ran)] == ["lost", None]
    assert (lab.status(ran), lab.status(waits)) == ("queued", "queued")
    assert lab.stored_job(ran).failures == 0


class Killed(Exception):
    pass


def kill_around(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, when: str) -> None:
    """Kill the process before or after this step, the first time that it is taken."""
    real = getattr(owner, name)

    def step(*args: Any, **fields: Any) -> Any:
        if name == "unlink" and args[0].name != home_identity.REQUEST:
            return real(*args, **fields)
        monkeypatch.setattr(owner, name, real)
        if when == "after":
            real(*args, **fields)
        raise Killed

    async def write(change: Any) -> None:
        monkeypatch.setattr(owner, name, real)
        if when == "after":
            await real(change)
        raise Killed

    monkeypatch.setattr(owner, name, write if name == "write" else step)


@pytest.mark.parametrize("is_unpacked", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["claim_block", "write", "write_private", "unlink"])
async def test_start_after_a_kill_at_any_step_of_the_end_is_like_any_other(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch, step: str, when: str, *, is_unpacked: bool
) -> None:
    home = lab.settings.home

    def tie(tx: Tx) -> None:
        tx.meta.set(HOME_ID, "x")
        tx.meta.set(SITE_ID, "11aa")

    await lab.store.write(tie)
    if not is_unpacked:
        original = home_identity.HomeIdentity(site_id="11aa", directory=home_identity.identify(home.parent))
        (home / home_identity.FILE).write_bytes(home_identity.encode_record(original))
    word(lab, runs_again=True)
    owner = {"write": lab.store, "unlink": Path}.get(step, restored)
    kill_around(monkeypatch, owner, step, when)
    request = await claim_database(lab.store, home)
    assert request is not None
    with pytest.raises(Killed):
        await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, request)
    if (request := await claim_database(lab.store, home)) is not None:
        await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, request)
    assert await claim_database(lab.store, home) is None
    assert len(lab.events("home.restored")) == 1
    recorded = home_identity.read_identity(home)
    assert recorded is not None
    assert lab.read(lambda tx: tx.meta.get(SITE_ID)) == recorded.site_id
    assert not (home / home_identity.REQUEST).exists()


@pytest.mark.parametrize(("runs_again", "status"), [(False, "cancelled"), (True, "queued")])
async def test_no_element_of_a_half_recorded_array_starts_in_a_copy(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch, *, runs_again: bool, status: str
) -> None:
    def die() -> None:
        raise Killed

    monkeypatch.setattr(arrays, "MAX_RECORDED", 2)
    lab.store.meanwhile("after write", die)
    with pytest.raises(Killed):
        lab.submit_all(array={"indices": list(range(5))})
    lab.store.meanwhile("after write", lambda: None)
    await settle_restored(
        lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=runs_again)
    )
    await arrays.finish_arrays(lab.core.records, lab.core.link.engine, lab.core.sealing)
    jobs = lab.read(lambda tx: [job for job, _ in tx.jobs.page(JobFilter(), None, 10)])
    assert [lab.status(job) for job in jobs] == [status] * 5


@pytest.mark.parametrize("runs_again", [True, False])
async def test_recorded_end_in_the_copy_counts(lab: ControlPlaneLab, *, runs_again: bool) -> None:
    job = lab.running_job()
    attempt = lab.attempt(job)
    task = share_in(lab.settings.home, attempt.attempt_id, attempt.node_names[0])
    task_spec = a_task_spec(attempt_id=attempt.attempt_id, node=attempt.node_names[0], epoch=attempt.epoch)
    spool.write_task_spec(task, task_spec)
    done = TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=task_spec.identity.node,
        kind=EndKind.SUCCEEDED,
        ended_at=1.0,
    )
    spool.write_outcome(task, done)
    set_aside(lab.settings.home, 2.0)
    await settle_restored(
        lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=runs_again)
    )
    assert lab.status(job) == "succeeded"


async def test_new_projects_of_a_restored_home_have_uids_that_the_original_never_gives(
    lab: ControlPlaneLab,
) -> None:
    def begin(tx: Tx) -> int:
        tx.people.begin_uids(FIRST_PROJECT_UID)
        return tx.people.next_uid()

    first = await lab.store.write(begin)
    await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=True))
    of_copy = await lab.store.write(lambda tx: tx.people.next_uid())
    assert not FIRST_PROJECT_UID <= of_copy < FIRST_PROJECT_UID + BLOCK
    recorded = home_identity.read_identity(lab.settings.home)
    assert recorded is not None
    assert of_copy in blocks(f"x:{recorded.site_id}")
    assert first == FIRST_PROJECT_UID


async def test_services_keep_their_releases_and_have_no_replicas(lab: ControlPlaneLab) -> None:
    service = Service(
        service_id="svc_1",
        project="lab",
        name="chat",
        owner="usr_ana",
        owner_name="ana",
        min_replicas=1,
        max_replicas=4,
        replicas=2,
        scaled_at=0.0,
        created_at=0.0,
    )

    def add(tx: Tx) -> None:
        tx.services.add(service)

    await lab.store.write(add)
    await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=False))
    (resting,) = lab.read(lambda tx: tx.services.all())
    assert (resting.min_replicas, resting.max_replicas, resting.replicas) == (0, 0, 0)
    await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=True))
    assert lab.read(lambda tx: tx.services.all()) == [resting]


def test_no_copied_file_of_a_living_process_stays_in_place(tmp_path: Path) -> None:
    task = spool.SpoolTask(tmp_path / "spool" / "live" / "att_1" / "n1")
    Path(task.work).mkdir(parents=True)
    spool.write_task_spec(task, a_task_spec(attempt_id="att_1", node="n1"))
    Path(task.log).write_text("its words\n")
    (tmp_path / "desk" / "live" / "att_2" / "n1").mkdir(parents=True)
    (tmp_path / "spool" / "standby" / "att_1.n1").mkdir(parents=True)
    (tmp_path / "sockets" / "1").mkdir(parents=True)
    for _ in range(2):
        set_aside(tmp_path, 7.0)
        assert list((tmp_path / "spool" / "live").iterdir()) == []
        assert not (tmp_path / "mailbox" / "live").exists()
        assert not (tmp_path / "spool" / "standby").exists()
        assert not (tmp_path / "sockets").exists()
    kept = spool.SpoolTask(tmp_path / "spool" / "archived" / "att_1" / "n1")
    assert Path(kept.log).read_text() == "its words\n"
    assert not Path(kept.work).exists()
    assert outcomes_of(tmp_path, "att_1")["n1"].kind is EndKind.LOST
    assert outcomes_of(tmp_path, "att_1")["n1"].ended_at == 7.0


def a_project_of_the_original(lab: ControlPlaneLab) -> tuple[Path, int]:
    """A project with a checkpoint and a cache in the copy. The original has noted its uids."""
    original = lab.settings.home.parent / "original"
    original.mkdir()
    first = project_uids.claim_block(original, "x:11aa")

    def add(tx: Tx) -> None:
        tx.people.begin_uids(first + 7)
        project = Project(name="vision", uid=tx.people.next_uid())
        tx.people.add_project(project)
        record_event(tx, "project.created", 0.0, SHOAL, project="vision")

    result_of(lab.store.write(add))
    outside = lab.settings.home.parent / "outside"
    outside.touch()
    for name in ("checkpoints/job_1/step-1", f"caches/vision-{first + 7}/pip"):
        (lab.settings.home / name).mkdir(parents=True)
        (lab.settings.home / name / "file").touch()
        (lab.settings.home / name / "link").symlink_to(outside)
    for path in (outside, *(lab.settings.home / "checkpoints").rglob("*")):
        os.lchown(path, first + 7, first + 7)
    for path in (lab.settings.home / "caches").rglob("*"):
        os.lchown(path, first + 7, first + 7)
    return original, first + 7


def uid_of_vision(lab: ControlPlaneLab) -> int:
    project = lab.read(lambda tx: tx.people.get_project("vision"))
    assert project is not None
    return project.uid


def differences_of_vision(lab: ControlPlaneLab) -> list[Difference]:
    return [
        difference for difference in lab.read(verify_transaction).differences if difference.row == "vision"
    ]


def owners_below(folder: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in folder.rglob("*")}


@needs_root
async def test_projects_of_a_copy_have_other_users_than_those_of_an_original_on_this_machine(
    lab: ControlPlaneLab,
) -> None:
    original, before = a_project_of_the_original(lab)
    await settle_restored(lab.core.records, lab.core.sealing, lab.core.settings, word(lab, runs_again=False))
    uid = uid_of_vision(lab)
    assert uid == next(blocks("x:22bb"))
    home = lab.settings.home
    assert owners_below(home / "checkpoints") == owners_below(home / "caches") == {(uid, uid)}
    assert [path.name for path in (home / "caches").iterdir()] == [f"vision-{uid}"]
    assert (original.parent / "outside").stat().st_uid == before, "nothing changes where a link leads"
    assert await lab.store.write(lambda tx: tx.people.next_uid()) > uid
    assert differences_of_vision(lab) == []
    assert keep_blocks([before], original, "x:11aa") == []


@needs_root
@pytest.mark.parametrize("gone", ["removed", "replaced", "as the operator says"])
async def test_projects_of_a_copy_keep_their_users_where_the_original_is_gone(
    lab: ControlPlaneLab, gone: str
) -> None:
    original, before = a_project_of_the_original(lab)
    if gone == "removed":
        original.rmdir()
    if gone == "replaced":
        original.rmdir()
        original.symlink_to(lab.settings.home)
    await settle_restored(
        lab.core.records,
        lab.core.sealing,
        lab.core.settings,
        word(lab, runs_again=gone == "as the operator says"),
    )
    assert uid_of_vision(lab) == before
    assert owners_below(lab.settings.home / "checkpoints") == {(before, before)}
    drill = lab.settings.home.parent / "drill"
    drill.mkdir()
    assert keep_blocks([before], drill, "x:33cc") == [before], "a drill of the copy has other users"


@needs_root
@pytest.mark.parametrize("when", ["before", "after"])
async def test_users_of_a_copy_change_once_where_its_first_start_is_killed(
    lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    _, before = a_project_of_the_original(lab)
    request = word(lab, runs_again=False)
    kill_around(monkeypatch, lab.store, "write", when)
    with pytest.raises(Killed):
        await finish_restore(lab.core.records, lab.core.settings, request, 0, 0)
    await finish_restore(lab.core.records, lab.core.settings, request, 0, 0)
    uid = uid_of_vision(lab)
    assert owners_below(lab.settings.home / "checkpoints") == {(uid, uid)}
    assert uid == next(blocks("x:22bb")) != before
    assert len(lab.events("project.updated")) == 1
    assert differences_of_vision(lab) == []
