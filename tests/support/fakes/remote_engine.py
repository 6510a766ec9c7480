"""A desk that answers over TLS, with the real routes and guard, for engines under test without a control
plane; and an engine that starts keepers as plain processes, as a cluster would on its nodes.

An engine with a desk over a cluster that answers as a test tells it to: nothing is started.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import anyio
import anyio.from_thread
import msgspec

from shoal.api.http.server import serve_nodes
from shoal.clock import Clock, SystemClock
from shoal.control.bootstrap import load_authority, load_certificate
from shoal.control.capabilities import SubmissionInputs, Upkeep
from shoal.control.commands import mailbox
from shoal.control.core import Core
from shoal.control.services.state import ServiceState
from shoal.engines.fake import VirtualClock
from shoal.engines.remote.cluster_observation import ClusterObservation, ClusterObservations, ClusterTaskState
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.engine import RemoteEngine
from shoal.engines.remote.mailbox import MailboxTask
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.identity import proof_key
from shoal.ids import id_factory
from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts
from shoal.settings import Settings
from shoal.store import open_memory_store
from shoal.wire import LaunchRequest, TaskAssignment, TaskCredentials, TaskSpec, TaskSpecRequest

KEY = b"k" * 32


async def assign_unrecorded_task(
    upkeep: Upkeep, inputs: SubmissionInputs, services: ServiceState, request: TaskSpecRequest
) -> TaskAssignment:
    """Gives orders of attempts that no store has."""
    engine = upkeep.link.engine
    assert isinstance(engine, RemoteEngine)
    share = engine.mailbox.assign(request)
    key = proof_key(KEY, request.attempt_id, request.node)
    return TaskAssignment(
        task_spec=share.task_spec,
        credentials=TaskCredentials(proof_key=key, secrets={"PASSWORD": "swordfish"}),
        has_archive=share.task_spec.program.archive_digest is not None,
    )


class MailboxServer:
    """Listens on `host`; its `engine` can be replaced while it does."""

    def __init__(self, home: Path, host: str = "127.0.0.1") -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clock: Clock = SystemClock()
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.settings = Settings(home=home, nodes_host=host, nodes_port=port)
        self._core: Core | None = None

    def access(self, **more: str) -> ControlPlaneAccess:
        ca = load_authority(self.settings.home, self.clock).certificate.decode()
        return ControlPlaneAccess(urls=self.settings.urls_for_supervisors, ca=ca, **more)

    @contextlib.contextmanager
    def serving(self, engine: RemoteEngine) -> Iterator[None]:
        certify = partial(load_certificate, self.settings, self.clock)
        with (
            mock.patch.object(mailbox, "assign_task", assign_unrecorded_task),
            anyio.from_thread.start_blocking_portal() as portal,
        ):
            ready = threading.Event()
            until: list[anyio.Event] = []

            async def run() -> None:
                store = open_memory_store()
                self._core = Core(
                    store=store,
                    engine=engine,
                    clock=self.clock,
                    new_id=id_factory(self.clock.now),
                    settings=self.settings,
                    key=KEY,
                )
                until.append(anyio.Event())
                ready.set()
                await serve_nodes(self._core, self._listener, certify, until=until[0])
                await store.close()

            done = portal.start_task_soon(run)
            ready.wait(10)
            try:
                yield
            finally:
                portal.call(until[0].set)
                done.result(10)

    def replace(self, engine: RemoteEngine) -> None:
        assert self._core is not None
        self._core.link.engine = engine


class ProcessEngine(RemoteEngine):
    """Keepers as processes of this machine, each with a node's name."""

    name = "process"
    node_names = ("n1", "n2")

    def __init__(
        self,
        home: Path,
        access: ControlPlaneAccess,
        started: dict[tuple[str, str, int], list[subprocess.Popen[bytes]]],
    ):
        super().__init__(home, clock=SystemClock(), access=access)
        self.started = started
        self.before_start: Callable[[LaunchRequest], LaunchRequest | None] = lambda launch_request: (
            launch_request
        )

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        changed = self.before_start(launch_request)
        for order in task_specs if changed is not None else ():
            self._spawn(msgspec.json.encode(changed), order)

    def _spawn(self, launch_request: bytes, task_spec: TaskSpec) -> None:
        errors = (self._home / f"{task_spec.identity.attempt_id}.{task_spec.identity.node}.err").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "shoal.runtime.agent.bootstrap", task_spec.identity.node],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "src")},
        )
        errors.close()
        assert process.stdin is not None
        process.stdin.write(launch_request)
        process.stdin.close()
        key = task_spec.identity.attempt_id, task_spec.identity.node, task_spec.identity.replacement
        self.started.setdefault(key, []).append(process)

    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations:
        seen: ClusterObservations = {}
        for share in tasks:
            order = share.task_spec
            key = order.identity.attempt_id, order.identity.node, order.identity.replacement
            if key in self.started:
                codes = [process.poll() for process in self.started[key]]
                is_over = None not in codes
                stage = ClusterTaskState.ENDED if is_over else ClusterTaskState.RUNNING
                evidence = Evidence.ENDED if is_over else Evidence.UNKNOWN
                seen[key[:2]] = ClusterObservation(state=stage, raw=f"exit codes {codes}", evidence=evidence)
        return seen

    async def cancel_launched(self, attempt_id: str) -> None:
        for (attempt, _, _), processes in self.started.items():
            for process in processes if attempt == attempt_id else ():
                process.terminate()

    async def nodes(self) -> list[NodeFacts]:
        return [
            NodeFacts(name=n, cpus=4.0, memory_bytes=8 << 30, disk_bytes=1 << 30) for n in self.node_names
        ]

    def wait(self, within_s: float = 30.0) -> None:
        """Until every keeper has ended."""
        deadline = time.monotonic() + within_s
        for processes in self.started.values():
            for process in processes:
                process.wait(max(deadline - time.monotonic(), 0.1))


class ScriptedEngine(RemoteEngine):
    """A cluster whose controller can go away."""

    name = "lent"
    is_away = False
    is_full = False
    names: tuple[str, ...] = ("n1", "n2")
    refusal = ""

    def __init__(self, home: Path, clock: VirtualClock, shared_folder: str = "") -> None:
        reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca", shared=shared_folder)
        super().__init__(home, clock=clock, access=reach)
        self.cancelled: list[str] = []
        self.cluster_observations: ClusterObservations = {}

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        if self.is_full:
            raise EngineUnreachable("sbatch said: job submit limit")
        if self.refusal:
            raise EngineRefused(self.refusal)

    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations:
        if self.is_away:
            raise EngineUnreachable("squeue: unable to contact slurm controller")
        return self.cluster_observations

    async def cancel_launched(self, attempt_id: str) -> None:
        if self.is_away:
            raise EngineUnreachable("scancel: unable to contact slurm controller")
        self.cancelled.append(attempt_id)

    async def nodes(self) -> list[NodeFacts]:
        return self.observer.mark_silent_nodes(
            [NodeFacts(name=n, cpus=4.0, memory_bytes=8 << 30, disk_bytes=1 << 30) for n in self.names]
        )
