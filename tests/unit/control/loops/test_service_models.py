"""A service that serves a job's checkpoint: which one, until when, and what its replicas get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from shoal.control.job_specs import task_specs_for
from shoal.control.loops.clean import DAY_S, clean
from shoal.control.services.commands import ServiceRequest
from shoal.control.services.reconcile import reconcile_services
from shoal.engines.base import SavedCheckpoint, SavedCheckpoints, SavedState
from shoal.engines.local.task_specs import with_model_dirs
from shoal.errors import EngineRefused, ShoalError, SpecError, StateError
from shoal.model.attempt import NodeTask
from shoal.model.job import Job
from shoal.model.service import Release, Service
from shoal.spec.parse import parse_service
from shoal.wire import TaskSpec
from tests.support.planes.bench import ANA, USER, ControlPlaneLab, StagedEngine, result_of
from tests.support.runtime.task_specs import change_task_spec
from tests.support.store_records import a_node, an_attempt

WHOLE, HALF = SavedState.COMPLETE, SavedState.UNFINISHED


class SavingEngine(StagedEngine):
    """Jobs have saved what the test says, and old checkpoints can be dropped."""

    def __init__(self, lab: ControlPlaneLab) -> None:
        super().__init__(lab.cluster)
        self.items: dict[str, list[SavedCheckpoint]] = {}

    def save(self, job: Job, step: int, state: SavedState = WHOLE, epoch: int = 1) -> None:
        checkpoint = SavedCheckpoint(
            step=step,
            epoch=epoch,
            rendezvous_round=0,
            state=state,
            saved_at=0.0,
            size_bytes=1,
            name=f"step-{step:012d}-{epoch}-0",
        )
        self.items.setdefault(job.job_id, []).insert(0, checkpoint)

    async def inspect_checkpoints(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        return SavedCheckpoints(items=tuple(self.items.get(job_id, ())))

    async def prune(self, older_than: float, max_bytes: int) -> int:
        return 0

    async def checkpoints(self) -> list[str]:
        return list(self.items)

    async def drop_checkpoint(self, job_id: str) -> None:
        del self.items[job_id]


class Bench:
    def __init__(self) -> None:
        self.lab = ControlPlaneLab()
        self.engine = self.lab.core.link.engine = SavingEngine(self.lab)

    def train(self, name: str = "train") -> Job:
        return self.lab.submit(name=name, checkpoint={})

    def serve(self, model: Any, key: str | None = None, **fields: Any) -> Service:
        spec_fields = {
            "name": "chat",
            "run": "serve",
            "workdir": None,
            "resources": {"cpus": 1},
            "model": model,
        }
        spec = parse_service({**spec_fields, **fields})
        request = ServiceRequest(spec=spec, project="lab", owner=USER)
        return result_of(self.lab.plane.serve(ANA, request, key=key))

    def release(self, service: Service) -> Release:
        recorded = self.lab.read(lambda tx: tx.services.release(service.service_id, service.newest))
        assert recorded is not None
        return recorded

    def model(self, service: Service) -> dict[str, Any]:
        return dict(msgspec.json.decode(self.release(service).spec_json)["model"])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_newest_whole_checkpoint_is_served_and_recorded(bench: Bench) -> None:
    job = bench.train()
    for step, state in ((10, WHOLE), (20, WHOLE), (30, HALF)):
        bench.engine.save(job, step, state)
    service = bench.serve({"job": "train"})
    assert bench.release(service).model == "train@20"
    assert bench.model(service) == {"job": job.job_id, "step": 20, "save": "step-000000000020-1-0"}


def test_same_file_is_another_release_once_the_job_has_saved_again(bench: Bench) -> None:
    job = bench.train()
    bench.engine.save(job, 10)
    first = bench.serve({"job": "train"})
    assert bench.serve({"job": "train"}) == first
    assert bench.serve({"job": job.job_id, "step": 10}) == first
    bench.engine.save(job, 20)
    assert bench.serve({"job": "train", "step": 10}) == first
    second = bench.serve({"job": "train"})
    assert (second.newest, bench.release(second).model) == (2, "train@20")


def test_repeated_request_gets_the_first_reply_despite_a_newer_checkpoint(bench: Bench) -> None:
    job = bench.train()
    bench.engine.save(job, 10)
    first = bench.serve({"job": "train"}, key="k")
    bench.engine.save(job, 20)
    assert bench.serve({"job": "train"}, key="k") == first


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"job": "nobody"}, SpecError, "project `lab` has no such job"),
        ({"job": "train"}, StateError, "has no whole checkpoint to serve"),
        ({"job": "other", "step": 11}, StateError, "has no whole checkpoint of step 11 to serve"),
    ],
)
def test_missing_checkpoint_is_not_served(
    bench: Bench, model: dict[str, Any], error: type[ShoalError], message: str
) -> None:
    bench.engine.save(bench.train(), 10, HALF)
    bench.engine.save(bench.train("other"), 10)
    with pytest.raises(error) as refused:
        bench.serve(model)
    assert message in refused.value.message
    assert bench.lab.read(lambda tx: tx.services.all()) == []


def test_name_of_a_model_is_kept_as_it_is(bench: Bench) -> None:
    assert bench.release(bench.serve("chat@7")).model == "chat@7"
    assert bench.release(bench.serve(None)).model == ""


def replica_orders(bench: Bench) -> tuple[TaskSpec, ...]:
    anyio.run(reconcile_services, bench.lab.core.admission, bench.lab.core.serving, bench.lab.core.running)
    [service] = bench.lab.read(lambda tx: tx.services.all())
    [(_, job, _)] = bench.lab.read(lambda tx: tx.services.replicas(service.service_id))
    attempt = an_attempt(job, allocation=(NodeTask(node="n1", cpus=1.0, memory_bytes=1 << 30),))
    return task_specs_for(
        job,
        attempt,
        {"n1": a_node("n1")},
        uid=1,
        home=Path("/srv/shoal"),
        mount_roots=(),
        control_urls=(),
        renew_s=5.0,
    )


def test_replica_gets_the_path_of_its_checkpoint(bench: Bench) -> None:
    job = bench.train()
    bench.engine.save(job, 10, epoch=2)
    bench.serve({"job": "train"})
    [task_spec] = replica_orders(bench)
    assert task_spec.folders.model_dir == f"/srv/shoal/checkpoints/{job.job_id}/step-000000000010-2-0"
    assert task_spec.folders.checkpoint_dir is None


def test_replica_of_a_named_model_gets_no_path(bench: Bench) -> None:
    bench.serve("chat@7")
    assert {task_spec.folders.model_dir for task_spec in replica_orders(bench)} == {None}


def test_checkpoints_that_a_service_serves_outlive_their_time(bench: Bench) -> None:
    served, other = bench.train(), bench.train("other")
    for job in (served, other):
        bench.engine.save(job, 10)
        bench.lab.stop(job)
    bench.serve({"job": "train"})
    bench.lab.clock.advance(31 * DAY_S)
    anyio.run(
        clean,
        bench.lab.core.records,
        bench.lab.core.planning.planner,
        bench.lab.core.link.engine,
        bench.lab.core.settings,
    )
    assert list(bench.engine.items) == [served.job_id]


def an_order(bench: Bench, home: Path, place: str) -> tuple[TaskSpec, ...]:
    bench.serve("chat@7")
    [task_spec] = replica_orders(bench)
    return (change_task_spec(task_spec, model_dir=str(home / place)),)


def test_engine_finds_only_checkpoints_inside_their_directory(bench: Bench, tmp_path: Path) -> None:
    real, secret = tmp_path / "real", tmp_path / "secret"
    save = real / "checkpoints" / "job_1" / "step-000000000010-1-0"
    save.mkdir(parents=True)
    secret.mkdir()
    (save.parent / "step-000000000011-1-0").symlink_to(secret)
    (save.parent / "step-000000000013-1-0").symlink_to("step-000000000013-1-0")
    home = tmp_path / "home"
    home.symlink_to(real)
    good = an_order(bench, home, "checkpoints/job_1/step-000000000010-1-0")
    assert [task_spec.folders.model_dir for task_spec in with_model_dirs(home, good)] == [str(save)]
    for place in (
        "checkpoints/job_1/step-000000000011-1-0",
        "checkpoints/job_1/step-000000000012-1-0",
        "checkpoints/job_1/step-000000000013-1-0",
        "checkpoints/job_1",
        "checkpoints/job_1/..",
        "keys/a/b",
    ):
        wrong = (change_task_spec(good[0], model_dir=str(home / place)),)
        with pytest.raises(EngineRefused, match="there is no checkpoint to serve"):
            with_model_dirs(home, wrong)
