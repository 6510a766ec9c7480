"""A control plane with the real store, scheduler and commands, over the fake engine.

A small cluster with people in it, driven synchronously: two projects, every role, a job in each.

| token | who |
|---|---|
| viewer, member, other, lead | cy, ben, bea, ana: in project `vision` |
| stranger | dora: a member of `speech`, which the others may not see |
| operator, admin | oz, ada: on the whole cluster |
| job, supervisor | of ben's running job on node-1 |
| data_plane | what requests to services go through |
| bootstrap | of ben's running job, as supervisors on other machines would have it |
| reader, submitter | ada's, with the scope of a viewer and of a member |
| bound, bound_elsewhere | ada's, good in `vision` alone and in `speech` alone |
| service, expired, orphan | ana's: for one service; over; made with one that was revoked |
| ended_job | of a job that is over |

The real server on a real port, in a thread of this process, over the fake engine.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import pytest
from starlette.types import ASGIApp

from shoal.api import create_app
from shoal.api.http.connections import ConnectionSlots
from shoal.api.http.protocol import ConnectionLimits
from shoal.api.http.server import make_server, open_socket
from shoal.clock import SystemClock
from shoal.control import Actor
from shoal.control.core import Core
from shoal.control.loops import runner
from shoal.engines.fake import Act, FakeCluster, FakeEngine, Script, always
from shoal.identity import bootstrap_token, data_plane_token, job_token, proof_key
from shoal.ids import id_factory
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.node import Gpu, NodeFacts
from shoal.model.people import Role
from shoal.proof import sign
from shoal.settings import ServerLimits, Settings
from shoal.store import open_memory_store, open_store
from shoal.wire import Renewal, TaskPhase
from tests.support.host.processes import pause_s
from tests.support.planes import asgi
from tests.support.planes.asgi import AsgiReply, AsgiStream
from tests.support.planes.commands import Commands

FOREVER = always(Act(run_s=None, lines=("hello",)))
"""Every job prints a line and runs until it is stopped."""


def fake_nodes(count: int = 2, gpus: int = 4) -> list[NodeFacts]:
    """Nodes that small jobs do not fill, with some GPUs."""
    return [
        NodeFacts(
            name=f"node-{number}",
            cpus=4096.0,
            memory_bytes=64 << 40,
            disk_bytes=100 << 30,
            gpus=tuple(Gpu(index=index, kind="H100") for index in range(gpus)),
            is_simulated=True,
        )
        for number in range(1, count + 1)
    ]


@asynccontextmanager
async def open_plane(
    home: Path,
    *,
    script: Script = FOREVER,
    limits: ServerLimits | None = None,
    is_durable: bool = False,
    is_running: bool = True,
    data_plane: str = "embedded",
) -> AsyncIterator[Commands]:
    """`is_durable`: SQLite on disk instead of memory. Not `is_running`: no loop moves anything."""
    clock = SystemClock()
    settings = Settings(home=home, port=0, limits=limits or ServerLimits(), data_plane=data_plane)
    store = open_store(settings.store_url, clock=clock) if is_durable else open_memory_store()
    cluster = FakeCluster(fake_nodes(), clock=clock, script=script)
    core = Core(
        store=store,
        engine=FakeEngine(cluster),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=settings,
        key=os.urandom(32),
    )
    try:
        if is_running:
            with _quick_loops():
                async with Commands.running(core) as plane:
                    yield plane
        else:
            yield Commands(core)
    finally:
        await store.close()


@contextmanager
def _quick_loops() -> Iterator[None]:
    """The fake engine tells nobody of what happened there: it is looked at often, so that no test waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "WATCH_EVERY_S", 0.1)
        patch.setattr(runner, "SERVE_EVERY_S", 0.1)
        yield


T = TypeVar("T")
ROOT = Actor(kind="user", id="usr_root", name="root")
PEOPLE: dict[str, tuple[str, Role | None, str | None, Role | None]] = {
    "viewer": ("cy", None, "vision", Role.VIEWER),
    "member": ("ben", None, "vision", Role.MEMBER),
    "other": ("bea", None, "vision", Role.MEMBER),
    "lead": ("ana", None, "vision", Role.LEAD),
    "stranger": ("dora", None, "speech", Role.MEMBER),
    "operator": ("oz", Role.OPERATOR, None, None),
    "admin": ("ada", Role.ADMIN, None, None),
}
SPEC = {"run": "sleep 1000", "name": "train"}


