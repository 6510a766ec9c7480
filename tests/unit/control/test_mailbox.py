"""Which requests get a task spec from the control plane: those for a task that may begin now, of the store's
own attempt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import anyio
import anyio.from_thread
import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.control.actor import SHOAL
from shoal.control.bootstrap import DEFAULT_PROJECT, ensure_admin
from shoal.control.core import Core
from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.engines.remote.cluster_observation import ClusterObservations
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.engine import RemoteEngine
from shoal.engines.remote.mailbox import MailboxTask
from shoal.errors import Deposed, EngineUnreachable, NotFound, StateError
from shoal.identity import proof_key
from shoal.ids import id_factory
from shoal.model.moves import TaskEnded
from shoal.model.node import NodeFacts
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import Tx, open_memory_store
from shoal.wire import (
    AGENT_REPLY_S,
    EndKind,
    LaunchRequest,
    StatusReport,
    TaskOutcome,
    TaskSpec,
    TaskSpecRequest,
)
from tests.support.planes.commands import Commands
from tests.support.planes.world import open_plane
from tests.support.runtime.task_specs import change_task_spec

pytestmark = pytest.mark.anyio


class Unstarted(RemoteEngine):
    """A cluster that starts nothing: the tests ask the mailbox themselves."""

    name = "unstarted"
    launch_request: LaunchRequest

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        self.launch_request = launch_request

    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations:
        return {}

    async def cancel_launched(self, attempt_id: str) -> None:
        return

    async def nodes(self) -> list[NodeFacts]:
        return [NodeFacts(name="n1", cpus=4.0, memory_bytes=8 << 30, disk_bytes=1 << 30)]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Commands]:
    clock, store = SystemClock(), open_memory_store()
    engine = Unstarted(tmp_path, clock=clock, access=ControlPlaneAccess(urls=("https://login:1",), ca="ca"))
    core = Core(
        store=store,
        engine=engine,
        clock=clock,
        new_id=id_factory(clock.now),
        settings=Settings(home=tmp_path),
        key=b"k" * 32,
    )
    await ensure_admin(core.records, core.sealing, core.settings, "ana")
    async with Commands.running(core) as plane:
        yield plane
    await store.close()


async def waiting(plane: Commands) -> TaskSpecRequest:
    """Return the request for a task spec that waits in the mailbox."""
    core = plane.core
    owner = (await core.records.store.read(lambda tx: tx.people.users()))[0]
    spec = parse_job({"run": "true", "workdir": None, "secrets": ["PASSWORD"]})
    secrets = {"PASSWORD": "swordfish"}
    await plane.submit(SHOAL, spec, project=DEFAULT_PROJECT, owner=owner, secrets=secrets)
    assert isinstance(core.link.engine, Unstarted)
    while not (tasks := core.link.engine.mailbox.tasks()):  # noqa: ASYNC110 - as long as it takes
        await anyio.sleep(0.01)
    return TaskSpecRequest(attempt_id=tasks[0].task_spec.identity.attempt_id, node="n1", process="first")


async def test_task_spec_comes_with_credentials_that_were_on_no_disk(plane: Commands, tmp_path: Path) -> None:
    request = await waiting(plane)
    assignment = await plane.assign_task(request)
    assert (assignment.task_spec.identity.attempt_id, assignment.credentials.secrets) == (
        request.attempt_id,
        {"PASSWORD": "swordfish"},
    )
    assert assignment.credentials.proof_key == proof_key(plane.core.sealing.key, request.attempt_id, "n1")
    assert await plane.assign_task(request) == assignment
    files = [path for path in tmp_path.rglob("*") if path.is_file()]  # noqa: ASYNC240
    assert any("mailbox" in path.parts for path in files)
    assert not any(b"swordfish" in path.read_bytes() for path in files)


async def test_task_spec_is_completed_by_the_engine_when_it_is_assigned(
    plane: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(task_spec: TaskSpec) -> TaskSpec:
        raise EngineUnreachable("the address of its first node is not known")

    async def as_given(task_spec: TaskSpec) -> TaskSpec:
        return change_task_spec(task_spec, master_addr="10.0.0.9")

    request = await waiting(plane)
    monkeypatch.setattr(plane.core.link.engine, "resolve_task_spec", away)
    with pytest.raises(EngineUnreachable):
        await plane.assign_task(request)
    assert isinstance(plane.core.link.engine, Unstarted)
    [task] = plane.core.link.engine.mailbox.tasks()
    assert task.is_waiting, "an agent without a reply may have given up, and no other could get the task spec"
    monkeypatch.setattr(plane.core.link.engine, "resolve_task_spec", as_given)
    request = msgspec.structs.replace(request, process="another")
    assert (await plane.assign_task(request)).task_spec.ranks.master_addr == "10.0.0.9"


async def test_task_spec_is_not_assigned_to_an_agent_that_has_stopped_waiting(
    plane: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, since = plane.core, plane.core.records.clock.monotonic()
    request = await waiting(plane)

    async def late(task_spec: TaskSpec) -> TaskSpec:
        monkeypatch.setattr(core.records.clock, "monotonic", lambda: since + 10 * AGENT_REPLY_S)
        return task_spec

    assert isinstance(core.link.engine, Unstarted)
    with monkeypatch.context() as slow:
        slow.setattr(core.link.engine, "resolve_task_spec", late)
        with pytest.raises(EngineUnreachable, match="does not wait any more"):
            await plane.assign_task(request)
    [task] = core.link.engine.mailbox.tasks()
    assert task.is_waiting
    await plane.assign_task(request)


async def test_no_task_spec_for_a_second_process_another_node_or_another_replacement(
    plane: Commands,
) -> None:
    request = await waiting(plane)
    await plane.assign_task(request)
    for other in ({"process": "second"}, {"node": "n2"}, {"replacement": 1}, {"attempt_id": "att_other"}):
        with pytest.raises((StateError, NotFound)):
            await plane.assign_task(msgspec.structs.replace(request, **other))


async def test_no_task_spec_for_a_job_that_was_stopped(plane: Commands) -> None:
    request = await waiting(plane)
    [(job, _)] = await plane.core.records.store.read(lambda tx: tx.attempts.with_jobs([request.attempt_id]))
    await plane.stop_job(SHOAL, job.job_id)
    with pytest.raises(StateError, match="has ended, or is to end"):
        await plane.assign_task(request)


async def test_no_task_spec_for_an_attempt_that_ends_while_it_is_assigned(
    plane: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await waiting(plane)
    core = plane.core
    assert isinstance(core.link.engine, Unstarted)
    take = core.link.engine.mailbox.assign
    gone = TaskOutcome(
        attempt_id=request.attempt_id,
        epoch=1,
        node="n1",
        kind=EndKind.LOST,
        ended_at=core.records.clock.now(),
    )

    def take_while_it_ends(request: TaskSpecRequest) -> MailboxTask:
        anyio.from_thread.run(
            core.records.store.write,
            lambda tx: core.records.recorder.advance(tx, request.attempt_id, TaskEnded(gone)),
        )
        return take(request)

    monkeypatch.setattr(core.link.engine.mailbox, "assign", take_while_it_ends)
    with pytest.raises(StateError, match="does not begin on n1: it has ended"):
        await plane.assign_task(request)


async def test_long_silent_agent_gets_no_task_spec_if_its_end_is_recorded_first(
    plane: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read is older than an end that is just being recorded."""
    request = await waiting(plane)
    await plane.assign_task(request)
    core, since, write = plane.core, plane.core.records.clock.monotonic(), plane.core.records.store.write
    gone = TaskOutcome(
        attempt_id=request.attempt_id,
        epoch=1,
        node="n1",
        kind=EndKind.FENCED,
        ended_at=core.records.clock.now(),
    )

    async def after_its_end(fn: Callable[[Tx], object], *, patience_s: float = 0.0) -> object:
        await write(lambda tx: core.records.recorder.advance(tx, request.attempt_id, TaskEnded(gone)))
        return await write(fn, patience_s=patience_s)

    monkeypatch.setattr(core.records.clock, "monotonic", lambda: since + FENCE_MARGIN_S + 1)
    monkeypatch.setattr(core.records.store, "write", after_its_end)
    with pytest.raises(StateError, match="does not begin on n1: it has ended"):
        await plane.assign_task(request)


