"""The route table, and for every row of it a request that would do something if it were allowed.

Made from what the application declares: a new route is attacked without an edit here. A route that takes a
body needs a row in `BODIES` before the role matrix can say what it answers.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from typing import Any

import msgspec

from shoal.api.app import declared_routes
from shoal.api.routing import RouteDeclaration
from tests.support.archives import tar_of
from tests.support.planes.world import ApiWorld

TABLE = declared_routes()
GUARDED = tuple(row for row in TABLE if row.permission is not None)
STREAMS = tuple(row for row in TABLE if row.path.endswith("/stream"))
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
UNKNOWN_ID = "job_00000000000000000000000000"
ARCHIVE = tar_of({"main.py": b"print(1)\n"})
_serial = itertools.count(1)

BODIES: dict[str, Any] = {
    "POST /v1/jobs": {"spec": {"run": "true"}, "project": "vision"},
    "POST /v1/users": {"name": "new-user"},
    "PATCH /v1/users/{name}": {"is_active": True},
    "POST /v1/projects": {"name": "new-project"},
    "PATCH /v1/projects/{name}": {"max_open_jobs": 10_000},
    "PUT /v1/projects/{name}/members/{user}": {"role": "viewer"},
    "POST /v1/tokens": {"label": "made by a test", "lifetime_s": 60.0},
    "POST /v1/nodes/{name}/cordon": {"because": "a test"},
    "POST /v1/nodes/{name}/drain": {"because": "a test"},
    "POST /v1/nodes/{name}/resume": {"because": "a test"},
    "POST /v1/nodes/{name}/declare-dead": {"because": "a test"},
    "POST /v1/windows": {"kind": "maintenance", "nodes": ["node-2"], "duration_s": 60.0},
    "POST /v1/drills": {"kind": "kill-control", "within_s": 1.0},
    "POST /v1/jobs/{job_id}/drills": {"kind": "kill-rank", "within_s": 1.0},
    "POST /v1/jobs/{job_id}/stop": {},
    "POST /v1/jobs/{job_id}/retry": {},
    "POST /v1/arrays/{array_id}/stop": {},
    "POST /v1/services": {"spec": {"name": "hello", "run": "sleep 1000"}, "project": "vision"},
    "POST /v1/services/{service_id}/scale": {"min": 1, "max": 2},
    "POST /v1/services/{service_id}/rollout": {"action": "undo"},
    "POST /v1/services/{service_id}/stop": {},
    "POST /v1/serving/reports": {"process_id": "prc_0", "version": 1},
    "POST /v1/supervisor/renew": {"attempt_id": "att_0", "epoch": 1, "node": "node-1", "phase": "running"},
    "POST /v1/mailbox/fetch": {"attempt_id": "att_0", "node": "node-1", "process": "0" * 32},
    "POST /v1/mailbox/archive": {"attempt_id": "att_0", "node": "node-1", "process": "0" * 32},
}


class Shot(msgspec.Struct, frozen=True):
    """A request without its credential."""

    method: str
    target: str
    data: Any = None
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


def title(row: RouteDeclaration) -> str:
    return f"{row.method} {row.path}"


def bare(row: RouteDeclaration, values: dict[str, str] | None = None) -> Shot:
    """Return the row with every placeholder filled by a plausible value; `values` overrides by name."""
    filled = re.sub(r"\{(\w+)\}", lambda m: (values or {}).get(m[1], UNKNOWN_ID), row.path)
    if row.path.startswith("/v1/archives/"):
        return _archive(row, filled)
    return Shot(row.method, filled, data=BODIES.get(title(row)))


def aimed(world: ApiWorld, row: RouteDeclaration) -> Shot:
    """Return the row aimed at things that exist in project `vision`, fresh ones if the request would use them
    up.
    """
    name = title(row)
    values = {"name": "vision", "job_id": world.jobs["vision"], "digest": hashlib.sha256(ARCHIVE).hexdigest()}
    data = BODIES.get(name)
    if name == "GET /v1/archives/{digest}":
        put = f"/v1/archives/{values['digest']}?project=vision"
        world.call("PUT", put, role="member", body=ARCHIVE, headers=[("content-type", "application/x-tar")])
    if "/nodes/" in row.path:
        values["name"] = "node-2"
    elif "/users/" in row.path:
        values["name"] = new_user(world)
    if "{user}" in row.path:
        values["user"] = new_user(world, project="vision")
    if "{token_id}" in row.path:
        values["token_id"] = _new_token(world)
    if row.method == "POST" and "{job_id}" in row.path:
        values["job_id"] = world.submit("member", "vision")
    if "{array_id}" in row.path:
        values["array_id"] = _new_array(world)
    if name == "POST /v1/services":
        data = _service()
    if "{service_id}" in row.path:
        values["service_id"] = _new_service(world)
    if row.path == "/v1/windows" and row.method == "POST":
        data = _next_window()
    if "{window_id}" in row.path:
        values["window_id"] = _new_window(world)
    if name in ("POST /v1/users", "POST /v1/projects"):
        data = {"name": f"new-{next(_serial)}"}
    if name == "POST /v1/supervisor/renew":
        attempt = world.newest_attempt(world.jobs["vision"])
        data = {**BODIES[name], "attempt_id": attempt.attempt_id, "node": attempt.node_names[0]}
    if "/mailbox/" in row.path:
        return _at_the_desk(world, row)
    return msgspec.structs.replace(bare(row, values), data=data)


def _at_the_desk(world: ApiWorld, row: RouteDeclaration) -> Shot:
    attempt = world.newest_attempt(world.jobs["vision"])
    task_request = {"attempt_id": attempt.attempt_id, "node": attempt.node_names[0], "process": "0" * 32}
    if title(row) in BODIES:
        return msgspec.structs.replace(bare(row), data={**BODIES[title(row)], **task_request})
    body = msgspec.json.encode({**task_request, "epoch": attempt.epoch}) + b"\n" + b"a line\n"
    return Shot(row.method, row.path, body=body, headers=(("content-type", "application/octet-stream"),))


def fire(world: ApiWorld, shot: Shot, role: str | None) -> int:
    """Send the request and return its status. A stream is closed once it began."""
    if shot.target.partition("?")[0].endswith("/stream") and role is not None:
        with world.stream(shot.target, role=role) as stream:
            while stream.status is None:
                world.portal.call(_pause)
            return stream.status
    return world.call(
        shot.method,
        shot.target,
        role=role,
        data=shot.data,
        body=shot.body,
        headers=shot.headers,
        client=(f"10.1.{next(_serial) % 250}.1", 50000),  # wrong tokens are counted by address
    ).status


async def _pause() -> None:
    """Let the server's tasks run."""


