"""Kueue's own performance case, in real time through the control plane: loops, SQLite on disk, fake engine.

A cohort is a project with a limit. A queue of it is a project below, with a quota that it may exceed by
borrowing. Nothing runs faster than real time: a workload of one second takes one second.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import anyio

from benchmarks.measure import table
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.cli.control_plane.server import BACKEND, tune
from shoal.clock import SystemClock
from shoal.control import Actor
from shoal.control.core import Core
from shoal.control.job_specs import FrozenSpec, freeze
from shoal.engines.base import Submission
from shoal.engines.fake import Act, FakeCluster, FakeEngine, SentRenewal, by_run
from shoal.errors import StateError
from shoal.ids import id_factory
from shoal.model.node import NodeFacts
from shoal.model.people import DeviceAmounts, Role, User
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import open_store
from tests.support.planes.commands import Commands

KUEUE_S = 351.0
"""Documented by Kueue for the whole case."""
CLIENTS = 8
"""Clients that submit at the same time, each its next job when the last one is on disk."""
LATE_S = 0.2
"""Renewals that are due and not sent are searched for at least this often."""
LOOK_EVERY_S = 0.5
"""How often the store is asked whether all has ended. The time of the end itself is known exactly."""
ANA = Actor(kind="user", id="usr_ana", name="ana")
USER = User(user_id="usr_ana", name="ana", cluster_role=Role.ADMIN)


@dataclass(frozen=True)
class Kind:
    """Workloads of a queue that are alike."""

    count: int
    cpus: int
    run_s: float

    @property
    def run(self) -> str:
        return f"sleep {self.run_s}"


@dataclass(frozen=True)
class Case:
    cohorts: int = 5
    queues: int = 6
    quota: int = 20
    borrow: int = 100
    kinds: tuple[Kind, ...] = (Kind(350, 1, 0.2), Kind(100, 5, 0.5), Kind(50, 20, 1.0))

    @property
    def cohort_cpus(self) -> int:
        return self.queues * self.quota

    @property
    def num_workloads(self) -> int:
        return self.cohorts * self.queues * sum(kind.count for kind in self.kinds)

    @property
    def bound_s(self) -> float:
        """What the work itself needs if no CPU of a cohort is ever idle."""
        return self.queues * sum(k.count * k.cpus * k.run_s for k in self.kinds) / self.cohort_cpus


class Network:
    """Carries renewals from the fake supervisors to the control plane as soon as they are sent."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.last_end_at = 0.0
        """When the last end that was told was on disk, by the monotonic clock."""
        self._is_news = asyncio.Event()

    def wake(self) -> None:
        self._is_news.set()

    async def carry(self, plane: Commands) -> None:
        """Runs for ever."""
        async with anyio.create_task_group() as renewals:
            while True:
                self._is_news.clear()
                for sent in self.cluster.renewals():
                    renewals.start_soon(self._carry_one, plane, sent)
                at = self.cluster.next_event_at()
                wait_s = LATE_S if at is None else min(max(at - self.cluster.clock.monotonic(), 0.0), LATE_S)
                with anyio.move_on_after(wait_s):
                    await self._is_news.wait()

    async def _carry_one(self, plane: Commands, sent: SentRenewal) -> None:
        try:
            answer = await plane.renew(sent.renewal)
        except StateError:
            self.cluster.reject(sent)
        else:
            self.cluster.deliver_reply(sent, answer)
            if sent.renewal.outcome is not None:
                self.last_end_at = self.cluster.clock.monotonic()