async def test_agent_of_a_job_stopped_during_assignment_has_the_task_spec_and_learns_of_the_stop(
    plane: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await waiting(plane)
    core = plane.core
    assert isinstance(core.link.engine, Unstarted)
    [(job, _)] = await core.records.store.read(lambda tx: tx.attempts.with_jobs([request.attempt_id]))
    take = core.link.engine.mailbox.assign

    def take_before_it_is_stopped(request: TaskSpecRequest) -> MailboxTask:
        task = take(request)
        anyio.from_thread.run(plane.stop_job, SHOAL, job.job_id)
        return task

    monkeypatch.setattr(core.link.engine.mailbox, "assign", take_before_it_is_stopped)
    assignment = await plane.assign_task(request)
    report = StatusReport(
        attempt_id=request.attempt_id,
        epoch=assignment.task_spec.identity.epoch,
        node="n1",
        process=request.process,
        offset=0,
    )
    with anyio.fail_after(10.0):
        while (await plane.receive_status_report(report, b"")).stop_grace_s is None:  # noqa: ASYNC110 - the watch's doing
            await anyio.sleep(0.01)


async def test_deposed_control_plane_refuses_no_agent(
    plane: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await waiting(plane)
    await plane.assign_task(request)
    core, second = plane.core, msgspec.structs.replace(request, process="second")
    assert isinstance(core.link.engine, Unstarted)
    take = core.link.engine.mailbox.assign

    async def deposed(_: object) -> None:
        raise Deposed("another leads since")

    def take_while_it_happens(request: TaskSpecRequest) -> MailboxTask:
        monkeypatch.setattr(core.leadership, "term", 1)
        monkeypatch.setattr(core.records.store, "read", deposed)
        return take(request)

    with monkeypatch.context() as patch:
        patch.setattr(core.link.engine.mailbox, "assign", take_while_it_happens)
        with pytest.raises(Deposed):
            await plane.assign_task(second)
    with pytest.raises(Deposed):
        await plane.archive_for(second)
    report = StatusReport(attempt_id=request.attempt_id, epoch=1, node="n1", process="second")
    with pytest.raises(Deposed):
        await plane.receive_status_report(report, b"")


async def test_local_engine_has_no_mailbox(tmp_path: Path) -> None:
    async with open_plane(tmp_path) as plane:
        with pytest.raises(NotFound, match="the engine is `fake`"):
            await plane.assign_task(TaskSpecRequest(attempt_id="att_1", node="n1", process="p"))
