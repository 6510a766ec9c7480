"""A desk that answers over TLS, with the real routes and guard, for engines under test without a control
plane; and an engine that starts keepers as plain processes, as a cluster would on its nodes.
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

import anyio
import anyio.from_thread
import msgspec

from shoal.api.server import serve_nodes
from shoal.clock import Clock, SystemClock
from shoal.control import ControlPlane
from shoal.control.authority import load_authority, load_certificate
from shoal.control.core import Core
from shoal.engines.desk import DeskShare
from shoal.engines.glimpses import Glimpse, Glimpses, Stage
from shoal.engines.reach import Reach
from shoal.engines.remote import RemoteEngine
from shoal.identity import proof_key
from shoal.ids import id_factory
from shoal.model.node import NodeFacts
from shoal.settings import Settings
from shoal.store import open_memory_store
from shoal.wire import Assignment, Credentials, Fetch, Order, Summons

KEY = b"k" * 32


class DeskPlane(ControlPlane):
    """Gives orders of attempts that no store has."""

    async def fetch_order(self, asked: Fetch) -> Assignment:
        engine = self.core.engine
        assert isinstance(engine, RemoteEngine)
        share = engine.desk.take(asked)
        key = proof_key(KEY, asked.attempt_id, asked.node)
        return Assignment(
            order=share.order,
            credentials=Credentials(proof_key=key, secrets={"PASSWORD": "swordfish"}),
            has_archive=share.order.archive_digest is not None,
        )


class DeskServer:
    """Listens on `host`; its `engine` can be replaced while it does."""

    def __init__(self, home: Path, host: str = "127.0.0.1") -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clock: Clock = SystemClock()
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.settings = Settings(home=home, nodes_host=host, nodes_port=port)
        self._core: Core | None = None

    def reach(self, **more: str) -> Reach:
        ca = load_authority(self.settings.home, self.clock).certificate.decode()
        return Reach(urls=self.settings.reach, ca=ca, **more)

    @contextlib.contextmanager
    def serving(self, engine: RemoteEngine) -> Iterator[None]:
        certify = partial(load_certificate, self.settings, self.clock)
        with anyio.from_thread.start_blocking_portal() as portal:
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
                await serve_nodes(DeskPlane(self._core), self._listener, certify, until=until[0])
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
        self._core.engine = engine


class ProcessEngine(RemoteEngine):
    """Keepers as processes of this machine, each with a node's name."""

    name = "process"
    node_names = ("n1", "n2")

    def __init__(
        self, home: Path, reach: Reach, started: dict[tuple[str, str, int], list[subprocess.Popen[bytes]]]
    ):
        super().__init__(home, clock=SystemClock(), reach=reach)
        self.started = started
        self.before_start: Callable[[Summons], Summons | None] = lambda summons: summons

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        changed = self.before_start(summons)
        for order in orders if changed is not None else ():
            self._spawn(msgspec.json.encode(changed), order)

    def _spawn(self, summons: bytes, order: Order) -> None:
        errors = (self._home / f"{order.attempt_id}.{order.node}.err").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "shoal.runtime.keep", order.node],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "src")},
        )
        errors.close()
        assert process.stdin is not None
        process.stdin.write(summons)
        process.stdin.close()
        key = order.attempt_id, order.node, order.incarnation
        self.started.setdefault(key, []).append(process)

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        seen: Glimpses = {}
        for share in shares:
            order = share.order
            key = order.attempt_id, order.node, order.incarnation
            if key in self.started:
                codes = [process.poll() for process in self.started[key]]
                is_over = None not in codes
                stage = Stage.ENDED if is_over else Stage.RUNNING
                seen[key[:2]] = Glimpse(stage=stage, raw=f"exit codes {codes}", is_over=is_over)
        return seen

    async def end(self, attempt_id: str) -> None:
        for (own, _, _), processes in self.started.items():
            for process in processes if own == attempt_id else ():
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