class WakingEngine(FakeEngine):
    """Informs the network of what begins."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.cluster)
        self._network = network

    async def submit(self, submission: Submission) -> str:
        native_id = await super().submit(submission)
        self._network.wake()
        return native_id


@dataclass(frozen=True)
class Result:
    took_s: float
    """From the first submission to the last end on disk."""
    submitting_s: float
    """Until the last submission was on disk."""
    cpu_s: float
    """CPU of the whole process: control plane, store, fake engine, clients."""
    num_ended: int
    """Workloads that succeeded."""


@asynccontextmanager
async def open_plane(home: Path, case: Case) -> AsyncIterator[tuple[Commands, Network]]:
    """One node per cohort, as large as all of them: quotas bind, and node sizes never do."""
    clock = SystemClock()
    cpus = float(case.cohorts * case.cohort_cpus)
    nodes = [
        NodeFacts(name=f"node-{n}", cpus=cpus, memory_bytes=1 << 40, disk_bytes=1 << 40, is_simulated=True)
        for n in range(case.cohorts)
    ]
    script = by_run({kind.run: Act(run_s=kind.run_s) for kind in case.kinds})
    network = Network(FakeCluster(nodes, clock=clock, script=script))
    settings = Settings(home=home, port=0)
    store = open_store(settings.store_url, clock=clock)
    core = Core(
        store=store,
        engine=WakingEngine(network),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=settings,
        key=os.urandom(32),
    )
    core.leadership.control_urls = ("http://fake",)
    try:
        async with Commands.running(core) as plane, anyio.create_task_group() as tasks:
            await _make_projects(plane, case)
            tasks.start_soon(network.carry, plane)
            yield plane, network
            tasks.cancel_scope.cancel()
    finally:
        await store.close()


async def _make_projects(plane: Commands, case: Case) -> None:
    await plane.core.records.store.write(lambda tx: tx.people.add_user(USER))
    for cohort in range(case.cohorts):
        limit = DeviceAmounts(cpus=case.cohort_cpus)
        await plane.create_project(ANA, f"cohort-{cohort}", {"limit": limit})
        for queue in range(case.queues):
            limits = {
                "parent": f"cohort-{cohort}",
                "quota": DeviceAmounts(cpus=case.quota),
                "borrow": DeviceAmounts(cpus=case.borrow),
            }
            await plane.create_project(ANA, _queue(cohort, queue), limits)


def _queue(cohort: int, queue: int) -> str:
    return f"queue-{cohort}-{queue}"


def workloads(case: Case) -> Iterator[tuple[str, FrozenSpec]]:
    """Project and spec, the queues in turn, so that no queue is full before the others have begun."""
    specs = {
        kind: freeze(parse_job({"run": kind.run, "workdir": None, "resources": {"cpus": kind.cpus}}))
        for kind in case.kinds
    }
    of_one_queue = [
        kind for alike in zip_longest(*([k] * k.count for k in case.kinds)) for kind in alike if kind
    ]
    for kind in of_one_queue:
        for cohort in range(case.cohorts):
            for queue in range(case.queues):
                yield _queue(cohort, queue), specs[kind]


async def drive(home: Path, case: Case) -> Result:
    """Run the whole case, from an empty store."""
    async with open_plane(home, case) as (plane, network):
        left = workloads(case)
        began, cpu_began = time.monotonic(), time.process_time()

        async def client() -> None:
            for project, spec in left:
                await plane.submit(ANA, spec, project=project, owner=USER)

        async with anyio.create_task_group() as clients:
            for _ in range(CLIENTS):
                clients.start_soon(client)
        submitting_s = time.monotonic() - began
        num_ended = 0
        while num_ended < case.num_workloads:
            await anyio.sleep(LOOK_EVERY_S)
            num_ended = await _num_succeeded(plane)
        took_s, cpu_s = network.last_end_at - began, time.process_time() - cpu_began
        return Result(took_s, submitting_s, cpu_s, num_ended)


async def _num_succeeded(plane: Commands) -> int:
    counts = await plane.core.records.store.read(lambda tx: tx.jobs.count_by_status())
    return counts.get("succeeded", 0)


def report(case: Case, result: Result) -> Report:
    rows = [
        ["the work itself", f"{case.bound_s:.1f}", "1.00x", "-"],
        ["Kueue, documented", f"{KUEUE_S:.1f}", f"{KUEUE_S / case.bound_s:.2f}x", "-"],
        [
            "Shoal, measured",
            f"{result.took_s:.1f}",
            f"{result.took_s / case.bound_s:.2f}x",
            f"{result.cpu_s:.1f}",
        ],
    ]
    over = result.took_s / case.bound_s - 1
    met = f"met, {over:.1%} over" if over <= 0.1 else f"missed: {over:.0%} over"
    pace = f"{case.num_workloads:,} single jobs from {CLIENTS} clients at once"
    notes = [
        f"goal, within 10 % of the bound: {met}",
        f"{pace}, the last on disk after {result.submitting_s:.1f} s",
        "measured in real time: control plane, loops and SQLite as shipped, nodes and runs faked, in one",
        "process; its CPU seconds are those of control plane, store, fake nodes and clients together",
    ]
    return Report(
        table(SECTION.title, ["who", "seconds", "of the bound", "CPU s"], rows, notes), is_right=True
    )


def run(traces: Traces) -> Report:
    """Needs no traces."""
    case = Case()
    say(f"{case.num_workloads:,} workloads in real time: {case.bound_s:.0f} s at least")
    with tempfile.TemporaryDirectory(prefix="shoal-kueue-") as home:
        tune()  # as the server does
        return report(case, anyio.run(drive, Path(home), case, backend_options=BACKEND))


SECTION = Section(
    name="kueue",
    title="Kueue's case: 15,000 workloads, 5 cohorts of 6 queues, first submission to last end",
    needs=(),
    run=run,
)
