"""What becomes of open jobs, services, records and users of a restored home, cut anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal import site
from shoal.control import arrays, restored, uids
from shoal.control.actor import SHOAL
from shoal.control.audit import verdict_of
from shoal.control.first import HOME_ID, SITE_ID, claim, home_id_path
from shoal.control.record import note
from shoal.control.restored import finish, settle_restored
from shoal.control.uids import BLOCK, blocks, keep_blocks
from shoal.engines.set_aside import outcomes_of, set_aside
from shoal.identity.replay import Difference
from shoal.loopback import FIRST_PROJECT_UID
from shoal.model.people import Project
from shoal.model.service import Service
from shoal.runtime import spool
from shoal.site import RestoreRequest
from shoal.store import JobFilter, Tx
from shoal.wire import EndKind, NodeOutcome
from tests.support.lab import Lab, now
from tests.support.shares import an_order

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's homes are noted")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(uids, "REGISTRY", tmp_path / "uids")
    home = tmp_path / "home"
    home.mkdir()
    home_id_path(home).write_text("x\n")
    return Lab(home=home)


def word(lab: Lab, *, runs_again: bool) -> RestoreRequest:
    home = lab.settings.home
    request = RestoreRequest(runs_again=runs_again, directory=site.identify(home), site_id="22bb")
    (home / site.REQUEST).write_bytes(site.encoded(request))
    return request


def share_in(home: Path, attempt_id: str, node: str) -> spool.Share:
    place = home / "spool" / "live" / attempt_id / node
    place.mkdir(parents=True)
    return spool.Share(place)


async def test_open_jobs_end_and_can_be_tried_again(lab: Lab) -> None:
    ran, waits = lab.running(resources={"cpus": 8}), lab.submit(resources={"cpus": 8})
    many = [lab.submit(resources={"cpus": 8, "nodes": 2}) for _ in range(3)]
    await settle_restored(lab.core, word(lab, runs_again=False))
    for job in (ran, waits, *many):
        assert lab.status(job) == "cancelled"
        assert "restored from a copy" in lab.job(job).because
    (told,) = lab.events("home.restored")
    assert (told.data["jobs"], told.data["runs_again"]) == (5, False)
    recorded = site.read_site(lab.settings.home)
    assert recorded is not None
    assert lab.read(lambda tx: tx.meta.get(SITE_ID)) == recorded.site_id
    assert not (lab.settings.home / site.REQUEST).exists()
    lab.retry(ran)
    assert lab.status(ran) == "queued"


async def test_what_ran_begins_again_and_what_waited_waits_where_the_original_is_gone(lab: Lab) -> None:
    ran, waits = lab.running(resources={"cpus": 8, "nodes": 2}), lab.submit(resources={"cpus": 8})
    await settle_restored(lab.core, word(lab, runs_again=True))
    assert [attempt.reason for attempt in lab.attempts(ran)] == ["lost", None]
    assert (lab.status(ran), lab.status(waits)) == ("queued", "queued")
    assert lab.job(ran).failures == 0


class Killed(Exception):
    pass


def kill_around(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, when: str) -> None:
    """Have the process killed before or after this step, the first time that it is taken."""
    real = getattr(owner, name)

    def step(*args: Any, **fields: Any) -> Any:
        if name == "unlink" and args[0].name != site.REQUEST:
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
    lab: Lab, monkeypatch: pytest.MonkeyPatch, step: str, when: str, *, is_unpacked: bool
) -> None:
    home = lab.settings.home

    def tie(tx: Tx) -> None:
        tx.meta.set(HOME_ID, "x")
        tx.meta.set(SITE_ID, "11aa")

    await lab.store.write(tie)
    if not is_unpacked:
        original = site.Site(site_id="11aa", directory=site.identify(home.parent))
        (home / site.FILE).write_bytes(site.encoded(original))
    word(lab, runs_again=True)
    owner = {"write": lab.store, "unlink": Path}.get(step, restored)
    kill_around(monkeypatch, owner, step, when)
    request = await claim(lab.store, home)
    assert request is not None
    with pytest.raises(Killed):
        await settle_restored(lab.core, request)
    if (request := await claim(lab.store, home)) is not None:
        await settle_restored(lab.core, request)
    assert await claim(lab.store, home) is None
    assert len(lab.events("home.restored")) == 1
    recorded = site.read_site(home)
    assert recorded is not None
    assert lab.read(lambda tx: tx.meta.get(SITE_ID)) == recorded.site_id
    assert not (home / site.REQUEST).exists()


@pytest.mark.parametrize(("runs_again", "status"), [(False, "cancelled"), (True, "queued")])
async def test_no_element_of_an_array_that_was_half_recorded_begins_unasked(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, *, runs_again: bool, status: str
) -> None:
    def die() -> None:
        raise Killed

    monkeypatch.setattr(arrays, "MAX_MADE", 2)
    lab.store.meanwhile("after write", die)
    with pytest.raises(Killed):
        lab.submit_all(array={"indices": list(range(5))})
    lab.store.meanwhile("after write", lambda: None)
    await settle_restored(lab.core, word(lab, runs_again=runs_again))
    await arrays.carry_on(lab.core)
    found = lab.read(lambda tx: [job for job, _ in tx.jobs.page(JobFilter(), None, 10)])
    assert [lab.status(job) for job in found] == [status] * 5


@pytest.mark.parametrize("runs_again", [True, False])
async def test_an_end_that_the_copy_knows_of_counts(lab: Lab, *, runs_again: bool) -> None:
    job = lab.running()
    attempt = lab.attempt(job)
    share = share_in(lab.settings.home, attempt.attempt_id, attempt.node_names[0])
    order = an_order(attempt_id=attempt.attempt_id, node=attempt.node_names[0], epoch=attempt.epoch)
    spool.write_order(share, order)
    done = NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=order.node,
        kind=EndKind.SUCCEEDED,
        ended_at=1.0,
    )
    spool.write_outcome(share, done)
    set_aside(lab.settings.home, 2.0)
    await settle_restored(lab.core, word(lab, runs_again=runs_again))
    assert lab.status(job) == "succeeded"


async def test_new_projects_of_a_restored_home_have_uids_that_the_original_never_gives(lab: Lab) -> None:
    def begin(tx: Tx) -> int:
        tx.people.begin_uids(FIRST_PROJECT_UID)
        return tx.people.next_uid()

    first = await lab.store.write(begin)
    await settle_restored(lab.core, word(lab, runs_again=True))
    of_copy = await lab.store.write(lambda tx: tx.people.next_uid())
    assert not FIRST_PROJECT_UID <= of_copy < FIRST_PROJECT_UID + BLOCK
    recorded = site.read_site(lab.settings.home)
    assert recorded is not None
    assert of_copy in blocks(f"x:{recorded.site_id}")
    assert first == FIRST_PROJECT_UID


async def test_services_keep_their_releases_and_have_no_replicas(lab: Lab) -> None:
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
    await settle_restored(lab.core, word(lab, runs_again=False))
    (resting,) = lab.read(lambda tx: tx.services.all())
    assert (resting.min_replicas, resting.max_replicas, resting.replicas) == (0, 0, 0)
    await settle_restored(lab.core, word(lab, runs_again=True))
    assert lab.read(lambda tx: tx.services.all()) == [resting]


def test_nothing_that_the_copied_files_call_alive_stays_in_place(tmp_path: Path) -> None:
    share = spool.Share(tmp_path / "spool" / "live" / "att_1" / "n1")
    Path(share.work).mkdir(parents=True)
    spool.write_order(share, an_order(attempt_id="att_1", node="n1"))
    Path(share.log).write_text("its words\n")
    (tmp_path / "desk" / "live" / "att_2" / "n1").mkdir(parents=True)
    (tmp_path / "spool" / "standby" / "att_1.n1").mkdir(parents=True)
    (tmp_path / "sockets" / "1").mkdir(parents=True)
    for _ in range(2):
        set_aside(tmp_path, 7.0)
        assert list((tmp_path / "spool" / "live").iterdir()) == []
        assert not (tmp_path / "desk" / "live").exists()
        assert not (tmp_path / "spool" / "standby").exists()
        assert not (tmp_path / "sockets").exists()
    kept = spool.Share(tmp_path / "spool" / "kept" / "att_1" / "n1")
    assert Path(kept.log).read_text() == "its words\n"
    assert not Path(kept.work).exists()
    assert outcomes_of(tmp_path, "att_1")["n1"].kind is EndKind.LOST
    assert outcomes_of(tmp_path, "att_1")["n1"].ended_at == 7.0


def a_project_of_the_original(lab: Lab) -> tuple[Path, int]:
    """A project with a checkpoint and a cache in the copy. The original has noted its uids."""
    original = lab.settings.home.parent / "original"
    original.mkdir()
    first = uids.claim_block(original, "x:11aa")

    def add(tx: Tx) -> None:
        tx.people.begin_uids(first + 7)
        project = Project(name="vision", uid=tx.people.next_uid())
        tx.people.add_project(project)
        note(tx, "project.created", 0.0, SHOAL, project="vision")

    now(lab.store.write(add))
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


def uid_of_vision(lab: Lab) -> int:
    project = lab.read(lambda tx: tx.people.get_project("vision"))
    assert project is not None
    return project.uid


def differences_of_vision(lab: Lab) -> list[Difference]:
    return [one for one in lab.read(verdict_of).differences if one.row == "vision"]


def owners_below(folder: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in folder.rglob("*")}


@needs_root
async def test_projects_of_a_copy_have_other_users_than_those_of_an_original_on_this_machine(
    lab: Lab,
) -> None:
    original, before = a_project_of_the_original(lab)
    await settle_restored(lab.core, word(lab, runs_again=False))
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
async def test_projects_of_a_copy_keep_their_users_where_the_original_is_gone(lab: Lab, gone: str) -> None:
    original, before = a_project_of_the_original(lab)
    if gone == "removed":
        original.rmdir()
    if gone == "replaced":
        original.rmdir()
        original.symlink_to(lab.settings.home)
    await settle_restored(lab.core, word(lab, runs_again=gone == "as the operator says"))
    assert uid_of_vision(lab) == before
    assert owners_below(lab.settings.home / "checkpoints") == {(before, before)}
    drill = lab.settings.home.parent / "drill"
    drill.mkdir()
    assert keep_blocks([before], drill, "x:33cc") == [before], "a drill of the copy has other users"


@needs_root
@pytest.mark.parametrize("when", ["before", "after"])
async def test_users_of_a_copy_change_once_where_its_first_start_is_killed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    _, before = a_project_of_the_original(lab)
    request = word(lab, runs_again=False)
    kill_around(monkeypatch, lab.store, "write", when)
    with pytest.raises(Killed):
        await finish(lab.core, request, 0, 0)
    await finish(lab.core, request, 0, 0)
    uid = uid_of_vision(lab)
    assert owners_below(lab.settings.home / "checkpoints") == {(uid, uid)}
    assert uid == next(blocks("x:22bb")) != before
    assert len(lab.events("project.updated")) == 1
    assert differences_of_vision(lab) == []
