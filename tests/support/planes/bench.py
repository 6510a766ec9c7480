"""A control plane on a bench: memory store, fake engine, virtual clock, no event loop.

Every call returns when it is done. `store.meanwhile` and `engine.meanwhile` let something else happen at
one exact point of a loop, which is how the races are written down.

Stands for a connection to a control plane whose whole log is a lab's.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
import msgspec

from shoal.control import Actor, SubmitResult
from shoal.control.core import Core
from shoal.control.loops.heal import heal
from shoal.control.loops.launch import launch
from shoal.control.loops.place import PlacementCycle, place
from shoal.control.loops.watch import watch
from shoal.engines.base import Observation, Submission
from shoal.engines.fake import (
    NO_FAULT,
    Act,
    FakeCluster,
    FakeEngine,
    Fault,
    Script,
    Verb,
    VirtualClock,
    always,
)
from shoal.ids import id_factory
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.node import Gpu, Node, NodeFacts, NodeState
from shoal.model.people import Project, Role, User
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import Event, EventFilter, Tx, open_memory_store
from tests.support.planes.commands import Commands

T = TypeVar("T")
ANA = Actor(kind="user", id="usr_ana", name="ana")
USER = User(user_id="usr_ana", name="ana", cluster_role=Role.ADMIN)
KEY = bytes(range(32))
FOREVER = always(Act(run_s=None, lines=("hello",)))
SPEC: dict[str, Any] = {"run": "train", "workdir": None, "resources": {"cpus": 1}}


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise AssertionError("this coroutine was not supposed to wait")


def result_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that may wait for a thread."""
    return anyio.run(lambda: work)


async def place_and_launch(core: Core) -> PlacementCycle:
    """A cycle and what its loop does after it, one by one."""
    cycle = await place(core.upkeep, core.planning)
    for attempt_id in cycle.placed:
        await launch(core.upkeep, core.inputs, attempt_id)
    return cycle


class Meanwhile:
    """What happens once, just before or just after a named call."""

    def __init__(self) -> None:
        self._planned: dict[str, Callable[[], object]] = {}

    def __call__(self, point: str, action: Callable[[], object]) -> None:
        self._planned[point] = action

    def fire(self, point: str) -> None:
        happening = self._planned.pop(point, None)
        if happening is not None:
            happening()


class StagedEngine(FakeEngine):
    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.meanwhile = Meanwhile()

    def lose_connection(self, verb: Verb | None, *, is_after: bool = False) -> None:
        """From now on the connection breaks at this verb: before it is heard, or before it is answered."""
        lost = Fault(is_lost_before=not is_after, is_lost_after=is_after)
        self._faults = lambda asked, _: lost if asked is verb else NO_FAULT

    def lose_cluster(self) -> None:
        """From now on the engine cannot be asked anything."""
        self._faults = lambda *_: Fault(is_lost_before=True)

    async def submit(self, submission: Submission) -> str:
        self.meanwhile.fire("before submit")
        native_id = await super().submit(submission)
        self.meanwhile.fire("after submit")
        return native_id

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        self.meanwhile.fire("before cancel")
        await super().cancel(attempt_id, grace_s)

    async def list_owned(self) -> list[Observation]:
        self.meanwhile.fire("before look")
        seen = await super().list_owned()
        self.meanwhile.fire("after look")
        return seen


class StagedStore:
    """The store that survives a restart, with a stage before its reads and around its writes."""

    def __init__(self) -> None:
        self.inner = open_memory_store()
        self.meanwhile = Meanwhile()

    async def write(self, fn: Callable[[Tx], T], *, patience_s: float = 0.0) -> T:
        self.meanwhile.fire("before write")
        answer = await self.inner.write(fn)
        self.meanwhile.fire("after write")
        return answer

    async def read(self, fn: Callable[[Tx], T]) -> T:
        self.meanwhile.fire("before read")
        answer = await self.inner.read(fn)
        self.meanwhile.fire("after read")
        return answer

    def on_commit(self, callback: Callable[[int], None]) -> None:
        """Nobody wakes up by itself here."""

    async def close(self) -> None:
        await self.inner.close()


def node_facts(name: str, *, cpus: float = 8, gpus: int = 4) -> NodeFacts:
    devices = tuple(
        Gpu(index=index, kind="H100", uuid=f"GPU-{name}-{index}", minor=gpus - 1 - index)
        for index in range(gpus)
    )
    return NodeFacts(
        name=name, cpus=cpus, memory_bytes=64 << 30, disk_bytes=1 << 40, gpus=devices, is_simulated=True
    )