class ApiWorld:
    """Everything a test needs: tokens by role, jobs by project, and a way to call."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, plane: Commands, app: ASGIApp) -> None:
        self.portal = portal
        self.plane = plane
        self.app = app
        self.tokens: dict[str, str] = {}
        self.jobs: dict[str, str] = {}

    def call(
        self,
        method: str,
        target: str,
        *,
        role: str | None = None,
        token: str | None = None,
        data: Any = None,
        body: bytes = b"",
        headers: asgi.Headers = (),
        host: str | None = "localhost",
        client: tuple[str, int] = ("127.0.0.1", 50000),
    ) -> AsgiReply:
        """`role` names a token of this world; `data` is sent as JSON."""
        token = self.tokens[role] if role is not None else token
        sent = list(headers)
        if host is not None:
            sent.append(("host", host))
        if data is not None:
            body = json.dumps(data).encode()
            sent.append(("content-type", "application/json"))
        if role == "supervisor":
            token = self.supervisor_token(self.newest_attempt(self.jobs["vision"]), body)
        if token is not None:
            sent.append(("authorization", f"Bearer {token}"))
        if body:
            sent.append(("content-length", str(len(body))))
        return self.portal.call(
            lambda: asgi.request(self.app, method, target, headers=sent, body=body, client=client)
        )

    def supervisor_token(
        self, attempt: Attempt, body: bytes, *, node: str = "", key: bytes | None = None
    ) -> str:
        """The token of this body from the attempt's supervisor, on its first node if not on `node`."""
        node = node or attempt.node_names[0]
        secret = proof_key(key or self.plane.core.sealing.key, attempt.attempt_id, node)
        who = Renewal(attempt_id=attempt.attempt_id, epoch=attempt.epoch, node=node, phase=TaskPhase.RUNNING)
        return sign(secret, who, body)

    @contextmanager
    def stream(
        self, target: str, *, role: str | None = None, token: str | None = None, headers: asgi.Headers = ()
    ) -> Iterator[AsgiStream]:
        """A stream that is closed by the client when the block ends."""
        token = self.tokens[role] if role is not None else token
        sent = [("host", "localhost"), ("authorization", f"Bearer {token}"), *headers]
        stream = self.portal.call(_new_stream)
        scope = asgi.scope_of("GET", target, sent)
        done: Future[None] = self.portal.start_task_soon(asgi.run, self.app, scope, b"", stream)
        try:
            yield stream
        finally:
            self.portal.call(stream.client_gone.set)
            done.result(timeout=10)

    def read(self, fn: Callable[[Any], T]) -> T:
        """What the store says."""
        return self.portal.call(self.plane.core.records.store.read, fn)

    def submit(self, role: str, project: str, **spec: Any) -> str:
        """A job's id."""
        answer = self.call("POST", "/v1/jobs", role=role, data={"spec": {**SPEC, **spec}, "project": project})
        assert answer.status == 201, answer.body
        return str(answer.json()["jobs"][0]["job_id"])

    def newest_attempt(self, job_id: str) -> Attempt:
        found = self.read(lambda tx: tx.attempts.newest(job_id))
        assert isinstance(found, Attempt)
        return found

    def until_state(self, job_id: str, state: AttemptState) -> Attempt:
        """Wait until the job's newest attempt is there."""
        eventually(lambda: self.newest_attempt(job_id).state is state)
        return self.newest_attempt(job_id)


