"""Services over a fake engine. The test plays the supervisors and the data planes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from shoal.control import Actor
from shoal.control.commands.job_records import resolve_reference
from shoal.control.services import reconcile, snapshot
from shoal.control.services.commands import ServiceRequest
from shoal.control.services.reconcile import reconcile_services
from shoal.control.services.snapshot import ServiceSnapshot, load_snapshot
from shoal.control.services.state import ServiceState
from shoal.engines.fake import Act, Script, always
from shoal.errors import StateError
from shoal.model.attempt import AttemptState
from shoal.model.job import Job
from shoal.model.people import Role
from shoal.model.service import Rollout, RolloutStage, Service
from shoal.serving.table import ReleaseCounters, ServingReport
from shoal.serving.table import ServiceConfig as Served
from shoal.spec.parse import parse_service
from shoal.wire import EndKind, Renewal, ReplicaStatus, TaskPhase
from tests.support.planes.commands import Commands
from tests.support.planes.world import FOREVER, open_plane
from tests.support.store_costs import counted_changes

ROOT = Actor(kind="user", id="usr_root", name="root")
pytestmark = pytest.mark.anyio
QUICK: dict[str, Any] = {"name": "chat", "run": "serve", "drain": 0.1}


class Cluster:
    """One service named `chat` in project `vision`. Every replica is ready at once unless it is `held`."""

    def __init__(self, plane: Commands, owner: Any) -> None:
        self.plane = plane
        self.owner = owner
        self.service_id = ""
        self.is_held = False
        self.counts: dict[int, ReleaseCounters] = {}
        self.queued = 0

    async def serve(self, **fields: Any) -> Service:
        spec = parse_service({**QUICK, **fields})
        request = ServiceRequest(spec=spec, project="vision", owner=self.owner)
        service = await self.plane.serve(ROOT, request)
        self.service_id = service.service_id
        return service

    async def look(self) -> ServiceSnapshot:
        loaded = await self.plane.core.records.store.read(lambda tx: load_snapshot(tx, self.service_id))
        assert loaded is not None
        return loaded

    async def said(self) -> None:
        """Supervisors report that their servers are ready; a data plane reports its counts."""
        loaded = await self.plane.core.records.store.read(lambda tx: load_snapshot(tx, self.service_id))
        for replica, _, attempt in () if loaded is None or self.is_held else loaded.replicas:
            if attempt.state is AttemptState.RUNNING:
                serving = ReplicaStatus(
                    address=f"127.0.0.1:{1000 + replica.slot}", is_ready=True, at=time.time()
                )
                renewal = Renewal(
                    attempt_id=attempt.attempt_id,
                    epoch=attempt.epoch,
                    node=attempt.node_names[0],
                    phase=TaskPhase.RUNNING,
                    replica_status=serving
                    if self.plane.core.running.replicas.status(attempt.attempt_id) is None
                    else None,
                )
                await self.plane.renew(renewal)
        state = self.plane.core.services
        waiting = ReleaseCounters(project="vision", name="chat", release=0, queued=self.queued)
        counts = tuple(msgspec.structs.replace(count) for count in (waiting, *self.counts.values()))
        report = ServingReport(process_id="prc_1", version=state.table.version, counts=counts)
        state.note_report(report, self.plane.core.records.clock.monotonic())

    async def until(
        self, is_so: Callable[[ServiceSnapshot], bool], within_s: float = 30.0
    ) -> ServiceSnapshot:
        with anyio.fail_after(within_s):
            while not is_so(look := await self.look()):
                await self.said()
                await anyio.sleep(0.02)
        return look

    def served(self) -> Served:
        [service] = self.plane.core.services.table.services
        return service

    async def until_ready(self, count: int) -> None:
        await self.until(lambda _: self.has_ready(count))

    def has_ready(self, count: int) -> bool:
        services = self.plane.core.services.table.services
        return bool(services) and sum(not replica.is_draining for replica in services[0].replicas) == count

    def count(self, release: int, *, requests: int, errors: int = 0, in_flight: int = 0) -> None:
        self.counts[release] = ReleaseCounters(
            project="vision",
            name="chat",
            release=release,
            requests=requests,
            errors=errors,
            in_flight=in_flight,
        )


@asynccontextmanager
async def cluster(home: Path, script: Script = FOREVER) -> AsyncIterator[Cluster]:
    async with open_plane(home, script=script) as plane:
        await plane.create_project(ROOT, "vision", {})
        user = await plane.create_user(ROOT, "ana")
        await plane.set_member(ROOT, "vision", "ana", Role.MEMBER)
        yield Cluster(plane, user)


async def test_same_spec_again_is_no_new_release_and_another_is(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        first = await ours.serve()
        assert (await ours.serve()) == first
        second = await ours.serve(env={"A": "1"})
        assert (second.newest, second.live) == (2, 1)
        assert second.rollout is not None
        assert second.rollout.stage is RolloutStage.ROLLING


async def test_release_names_its_changes_and_the_scale_that_it_undoes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:

        async def served(archive: str | None = None, **fields: Any) -> str:
            spec = parse_service({**QUICK, **fields})
            request = ServiceRequest(spec=spec, project="vision", owner=ours.owner, archive_digest=archive)
            service = await ours.plane.serve(ROOT, request)
            ours.service_id = service.service_id
            look = await ours.look()
            return look.releases[service.newest].because

        assert await served() == ""
        assert await served("a" * 64) == "working directory changed"
        assert await served("a" * 64, env={"A": "1"}, cap=3) == "`cap`, `env` changed"
        await ours.plane.scale_service(ROOT, ours.service_id, 2, 4)
        same = "`cap`, `env` changed"
        assert await served("a" * 64, env={"A": "1"}, cap=3) == same
        undone = "working directory changed; replicas 2..4 -> 1, as the file says"
        assert await served("b" * 64, env={"A": "1"}, cap=3) == undone
        await ours.plane.undo_rollout(ROOT, ours.service_id)
        again = "release 4 was rolled back; replicas 2..4 -> 1, as the file says"
        assert await served("b" * 64, env={"A": "1"}, cap=3) == again
        assert await served("c" * 64, env={"A": "1"}) == "`cap`, working directory changed"


async def test_replicas_belong_to_the_author_of_their_release(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve()
        await ours.until_ready(1)
        ours.owner = await ours.plane.create_user(ROOT, "bob")
        await ours.serve(env={"A": "1"})
        look = await ours.until(lambda look: {job.replica.release for _, job, _ in look.replicas} >= {2})  # type: ignore[union-attr]
        owners = {job.replica.release: job.owner_name for _, job, _ in look.replicas if job.replica}
        assert owners[2] == "bob"
        assert owners.get(1, "ana") == "ana"
        assert look.service.owner_name == "ana"


async def test_a_replica_is_not_tried_again_beside_those_of_its_service(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve()
        await ours.until_ready(1)
        (_, job, _) = (await ours.look()).replicas[0]
        with pytest.raises(StateError, match="is a replica of service `chat`, which starts its own"):
            await ours.plane.retry_job(ROOT, job.job_id)


async def test_only_ready_replicas_are_in_the_table(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        ours.is_held = True
        await ours.serve(replicas=2)
        await ours.until(lambda look: [a.state for _, _, a in look.replicas] == [AttemptState.RUNNING] * 2)
        await ours.until(lambda _: bool(ours.plane.core.services.table.services))
        assert ours.served().replicas == ()
        ours.is_held = False
        await ours.until_ready(2)
        assert len({replica.secret for replica in ours.served().replicas}) == 2


async def test_table_carries_how_a_service_listens_and_may_be_repeated(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(
            port="socket", public=True, repeatable=True, hedge_after="200ms", readiness={"within": "20m"}
        )
        look = await ours.until(lambda look: bool(look.replicas))
        place = look.replicas[0][1].replica
        assert place is not None
        probe = place.probe
        assert (probe.port, probe.is_socket, probe.is_public) == (None, True, True)
        await ours.until_ready(1)
        served = ours.served()
        assert (served.is_repeatable, served.hedge_s, served.is_public) == (True, 0.2, True)
        assert (served.queue_s, served.start_s) == (60.0, 1260.0)


async def test_callers_are_those_with_a_role_in_the_project_by_digest(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        plane = ours.plane
        stranger = await plane.create_user(ROOT, "dora")
        token, _ = await plane.create_token(ROOT, ours.owner, label="", scope=Role.VIEWER)
        gone, _ = await plane.create_token(ROOT, ours.owner, label="", scope=Role.VIEWER, lifetime_s=9999.0)
        await plane.create_token(ROOT, stranger, label="", scope=Role.ADMIN)
        reasons: dict[str, Any] = {"label": "", "scope": Role.VIEWER, "project": "vision"}
        await plane.create_token(ROOT, ours.owner, **reasons, service="other")
        await ours.serve()
        await ours.until_ready(1)
        ends = {caller.digest: caller.expires_at for caller in ours.served().callers}
        assert ends == {token.secret_hash.hex(): None, gone.secret_hash.hex(): gone.expires_at}
        await plane.revoke_token(ROOT, gone.token_id)
        await ours.until(lambda _: {c.digest for c in ours.served().callers} == {token.secret_hash.hex()})
        await ours.serve(public=True)
        await ours.until(lambda _: ours.served().is_public)
        assert ours.served().callers == ()


async def test_project_without_room_for_more_jobs_has_as_many_replicas_as_it_can(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.plane.update_project(ROOT, "vision", {"max_open_jobs": 2})
        await ours.serve(replicas=3)
        await ours.until_ready(2)
        await ours.plane.update_project(ROOT, "vision", {"max_open_jobs": 3})
        await ours.until_ready(3)
        assert len((await ours.look()).replicas) == 3


async def test_two_turns_at_once_start_no_replica_twice(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=4)
        async with anyio.create_task_group() as turns:
            for _ in range(8):
                turns.start_soon(
                    reconcile_services,
                    ours.plane.core.admission,
                    ours.plane.core.serving,
                    ours.plane.core.running,
                )
        await ours.until_ready(4)
        assert [replica.slot for replica, _, _ in (await ours.look()).replicas] == [1, 2, 3, 4]


async def test_held_requests_scale_a_service_up_from_zero(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas="0..4", scale={"value": 2})
        await ours.until(lambda _: bool(ours.plane.core.services.table.services))
        assert (await ours.look()).replicas == ()
        ours.queued = 1
        await ours.until_ready(1)
        ours.queued = 6
        await ours.until_ready(3)
        ours.queued = 100
        await ours.until_ready(4)
        assert (await ours.look()).service.replicas == 4


async def test_idle_service_goes_down_to_one_and_then_to_zero(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        scale = {"value": 1, "cooldown": 1, "to_zero_after": 2}
        await ours.serve(replicas="0..4", scale=scale)
        ours.queued = 3
        await ours.until_ready(3)
        ours.queued = 0
        look = await ours.until(lambda look: look.service.replicas == 0)
        assert look.service.live == 1
        await ours.until(lambda look: not look.replicas)
        events = await ours.plane.core.records.store.read(lambda tx: tx.events.latest(100))
        resized = [event.data["replicas"] for event in events if event.kind == "service.resized"]
        assert resized[-2:] == [1, 0]


async def test_rolling_release_takes_over_one_by_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=3)
        await ours.until_ready(3)
        await ours.serve(replicas=3, env={"VERSION": "2"})
        fewest = 3

        def is_done(look: ServiceSnapshot) -> bool:
            nonlocal fewest
            ready = sum(not replica.is_draining for replica in ours.served().replicas)
            fewest = min(fewest, ready)
            return look.service.live == 2 and len(look.replicas) == 3

        look = await ours.until(is_done)
        assert fewest == 3
        assert {replica.release for replica, _, _ in look.replicas} == {2}
        assert look.service.rollout is not None
        assert look.service.rollout.stage is RolloutStage.DONE


async def test_rollout_without_room_for_another_replica_replaces_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "NO_ROOM_S", 0.2)
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=4, resources={"gpus": 2})
        await ours.until_ready(4)
        await ours.serve(replicas=4, resources={"gpus": 2}, env={"VERSION": "2"})
        fewest = 4

        def is_done(look: ServiceSnapshot) -> bool:
            nonlocal fewest
            fewest = min(fewest, sum(not replica.is_draining for replica in ours.served().replicas))
            return look.service.live == 2 and len(look.replicas) == 4

        await ours.until(is_done)
        assert fewest == 3
        events = await ours.plane.core.records.store.read(lambda tx: tx.events.latest(200))
        reasons = [event.data["because"] for event in events if event.kind == "rollout.waits"]
        assert reasons[0].startswith("no room for one more replica: needs 1 node with 2 free GPUs")


async def test_rollout_that_may_miss_no_replica_waits_for_room_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "NO_ROOM_S", 0.2)
    async with cluster(tmp_path) as ours:
        full = {"replicas": 2, "resources": {"gpus": 4}, "rollout": {"max_unavailable": 0}}
        await ours.serve(**full)
        await ours.until_ready(2)
        await ours.serve(**full, env={"VERSION": "2"})
        shown = await ours.until(lambda look: bool(look.service.rollout and look.service.rollout.waits))
        assert ours.has_ready(2)
        assert shown.service.live == 1
        await ours.plane.scale_service(ROOT, ours.service_id, 1, 1)
        shown = await ours.until(lambda look: look.service.live == 2)
        assert shown.service.rollout is not None
        assert shown.service.rollout.waits == ""


async def test_undone_rollout_stops_no_replica_before_another_is_ready(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=3)
        await ours.until_ready(3)
        await ours.serve(replicas=3, env={"VERSION": "2"})
        await ours.until(lambda _: sum(replica.release == 2 for replica in ours.served().replicas) >= 2)
        ours.is_held = True
        await ours.plane.undo_rollout(ROOT, ours.service_id)
        await ours.until(lambda look: sum(replica.release == 1 for replica, _, _ in look.replicas) >= 3)
        assert sum(not replica.is_draining for replica in ours.served().replicas) >= 3
        ours.is_held = False
        fewest = 3

        def is_back(look: ServiceSnapshot) -> bool:
            nonlocal fewest
            fewest = min(fewest, sum(not replica.is_draining for replica in ours.served().replicas))
            return {replica.release for replica, _, _ in look.replicas} == {1} and len(look.replicas) == 3

        await ours.until(is_back)
        assert fewest == 3


async def test_canary_that_returns_errors_rolls_back_by_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve()
        await ours.plane.scale_service(ROOT, ours.service_id, 2, 2)
        await ours.until_ready(2)
        ours.count(1, requests=0)
        ours.count(2, requests=0)
        rollout = {"strategy": "canary", "steps": [10, 50], "bake": "1h"}
        await ours.serve(env={"VERSION": "2"}, rollout=rollout)
        await ours.until(lambda _: ours.served().shares == {1: 0.9, 2: 0.1})
        ours.count(1, requests=900, errors=1)
        ours.count(2, requests=100, errors=50)
        look = await ours.until(lambda look: look.service.rollout.stage is RolloutStage.ROLLED_BACK)  # type: ignore[union-attr]
        assert look.service.live == 1
        assert look.service.rollout is not None
        assert "50.0% of its 100 requests failed" in look.service.rollout.because
        await ours.until(lambda look: [replica.release for replica, _, _ in look.replicas] == [1, 1])
        assert ours.served().shares == {}


async def test_rolled_back_release_restores_the_scaled_range(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve()
        await ours.until_ready(1)
        await ours.plane.scale_service(ROOT, ours.service_id, 3, 3)
        await ours.until_ready(3)
        ours.is_held = True
        await ours.serve(env={"VERSION": "2"})
        await ours.serve(env={"VERSION": "3"})
        assert (await ours.look()).service.max_replicas == 1
        await ours.plane.undo_rollout(ROOT, ours.service_id)
        service = (await ours.look()).service
        assert (service.min_replicas, service.max_replicas, service.replicas) == (3, 3, 3)
        assert service.resizes[-1].because == "release 3 was rolled back"
        await ours.serve(env={"VERSION": "4"})
        await ours.plane.scale_service(ROOT, ours.service_id, 2, 2)
        await ours.plane.undo_rollout(ROOT, ours.service_id)
        assert (await ours.look()).service.max_replicas == 2, "what was said last holds"


async def test_canary_leaves_requests_to_replicas_of_an_overtaken_release(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=2)
        await ours.until_ready(2)
        await ours.serve(replicas=2, env={"VERSION": "2"})
        await ours.until(
            lambda look: any(replica.release == 2 and replica.is_ready for replica, _, _ in look.replicas)
        )
        rollout = {"strategy": "canary", "steps": [50], "bake": "1h"}
        await ours.serve(replicas=2, env={"VERSION": "3"}, rollout=rollout)
        await ours.until(lambda _: ours.served().shares.get(3) == 0.5)
        served = ours.served()
        serving = {replica.release for replica in served.replicas if not replica.is_draining}
        assert 2 in serving
        assert serving <= {release for release, share in served.shares.items() if share > 0}
        assert sum(served.shares.values()) == pytest.approx(1.0)


def test_canary_time_before_a_restart_does_not_count() -> None:
    rollout = Rollout(old=1, new=2, stage=RolloutStage.CANARY, since=0.0, baking_at=0.0)
    request = {"project": "p", "name": "s", "owner": "u", "owner_name": "ana", "created_at": 0.0}
    bounds = {"min_replicas": 1, "max_replicas": 1, "replicas": 1, "scaled_at": 0.0}
    service = Service(service_id="svc_1", rollout=rollout, **request, **bounds)  # type: ignore[arg-type]
    state = ServiceState()
    assert (state.watched_s(service, 1e6), state.watched_s(service, 1e6 + 50)) == (0.0, 50.0)
    further = msgspec.structs.replace(rollout, step=1)
    assert state.watched_s(msgspec.structs.replace(service, rollout=further), 1e6 + 60) == 0.0
    unready = msgspec.structs.replace(rollout, baking_at=None)
    assert state.watched_s(msgspec.structs.replace(service, rollout=unready), 1e6 + 70) is None


async def test_canary_that_does_well_takes_over_step_by_step(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=2)
        await ours.until_ready(2)
        rollout = {"strategy": "canary", "steps": [10, 50], "bake": 0.3}
        await ours.serve(replicas=2, env={"VERSION": "2"}, rollout=rollout)
        await ours.until(lambda _: ours.served().shares == {1: 0.5, 2: 0.5})
        look = await ours.until(lambda look: look.service.live == 2)
        assert look.service.rollout is not None
        assert look.service.rollout.stage is RolloutStage.DONE


async def test_rollout_is_undone_and_promoted_by_hand(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve()
        await ours.until_ready(1)
        with pytest.raises(StateError, match="no release before 1"):
            await ours.plane.undo_rollout(ROOT, ours.service_id)
        canary = {"strategy": "canary", "bake": "1h"}
        await ours.serve(env={"VERSION": "2"}, rollout=canary)
        await ours.plane.promote_rollout(ROOT, ours.service_id)
        await ours.until(lambda look: look.service.live == 2)
        await ours.plane.undo_rollout(ROOT, ours.service_id)
        look = await ours.until(lambda look: look.service.live == 1)
        assert look.service.newest == 2


async def test_stopped_service_is_gone_with_its_replicas(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        await ours.serve(replicas=2)
        await ours.until_ready(2)
        await ours.plane.stop_service(ROOT, ours.service_id)
        with pytest.raises(StateError, match="being stopped by root"):
            await ours.serve(env={"A": "1"})
        with anyio.fail_after(30):
            while await ours.plane.core.records.store.read(lambda tx: tx.services.all()):
                await ours.said()
                await anyio.sleep(0.02)
        open_jobs = await ours.plane.core.records.store.read(lambda tx: tx.jobs.count_open("vision"))
        assert open_jobs == 0


async def test_replica_at_no_address_is_in_no_table_and_its_service_says_why(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:
        ours.is_held = True
        await ours.serve()
        observed = await ours.until(
            lambda look: [a.state for _, _, a in look.replicas] == [AttemptState.RUNNING]
        )
        attempt = observed.replicas[0][2]
        renewal = Renewal(
            attempt_id=attempt.attempt_id,
            epoch=attempt.epoch,
            node=attempt.node_names[0],
            phase=TaskPhase.RUNNING,
            replica_status=ReplicaStatus(address="no address", is_ready=True, at=time.time()),
        )
        await ours.plane.renew(renewal)
        observed = await ours.until(lambda look: bool(look.replicas[0][0].because))
        replica = observed.replicas[0][0]
        assert (replica.address, replica.is_ready) == ("", False)
        assert "`no address`" in replica.because


async def test_error_of_a_failed_replica_stays_until_the_next_release(tmp_path: Path) -> None:
    message = "rank 0 exited with code 1\nModuleNotFoundError: No module named 'flask'"
    script = always(Act(run_s=0.05, kind=EndKind.EXITED, exit_code=1, message=message))
    async with cluster(tmp_path, script) as ours:
        ours.is_held = True
        await ours.serve()
        service = (await ours.until(lambda look: look.service.failures >= 2)).service
        assert service.failed_ref.startswith("vision/")
        assert service.failed_because.splitlines()[-1] == "ModuleNotFoundError: No module named 'flask'"
        assert (await ours.serve(env={"A": "1"})).failed_because == ""


async def test_name_of_a_service_resolves_to_a_living_replica_of_the_serving_release(tmp_path: Path) -> None:
    async with cluster(tmp_path) as ours:

        async def named() -> Job:
            [reference] = await ours.plane.core.records.store.read(
                lambda tx: resolve_reference(tx, "chat", ("vision",))
            )
            return reference.job

        await ours.serve(replicas=2)
        await ours.until_ready(2)
        assert (await named()).number == 2
        [first, second] = [job.number for _, job, _ in (await ours.look()).replicas]
        ours.is_held = True
        await ours.serve(env={"A": "1"}, replicas=2)
        await ours.until(lambda look: any(replica.release == 2 for replica, _, _ in look.replicas))
        assert (await named()).number in (first, second)
        await ours.plane.undo_rollout(ROOT, ours.service_id)
        await ours.until(lambda look: [replica.release for replica, _, _ in look.replicas] == [1, 1])
        assert (await named()).number in (first, second)
        await ours.plane.scale_service(ROOT, ours.service_id, 0, 0)
        await ours.until(lambda look: look.replicas == ())
        assert (await named()).number > second


async def test_replicas_of_a_large_service_start_and_stop_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "MAX_STEPS", 2)
    async with cluster(tmp_path) as ours:
        with counted_changes() as changes:
            await ours.serve(replicas=20, resources={"cpus": 0.01})
            await ours.until(lambda look: len(look.replicas) == 20)
            await ours.plane.stop_service(ROOT, ours.service_id)
            with anyio.fail_after(30):
                while await ours.plane.core.records.store.read(lambda tx: tx.services.all()):
                    await ours.said()
                    await anyio.sleep(0.02)
        turns = [change.num_statements for change in changes if change.name.startswith("_reconcile")]
        assert len(turns) >= 20 / 2 + 20 / 2
        assert max(turns) < 20 * 5  # to start one takes more than five
