"""A job's checkpoint directory: the same in every attempt, nobody else's, and nothing but a directory."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.engines.base import Submission
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.errors import EngineRefused
from shoal.model.evidence import Evidence
from shoal.wire import EndKind, TaskOutcome, TaskSpec
from tests.support.archives import entry, tar_of, tar_with
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, MODES, needs
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import StartTask, a_task_spec, tasks_in

FULL = (CGROUP, "bubblewrap", "uid")
APPEND = 'echo "$SHOAL_EPOCH" >> "$SHOAL_CHECKPOINT_DIR/seen"; cat "$SHOAL_CHECKPOINT_DIR/seen"'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[StartTask]:
    with tasks_in(home) as make:
        yield make


def a_directory(home: Path, job_id: str = "job_0001", uid: int | None = None) -> str:
    """As the engine makes it."""
    made = home / "checkpoints" / job_id
    made.mkdir(parents=True, mode=0o700)
    if uid is not None:
        os.chown(made, uid, uid)
    return str(made)


@pytest.mark.parametrize("confinement", MODES)
def test_what_one_attempt_saved_the_next_one_finds(
    home: Path, start: StartTask, confinement: tuple[str, ...]
) -> None:
    uid = JOB_UID if "uid" in confinement else None
    directory = a_directory(home, uid=uid)
    seen = []
    for epoch in (1, 2):
        share = start(
            a_task_spec(
                attempt_id=f"att_{epoch}",
                epoch=epoch,
                run=f'test -z "$(ls -A)" && {APPEND}',
                checkpoint_dir=directory,
                confinement=confinement,
                uid=uid,
            )
        )
        outcome = share.run()
        assert outcome.kind is EndKind.SUCCEEDED, (outcome, share.log())
        seen.append(share.texts())
    assert seen == [["1"], ["1", "2"]]


@pytest.mark.parametrize("confinement", MODES)
def test_a_relative_path_is_a_link_in_the_work_directory(
    home: Path, start: StartTask, confinement: tuple[str, ...]
) -> None:
    uid = JOB_UID if "uid" in confinement else None
    order = a_task_spec(
        run="echo saved > out/ckpt/model",
        checkpoint_dir=a_directory(home, uid=uid),
        checkpoint_path="out/ckpt",
        confinement=confinement,
        uid=uid,
    )
    assert start(order).run().kind is EndKind.SUCCEEDED
    assert (home / "checkpoints" / "job_0001" / "model").read_text() == "saved\n"


@needs("bubblewrap")
def test_an_absolute_path_is_a_mount(home: Path, start: StartTask) -> None:
    run = 'echo saved > /ckpt/model; cat "$SHOAL_CHECKPOINT_DIR/model"'
    order = a_task_spec(
        run=run, checkpoint_dir=a_directory(home), checkpoint_path="/ckpt", confinement=("bubblewrap",)
    )
    share = start(order)
    assert share.run().kind is EndKind.SUCCEEDED, share.log()
    assert share.texts() == ["saved"]


def test_an_absolute_path_without_a_sandbox_is_explained(home: Path, start: StartTask) -> None:
    order = a_task_spec(checkpoint_dir=a_directory(home), checkpoint_path="/ckpt", confinement=())
    outcome = start(order).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "need bubblewrap" in outcome.message


FULL_FOLDER = tar_of({"ckpt/old": b"x"})
EMPTY_FOLDER = tar_with([(entry("ckpt", tarfile.DIRTYPE), b"")])


@pytest.mark.parametrize(
    ("archive", "kind"), [(FULL_FOLDER, EndKind.SETUP_FAILED), (EMPTY_FOLDER, EndKind.SUCCEEDED)]
)
def test_a_folder_of_the_snapshot_in_its_place_is_explained_unless_it_is_empty(
    home: Path, start: StartTask, archive: bytes, kind: EndKind
) -> None:
    order = a_task_spec(
        checkpoint_dir=a_directory(home),
        checkpoint_path="ckpt",
        archive_digest=hashlib.sha256(archive).hexdigest(),
        run="echo new > ckpt/model",
        confinement=(),
    )
    share = start(order)
    Path(share.task.archive).write_bytes(archive)
    outcome = share.run()
    assert outcome.kind is kind, outcome
    assert ("`ckpt` is in the snapshot" in outcome.message) == (kind is EndKind.SETUP_FAILED)


@needs("bubblewrap", "uid")
def test_no_other_job_can_read_it(home: Path, start: StartTask) -> None:
    mine, others = a_directory(home, "job_mine", JOB_UID), a_directory(home, "job_other", JOB_UID)
    secret = Path(others, "model")
    secret.write_text("theirs")
    os.chown(secret, JOB_UID, JOB_UID)
    run = f"cat {secret}; ls {home}/checkpoints; ls -A {mine}; cat {home}/checkpoints/../shoal.db"
    share = start(a_task_spec(run=run, checkpoint_dir=mine, confinement=FULL, uid=JOB_UID))
    assert share.run().kind is EndKind.EXITED
    assert share.texts() == ["job_mine"], "of the same project and user, and still not there"


def test_a_link_in_its_place_is_not_followed(home: Path, start: StartTask, tmp_path: Path) -> None:
    (home / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    link = home / "checkpoints" / "job_0001"
    link.symlink_to(tmp_path / "elsewhere")
    for confinement in ((), ("bubblewrap",)):
        order = a_task_spec(
            attempt_id=f"att_{len(confinement)}", checkpoint_dir=str(link), confinement=confinement
        )
        assert start(order).run().kind is EndKind.SETUP_FAILED
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[LocalEngine]:
    made = LocalEngine(
        home,
        clock=SystemClock(),
        server_file=home / "server.json",
        simulated=SimulatedNodes(count=1, gpus_per_node=0),
    )
    yield made
    await made.close()


def uid_of(path: Path) -> int:
    return path.stat().st_uid


def submission(order: TaskSpec) -> Submission:
    local = change_task_spec(order, node="sim-01", nodes=("sim-01",))
    return Submission(
        attempt_id=order.identity.attempt_id, epoch=order.identity.epoch, task_specs=(local,), credentials={}
    )


async def end_of(engine: LocalEngine, attempt_id: str) -> TaskOutcome:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for look in await engine.list_owned():
            if look.attempt_id == attempt_id and look.evidence is Evidence.ENDED and look.outcome is not None:
                return look.outcome
        await anyio.sleep(0.05)
    raise AssertionError(f"{attempt_id} did not end")


@pytest.mark.anyio
async def test_the_engine_makes_it_once_for_the_jobs_user_and_keeps_it(
    engine: LocalEngine, home: Path
) -> None:
    directory = home / "checkpoints" / "job_0001"
    for epoch in (1, 2):
        order = a_task_spec(
            attempt_id=f"att_{epoch}", epoch=epoch, run=APPEND, checkpoint_dir=str(directory), uid=JOB_UID
        )
        await engine.submit(submission(order))
        outcome = await end_of(engine, order.identity.attempt_id)
        assert outcome.kind is EndKind.SUCCEEDED, outcome
        await engine.forget(order.identity.attempt_id)
    assert (directory / "seen").read_text() == "1\n2\n"
    facts = directory.lstat()
    assert stat.S_IMODE(facts.st_mode) == 0o700
    assert facts.st_uid == (JOB_UID if os.geteuid() == 0 else os.geteuid())
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["link", "file"])
async def test_the_engine_refuses_what_is_not_a_real_directory(
    engine: LocalEngine, home: Path, tmp_path: Path, kind: str
) -> None:
    (home / "checkpoints").mkdir(mode=0o700)
    place = home / "checkpoints" / "job_0001"
    place.symlink_to(tmp_path) if kind == "link" else place.write_text("")
    order = a_task_spec(checkpoint_dir=str(place), uid=JOB_UID)
    with pytest.raises(EngineRefused, match="is not a directory"):
        await engine.submit(submission(order))
    assert await engine.list_owned() == []
    assert uid_of(tmp_path) == os.geteuid()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "place", ["/etc", "{home}/keys", "{home}/checkpoints/job_other", "{home}/checkpoints"]
)
async def test_the_engine_gives_away_no_other_directory(engine: LocalEngine, home: Path, place: str) -> None:
    order = a_task_spec(checkpoint_dir=place.format(home=home), uid=JOB_UID)
    with pytest.raises(EngineRefused, match="cannot keep its checkpoints"):
        await engine.submit(submission(order))
    assert await engine.list_owned() == []
