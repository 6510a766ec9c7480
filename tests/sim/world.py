"""One simulated cluster: a disk, nodes, a control plane that dies, clients that repeat themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.control.actor import Actor
from shoal.control.commands.jobs import retry_job, stop_job
from shoal.control.commands.nodes import set_node_state
from shoal.control.commands.renewals import renew
from shoal.control.commands.submit import SubmitRequest, SubmitResult, submit
from shoal.control.commands.windows import WindowRequest, cancel_window, declare_window
from shoal.control.core import Core
from shoal.control.job_specs import freeze
from shoal.control.loops.heal import heal
from shoal.control.loops.watch import watch
from shoal.control.record import record_event
from shoal.engines.fake import FakeCluster, FakeEngine, SentRenewal, VirtualClock, seeded, seeded_faults
from shoal.errors import EngineUnreachable, ShoalError, SpecError, StateError, StoreUnavailable
from shoal.ids import id_factory
from shoal.model.node import Gpu, NodeFacts, NodeState, WindowKind
from shoal.model.people import DeviceAmounts, Project, User
from shoal.scheduler import Policy
from shoal.settings import Settings
from shoal.spec import parse_job
from shoal.store import Tx, open_memory_store
from shoal.wire import RenewalReply
from tests.sim.driver import Driver, run_now
from tests.sim.seams import SimEngine, SimSingleFlight, SimStore
from tests.support.planes.bench import place_and_launch

ANA = Actor(kind="user", id="usr_ana", name="ana")
USER = User(user_id="usr_ana", name="ana")
LOOPS: dict[str, Callable[[Core], Coroutine[Any, Any, object]]] = {
    "place": place_and_launch,
    "watch": lambda core: watch(core.upkeep, core.inputs),
    "heal": lambda core: heal(core.upkeep),
}


class SimWorld:
    """`dice` decides everything; two worlds from one seed live the same life."""

    def __init__(self, seed: int, *, num_nodes: int = 3, faults: float = 0.1) -> None:
        self.seed = seed
        self.dice = random.Random(f"world/{seed}")
        self.clock = VirtualClock()
        self.driver = Driver(self.dice)
        self.disk = SimStore(open_memory_store(), self.dice)
        self.projects = ("lab",) if seed % 2 else ("lab", "lab", "vision")
        """In every other life a project has a quota, and takes back what the other borrowed."""
        self.has_gangs = seed % 3 == 0 and seed % 4 != 3
        """In every third life jobs have several nodes and run for long, so that their shares are lost one by
        one, in running attempts."""
        self.nodes = [f"n{i}" for i in range(1, num_nodes + (4 if self.has_gangs else 1))]
        lives = seeded(seed, mean_run_s=300, failing=0.05) if self.has_gangs else seeded(seed, mean_run_s=30)
        self.cluster = FakeCluster([_node(name) for name in self.nodes], clock=self.clock, script=lives)
        self.has_few_jobs = seed % 4 == 3
        """In some lives few jobs come, of which most could use every node, and grow as soon as they have
        saved: runs are too short for it to pay."""
        self.policy = Policy(grow_gain=0.0) if self.has_few_jobs else Policy()
        self.new_id = id_factory(self.clock.now, self.dice.randbytes)
        self.faults = faults
        """Chance that a call of the engine fails, from the next boot on."""
        self.history: list[str] = []
        self.accepted: dict[str, tuple[str, ...]] = {}
        """By idempotency key: the ids of the jobs the client was told of."""
        self.requests: dict[str, SubmitRequest] = {}
        """By idempotency key: what clients have asked, answered or not."""
        run_now(self.disk.inner.write(_people))
        self.boot()

    def boot(self) -> None:
        """Start a control plane that knows nothing but what is on disk and in the cluster."""
        engine = FakeEngine(self.cluster, faults=seeded_faults(self.dice.getrandbits(32), chance=self.faults))
        self.core = Core(
            store=self.disk,
            engine=SimEngine(engine, self.dice),
            clock=self.clock,
            new_id=self.new_id,
            settings=Settings(home=Path("/simulated")),
            key=bytes(32),
            random=self.dice.randbytes,
            policy=self.policy,
        )
        self.core.leadership.control_urls = ("http://simulated",)
        self.core.running.single_flight = SimSingleFlight(self.core.running.attempts)

    def crash(self) -> None:
        self.log("the control plane is killed")
        self.driver.kill()
        self.boot()

    def log(self, line: str) -> None:
        """The story, for whoever replays a failing seed."""
        self.history.append(f"{self.clock.monotonic():9.2f} {line}")

    # What clients do.

    def submit(self, key: str) -> None:
        """Ask, or ask again with the same key: an answer may have been lost."""
        asked = self.requests.setdefault(key, self._draw_job(key))

        def answered(result: SubmitResult | Exception) -> None:
            if isinstance(result, SubmitResult):
                ids = tuple(job.job_id for job in result.jobs)
                self.log(f"accepted {key}: {len(ids)} job(s), repeated={result.was_repeated}")
                first = self.accepted.setdefault(key, ids)
                assert first == ids, f"key {key} gave {first} first and {ids} now"
            else:
                # Nodes that never answered yet are not known: a job may not fit what is.
                self.raise_unless(result, StoreUnavailable, SpecError)

        self.log(f"submit {key}: {freeze(asked.spec).text}")
        self.driver.spawn(f"submit {key}", submit(self.core.admission, ANA, asked, key), answered)

    def _draw_job(self, name: str) -> SubmitRequest:
        dice = self.dice
        if self.has_gangs:
            return SubmitRequest(
                spec=parse_job(self._draw_gang(name)), project=dice.choice(self.projects), owner=USER
            )
        spec = {
            "name": name,
            "run": "train",
            "resources": {
                "nodes": dice.choice([1, "1..3", "1..3"] if self.has_few_jobs else [1, 1, 2, 2, "1..3"]),
                "gpus": dice.choice([3, 4] if self.has_few_jobs else [0.4, 0.5, 1, 1, 2, 4]),
                "exclusive": dice.random() < 0.1,
                "cpus": dice.choice([1, 3, 5]),
            },
            "retry": {"max": dice.choice([0, 1, 3]), "backoff": "2s"},
            "fence": f"{dice.choice([60, 120])}s",
            "grace": "5s",
            "priority": dice.choice([0, 0, 0, 5, 50, 80]),
            "workdir": None,
        }
        if dice.random() < 0.3:
            spec["time_limit"] = f"{dice.choice([5, 50])}s"
        if dice.random() < 0.2:
            spec["array"] = {"indices": [0, 1, 2], "at_once": dice.choice([1, 2])}
        elif self.accepted and dice.random() < 0.3:
            key = dice.choice(sorted(self.accepted))
            spec["after"] = [
                {"job": dice.choice(self.accepted[key]), "on": dice.choice(["succeeded", "ended"])}
            ]
            return SubmitRequest(spec=parse_job(spec), project=self.requests[key].project, owner=USER)
        return SubmitRequest(spec=parse_job(spec), project=dice.choice(self.projects), owner=USER)

    def _draw_gang(self, name: str) -> dict[str, object]:
        dice = self.dice
        return {
            "name": name,
            "run": "train",
            "resources": {"nodes": dice.choice([2, 2, 3]), "gpus": dice.choice([1, 2]), "cpus": 1},
            "retry": {"max": dice.choice([1, 5]), "backoff": "2s"},
            "fence": "60s",
            "grace": "5s",
            "priority": dice.choice([0, 0, 50]),
            "workdir": None,
        }

    def accepted_jobs(self) -> list[str]:
        return [job_id for ids in self.accepted.values() for job_id in ids]

    def stop(self, job_id: str) -> None:
        self.log(f"stop {job_id}")
        work = stop_job(
            self.core.records,
            self.core.link.engine,
            ANA,
            job_id,
            f"stop {job_id} {self.dice.getrandbits(20)}",
        )
        self.driver.spawn("stop", work, lambda end: self.raise_unless(end, StoreUnavailable))

    def retry(self, job_id: str) -> None:
        self.log(f"retry {job_id}")
        work = retry_job(self.core.admission, ANA, job_id, f"retry {job_id} {self.dice.getrandbits(20)}")
        self.driver.spawn("retry", work, lambda end: self.raise_unless(end, StoreUnavailable, StateError))

    def set_node(self, name: str, state: NodeState) -> None:
        self.log(f"{state} {name}")
        work = set_node_state(self.core.upkeep, ANA, name, state, "drill", None)
        self.driver.spawn("node", work, lambda end: self.raise_unless(end, StoreUnavailable, ShoalError))

    def declare_window(self, name: str, in_s: float, duration_s: float) -> None:
        self.log(f"maintenance of {name} in {in_s} s")
        asked = WindowRequest(
            kind=WindowKind.MAINTENANCE,
            nodes=(name,),
            from_at=self.clock.now() + in_s,
            duration_s=duration_s,
        )
        work = declare_window(self.core.records, ANA, asked, None)
        self.driver.spawn("window", work, lambda end: self.raise_unless(end, StoreUnavailable, ShoalError))

    def cancel_window(self, window_id: str) -> None:
        self.log(f"cancel {window_id}")
        work = cancel_window(self.core.records, ANA, window_id, None)
        self.driver.spawn("window", work, lambda end: self.raise_unless(end, StoreUnavailable, ShoalError))

    # What the control plane does by itself.

    def wake(self, loop: str) -> None:
        if not self.driver.is_running(loop):
            work = LOOPS[loop](self.core)
            expected = (StoreUnavailable, EngineUnreachable)
            self.driver.spawn(loop, work, lambda end: self.raise_unless(end, *expected))

    def deliver_renewals(self, lost: float = 0.1, repeated: float = 0.1) -> None:
        """The network between supervisors and the control plane: loses, repeats, reorders."""
        for sent in self.cluster.renewals():
            if self.dice.random() < lost:
                continue
            for _ in range(2 if self.dice.random() < repeated else 1):
                self._deliver(sent)

    def _deliver(self, sent: SentRenewal) -> None:
        def answered(answer: object) -> None:
            if isinstance(answer, StateError):
                self.cluster.reject(sent)
            elif isinstance(answer, RenewalReply):
                self.cluster.deliver_reply(sent, answer)
            else:
                self.raise_unless(answer, StoreUnavailable)

        self.driver.spawn(
            "renew", renew(self.core.upkeep, self.core.inputs, self.core.services, sent.renewal), answered
        )

    def raise_unless(self, result: object, *allowed: type[Exception]) -> None:
        if isinstance(result, Exception) and not isinstance(result, allowed):
            raise result


def _node(name: str) -> NodeFacts:
    gpus = tuple(Gpu(index=i, kind="fake") for i in range(4))
    return NodeFacts(name=name, cpus=8, memory_bytes=64 << 30, disk_bytes=1 << 40, gpus=gpus)


def _people(tx: Tx) -> None:
    tx.people.add_user(USER)
    tx.people.add_project(Project(name="lab", uid=200_000))
    tx.people.add_project(Project(name="vision", uid=200_001, quota=DeviceAmounts(gpus=4)))
    told = {"project": "vision", "quota": {"gpus": 4}}
    record_event(tx, "project.created", 0.0, ANA, project="vision", data=told)