class ControlPlaneLab:
    def __init__(
        self,
        *,
        num_nodes: int = 2,
        script: Script = FOREVER,
        home: Path = Path("/lab"),
        mount_roots: tuple[Path, ...] = (),
        max_open_jobs: int = 10_000,
        max_jobs_per_day: int = 100_000,
        queues: tuple[str, ...] = ("default",),
    ) -> None:
        self.clock = VirtualClock()
        self.store = StagedStore()
        names = [f"n{number}" for number in range(1, num_nodes + 1)]
        self.cluster = FakeCluster([node_facts(name) for name in names], clock=self.clock, script=script)
        self.settings = Settings(home=home, mount_roots=mount_roots, queues=queues)
        self.new_id = id_factory(self.clock.now)

        def people(tx: Tx) -> None:
            tx.people.add_user(USER)
            tx.people.add_project(
                Project(
                    name="lab",
                    uid=tx.people.next_uid(),
                    max_open_jobs=max_open_jobs,
                    max_jobs_per_day=max_jobs_per_day,
                )
            )

        result_of(self.store.write(people))
        self.restart()

    def restart(self, key: bytes = KEY) -> None:
        """A control plane that knows nothing but what is in the store and the cluster."""
        self.engine = StagedEngine(self.cluster)
        self.core = Core(
            store=self.store,
            engine=self.engine,
            clock=self.clock,
            new_id=self.new_id,
            settings=self.settings,
            key=key,
        )
        self.core.leadership.control_urls = ("http://lab",)
        self.plane = Commands(self.core)

    # The loops.

    def heal(self) -> None:
        result_of(heal(self.core.upkeep))

    def place(self) -> float | None:
        return result_of(place_and_launch(self.core)).next_look_s

    def watch(self) -> None:
        result_of(watch(self.core.upkeep, self.core.inputs))

    def run_loops(self) -> None:
        """Everything once, in the order a start has."""
        self.heal()
        self.watch()
        self.place()
        self.watch()

    # What people ask for.

    def submit_all(
        self, *, key: str | None = None, secrets: dict[str, str] | None = None, **spec: Any
    ) -> SubmitResult:
        self.clock.advance(2**-10)  # no two at the same instant: then chance would order them
        wanted = parse_job({**SPEC, **spec})
        return result_of(self.plane.submit(ANA, wanted, project="lab", owner=USER, key=key, secrets=secrets))

    def submit(self, **spec: Any) -> Job:
        return self.submit_all(**spec).jobs[0]

    def running_job(self, **spec: Any) -> Job:
        """A job that was submitted, placed, handed over and seen to run."""
        job = self.submit(**spec)
        self.run_loops()
        return job

    def stop(self, job: Job, **options: Any) -> Job:
        return result_of(self.plane.stop_job(ANA, job.job_id, **options))

    def retry(self, job: Job, **options: Any) -> Job:
        return result_of(self.plane.retry_job(ANA, job.job_id, **options))

    def set_node_state(self, name: str, state: NodeState, because: str = "", key: str | None = None) -> Node:
        """What an operator says about a node."""
        return result_of(self.plane.set_node_state(ANA, name, state, because, key=key)).node

    # What is recorded.

    def read(self, fn: Callable[[Tx], T]) -> T:
        return result_of(self.store.read(fn))

    def stored_job(self, job: Job) -> Job:
        found = self.read(lambda tx: tx.jobs.get(job.job_id))
        assert found is not None
        return found

    def attempts(self, job: Job) -> list[Attempt]:
        return self.read(lambda tx: tx.attempts.of_job(job.job_id))

    def attempt(self, job: Job) -> Attempt:
        return self.attempts(job)[-1]

    def status(self, job: Job) -> str:
        found = self.stored_job(job)
        return str(found.outcome or self.attempt(job).state)

    def node(self, name: str) -> Node:
        found = self.read(lambda tx: tx.nodes.get(name))
        assert found is not None
        return found

    def events(self, kind: str = "") -> list[Event]:
        return [e for e in self.read(lambda tx: tx.events.page(0, limit=10_000)) if e.kind.startswith(kind)]

    def running_tasks(self) -> list[tuple[str, str]]:
        """What really runs, seen or not: attempt and node."""
        return sorted((order.identity.attempt_id, order.identity.node) for order in self.cluster.running())


class FakeLogServer:
    """Answers what commands ask of the event log, as it is when they connect."""

    def __init__(self, lab: ControlPlaneLab) -> None:
        found = lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30))
        self.log: list[dict[str, Any]] = msgspec.to_builtins(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self, *, after: int = 0, limit: int, **wanted: str) -> list[dict[str, Any]]:
        found = [
            event
            for event in self.log
            if event["seq"] > after
            and event["kind"].startswith(wanted.get("kind", ""))
            and wanted.get("job", event["job_id"]) == event["job_id"]
        ]
        return found[:limit]