def _archive(row: RouteDeclaration, filled: str) -> Shot:
    target = filled.replace(UNKNOWN_ID, "0" * 64)
    if row.method != "PUT":
        return Shot(row.method, target)
    headers = (("content-type", "application/x-tar"),)
    return Shot(row.method, f"{target}?project=vision", body=ARCHIVE, headers=headers)


def new_user(world: ApiWorld, project: str | None = None) -> str:
    name = f"user-{next(_serial)}"
    assert world.call("POST", "/v1/users", role="admin", data={"name": name}).status == 201
    if project is not None:
        joined = world.call(
            "PUT", f"/v1/projects/{project}/members/{name}", role="admin", data={"role": "viewer"}
        )
        assert joined.status == 200
    return name


def _new_token(world: ApiWorld) -> str:
    created = world.call("POST", "/v1/tokens", role="member", data={"label": "to be revoked"})
    assert created.status == 201
    return str(created.json()["id"])


def _next_window() -> dict[str, Any]:
    """Return a window that overlaps none before it."""
    begins = time.time() + 3600.0 * next(_serial)
    return {"kind": "maintenance", "nodes": ["node-2"], "from_at": begins, "duration_s": 60.0}


def _new_window(world: ApiWorld) -> str:
    created = world.call("POST", "/v1/windows", role="operator", data=_next_window())
    assert created.status == 201, created.body
    return str(created.json()["id"])


def _service() -> dict[str, Any]:
    """Return a service that does not exist."""
    return {"spec": {"name": f"hello-{next(_serial)}", "run": "sleep 1000"}, "project": "vision"}


def _new_service(world: ApiWorld) -> str:
    created = world.call("POST", "/v1/services", role="member", data=_service())
    assert created.status == 201, created.body
    return str(created.json()["id"])


def _new_array(world: ApiWorld) -> str:
    spec = {"run": "sleep 1000", "array": 2}
    created = world.call("POST", "/v1/jobs", role="member", data={"spec": spec, "project": "vision"})
    assert created.status == 201, created.body
    return str(created.json()["array_id"])
