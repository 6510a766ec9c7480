"""A small cluster with people in it, driven synchronously: two projects, every role, a job in each.

| token | who |
|---|---|
| viewer, member, other, lead | cy, ben, bea, ana: in project `vision` |
| stranger | dora: a member of `speech`, which the others may not see |
| operator, admin | oz, ada: on the whole cluster |
| job, supervisor | of ben's running job on node-1 |
| data_plane | what requests to services go through |
| ticket | of ben's running job, as supervisors on other machines would have it |
| reader, submitter | ada's, with the scope of a viewer and of a member |
| bound, bound_elsewhere | ada's, good in `vision` alone and in `speech` alone |
| service, expired, orphan | ana's: for one service; over; made with one that was revoked |
| ended_job | of a job that is over |
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.from_thread
from starlette.types import ASGIApp

from shoal.api import create_app
from shoal.control import Actor, ControlPlane
from shoal.engines.fake import Script
from shoal.identity import data_plane_token, job_token, proof_key, ticket
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.people import Role
from shoal.proof import sign
from shoal.settings import ServerLimits
from shoal.wire import Phase, Renewal
from tests.support import asgi
from tests.support.asgi import Answer, Stream
from tests.support.patience import pause_s
from tests.support.plane import FOREVER, open_plane

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


class World:
    """Everything a test needs: tokens by role, jobs by project, and a way to call."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, plane: ControlPlane, app: ASGIApp) -> None:
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
    ) -> Answer:
        """`role` names a token of this world; `data` is sent as JSON."""
        token = self.tokens[role] if role is not None else token
        sent = list(headers)
        if host is not None:
            sent.append(("host", host))
        if data is not None:
            body = json.dumps(data).encode()
            sent.append(("content-type", "application/json"))
        if role == "supervisor":
            token = self.signed(self.newest(self.jobs["vision"]), body)
        if token is not None:
            sent.append(("authorization", f"Bearer {token}"))
        if body:
            sent.append(("content-length", str(len(body))))
        return self.portal.call(
            lambda: asgi.request(self.app, method, target, headers=sent, body=body, client=client)
        )

    def signed(self, attempt: Attempt, body: bytes, *, node: str = "", key: bytes | None = None) -> str:
        """The token of this body from the attempt's supervisor, on its first node if not on `node`."""
        node = node or attempt.node_names[0]
        secret = proof_key(key or self.plane.core.key, attempt.attempt_id, node)
        who = Renewal(attempt_id=attempt.attempt_id, epoch=attempt.epoch, node=node, phase=Phase.RUNNING)
        return sign(secret, who, body)

    @contextmanager
    def stream(
        self, target: str, *, role: str | None = None, token: str | None = None, headers: asgi.Headers = ()
    ) -> Iterator[Stream]:
        """A stream that is closed by the client when the block ends."""
        token = self.tokens[role] if role is not None else token
        sent = [("host", "localhost"), ("authorization", f"Bearer {token}"), *headers]
        stream = self.portal.call(_new_stream)
        scope = asgi.scope_of("GET", target, sent)
        done: Future[None] = self.portal.start_task_soon(asgi.run, self.app, scope, b"", stream)
        try:
            yield stream
        finally:
            self.portal.call(stream.is_gone.set)
            done.result(timeout=10)

    def read(self, fn: Callable[[Any], T]) -> T:
        """What the store says."""
        return self.portal.call(self.plane.core.store.read, fn)

    def submit(self, role: str, project: str, **spec: Any) -> str:
        """A job's id."""
        answer = self.call("POST", "/v1/jobs", role=role, data={"spec": {**SPEC, **spec}, "project": project})
        assert answer.status == 201, answer.body
        return str(answer.json()["jobs"][0]["job_id"])

    def newest(self, job_id: str) -> Attempt:
        found = self.read(lambda tx: tx.attempts.newest(job_id))
        assert isinstance(found, Attempt)
        return found

    def until_state(self, job_id: str, state: AttemptState) -> Attempt:
        """Wait until the job's newest attempt is there."""
        eventually(lambda: self.newest(job_id).state is state)
        return self.newest(job_id)


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
) -> Iterator[World]:
    """A running control plane with its people and jobs."""
    options = {"use_uvloop": use_uvloop}
    with anyio.from_thread.start_blocking_portal(backend_options=options) as portal:
        opened = open_plane(home, script=script, limits=limits, is_durable=is_durable)
        with portal.wrap_async_context_manager(opened) as plane:
            world = World(portal, plane, create_app(plane))
            portal.call(_people, world)
            _work(world)
            _narrow(world)
            yield world


async def _new_stream() -> Stream:
    return Stream()


async def _people(world: World) -> None:
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


def _work(world: World) -> None:
    world.jobs["vision"] = world.submit("member", "vision")
    world.jobs["speech"] = world.submit("stranger", "speech")
    attempt = world.until_state(world.jobs["vision"], AttemptState.RUNNING)
    key = world.plane.core.key
    world.tokens["data_plane"] = data_plane_token(key)
    world.tokens["ticket"] = ticket(key, attempt.attempt_id)
    world.tokens["job"] = job_token(key, attempt.attempt_id)
    world.tokens["supervisor"] = world.signed(attempt, b"")


def _narrow(world: World) -> None:
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
    world.tokens["ended_job"] = job_token(world.plane.core.key, attempt.attempt_id)
    assert world.call("POST", f"/v1/jobs/{job_id}/stop", role="member", data={}).status == 200
    world.until_state(job_id, AttemptState.ENDED)