def eventually(is_so: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Poll until it is so; fail when the deadline passes."""
    since = time.monotonic()
    while not is_so():
        assert time.monotonic() < since + within_s, f"not so within {within_s} s"
        time.sleep(pause_s(since))


@contextmanager
def open_world(
    home: Path,
    *,
    script: Script = FOREVER,
    limits: ServerLimits | None = None,
    is_durable: bool = False,
    use_uvloop: bool = False,
) -> Iterator[ApiWorld]:
    """A running control plane with its people and jobs."""
    options = {"use_uvloop": use_uvloop}
    with anyio.from_thread.start_blocking_portal(backend_options=options) as portal:
        opened = open_plane(home, script=script, limits=limits, is_durable=is_durable)
        with portal.wrap_async_context_manager(opened) as plane:
            world = ApiWorld(portal, plane, create_app(plane.core))
            portal.call(_add_people, world)
            _submit_jobs(world)
            _add_narrow_tokens(world)
            yield world


async def _new_stream() -> AsgiStream:
    return AsgiStream()


async def _add_people(world: ApiWorld) -> None:
    plane = world.plane
    for project in ("vision", "speech"):
        await plane.create_project(ROOT, project, {})
    for role, (name, cluster_role, home, home_role) in PEOPLE.items():
        user = await plane.create_user(ROOT, name, cluster_role)
        if home is not None and home_role is not None:
            await plane.set_member(ROOT, home, name, home_role)
        _, text = await plane.create_token(ROOT, user, label=role, scope=Role.ADMIN)
        assert text is not None
        world.tokens[role] = text


def _submit_jobs(world: ApiWorld) -> None:
    world.jobs["vision"] = world.submit("member", "vision")
    world.jobs["speech"] = world.submit("stranger", "speech")
    attempt = world.until_state(world.jobs["vision"], AttemptState.RUNNING)
    key = world.plane.core.sealing.key
    world.tokens["data_plane"] = data_plane_token(key)
    world.tokens["bootstrap"] = bootstrap_token(key, attempt.attempt_id)
    world.tokens["job"] = job_token(key, attempt.attempt_id)
    world.tokens["supervisor"] = world.supervisor_token(attempt, b"")


def _add_narrow_tokens(world: ApiWorld) -> None:
    """Tokens that may less than their users, or nothing."""

    def made(**wanted: Any) -> Any:
        answer = world.call("POST", "/v1/tokens", role=wanted.pop("role", "admin"), data=wanted)
        assert answer.status == 201, answer.body
        return answer.json()

    world.tokens["reader"] = made(scope="viewer")["text"]
    world.tokens["submitter"] = made(scope="member")["text"]
    world.tokens["bound"] = made(scope="admin", project="vision")["text"]
    world.tokens["bound_elsewhere"] = made(scope="admin", project="speech")["text"]
    world.tokens["service"] = made(role="lead", project="vision", service="chat")["text"]
    world.tokens["expired"] = made(role="lead", lifetime_s=0.001)["text"]
    parent = made(role="lead")
    orphan = world.call("POST", "/v1/tokens", token=parent["text"], data={})
    world.tokens["orphan"] = orphan.json()["text"]
    assert world.call("DELETE", f"/v1/tokens/{parent['id']}", role="lead").status == 200
    job_id = world.submit("member", "vision")
    attempt = world.until_state(job_id, AttemptState.RUNNING)
    world.tokens["ended_job"] = job_token(world.plane.core.sealing.key, attempt.attempt_id)
    assert world.call("POST", f"/v1/jobs/{job_id}/stop", role="member", data={}).status == 200
    world.until_state(job_id, AttemptState.ENDED)


@contextmanager
def open_server(
    home: Path,
    limits: ConnectionLimits | None = None,
    slots: ConnectionSlots | None = None,
    keep_alive_s: float | None = None,
) -> Iterator[tuple[ApiWorld, int]]:
    """A world whose application also listens; the port is the second value."""
    with open_world(home, use_uvloop=True) as world:  # as the control plane does
        listener = open_socket(world.plane.settings)
        port = listener.getsockname()[1]
        server = make_server(world.app, world.plane.settings)
        server.config.timeout_keep_alive = keep_alive_s or server.config.timeout_keep_alive  # type: ignore[assignment]
        server.limits, server.slots = limits or server.limits, slots or server.slots
        done = world.portal.start_task_soon(server.serve, [listener])
        eventually(lambda: server.started)
        try:
            yield world, port
        finally:
            server.should_exit = True
            done.result(timeout=20)


def connect_client(port: int, timeout_s: float = 20.0, *, receive_bytes: int | None = None) -> socket.socket:
    """A connection; `receive_bytes`: what the kernel takes in for a client that does not read."""
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.settimeout(timeout_s)
    link.connect(("127.0.0.1", port))
    return link
