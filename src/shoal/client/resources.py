"""Requests for users, projects, tokens, maintenance windows and reservations, drills, and services.

Administrators and project leads manage users, projects and tokens; operators declare windows; project
members run drills and services. Every user may list what the server shows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.client.submission import send
from shoal.client.transport import Transport, path_of
from shoal.errors import LimitReached, NotFound, SpecError

JsonObject = dict[str, Any]
REMOVABLE = frozenset({"parent", "quota", "limit", "borrow"})


def items_of(transport: Transport, path: str, **params: Any) -> list[JsonObject]:
    """Return every item of a paginated list."""
    items: list[JsonObject] = []
    cursor: str | None = None
    while True:
        page = transport.call("GET", path, params={**params, "cursor": cursor})
        if isinstance(page, list):
            return [dict(item) for item in page]
        items += page["items"]
        cursor = page.get("next_cursor")
        if not cursor:
            return items


class UsersApi:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[JsonObject]:
        return items_of(self._transport, path_of("users"))

    def create(self, name: str, *, cluster_role: str | None = None) -> JsonObject:
        body = {"name": name, "cluster_role": cluster_role}
        return dict(self._transport.call("POST", path_of("users"), json_body=body))

    def update(self, name: str, **changes: Any) -> JsonObject:
        """Change `is_active` or `cluster_role`. Fields not named stay."""
        return dict(self._transport.call("PATCH", path_of("users", name), json_body=changes))


class ProjectsApi:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[JsonObject]:
        return items_of(self._transport, path_of("projects"))

    def create(self, name: str, **settings: Any) -> JsonObject:
        """`max_open_jobs max_jobs_per_day max_priority max_upload_bytes parent quota limit borrow weight`.

        None takes the server's default. `quota`, `limit` and `borrow` are a number of GPUs, or amounts of
        several resources: `{"gpus": 64, "cpus": 512}`.
        """
        body = {"name": name, **_sent(settings)}
        return dict(self._transport.call("POST", path_of("projects"), json_body=body))

    def update(self, name: str, **settings: Any) -> JsonObject:
        """Change the same fields. None changes nothing; "none" removes a parent, quota, limit or borrow."""
        body = _sent(settings)
        return dict(self._transport.call("PATCH", path_of("projects", name), json_body=body))

    def members(self, name: str) -> list[JsonObject]:
        return items_of(self._transport, path_of("projects", name, "members"))

    def set_member(self, name: str, user: str, role: str) -> JsonObject:
        path = path_of("projects", name, "members", user)
        return dict(self._transport.call("PUT", path, json_body={"role": role}))

    def remove_member(self, name: str, user: str) -> None:
        self._transport.call("DELETE", path_of("projects", name, "members", user))


def _sent(settings: dict[str, Any]) -> dict[str, Any]:
    """Send `quota=64` as GPUs, and "none" as null."""
    sent = {name: value for name, value in settings.items() if value is not None}
    for name in REMOVABLE & sent.keys():
        if sent[name] == "none":
            sent[name] = None
        elif isinstance(sent[name], int):
            sent[name] = {"gpus": sent[name]}
    return sent


class TokensApi:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self, *, user: str | None = None) -> list[JsonObject]:
        """Return your own tokens, or those of `user`."""
        return items_of(self._transport, path_of("tokens"), user=user)

    def create(self, **fields: Any) -> JsonObject:
        """`label scope project service user lifetime_s`. The reply's `text` is the token, shown only this
        once.
        """
        body = {k: v for k, v in fields.items() if v is not None}
        return dict(self._transport.call("POST", path_of("tokens"), json_body=body))

    def revoke(self, token_id: str, *, keep_children: bool = False) -> JsonObject:
        """Revoke a token, and the tokens made with it unless `keep_children`.

        If the reply is not `is_confirmed`, a data plane that did not answer may accept the token for a while.
        """
        params = {"keep_children": "true"} if keep_children else None
        return dict(self._transport.call("DELETE", path_of("tokens", token_id), params=params))


class WindowsApi:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[JsonObject]:
        """Return the windows that are not over, earliest first."""
        return items_of(self._transport, path_of("windows"))

    def declare(self, kind: str, **fields: Any) -> JsonObject:
        """`kind`: `maintenance` or `reservation`. `nodes` or `count` (of `pool`), `from_at` (default: now),
        `duration_s`, for a reservation `project`, `because`.
        """
        body = {"kind": kind, **{name: value for name, value in fields.items() if value is not None}}
        return dict(self._transport.call("POST", path_of("windows"), json_body=body))

    def cancel(self, window_id: str) -> JsonObject:
        return dict(self._transport.call("DELETE", path_of("windows", window_id)))


POLL_S = 0.25


class DrillsApi:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def of_ranks(self, kind: str, job_id: str, **options: Any) -> JsonObject:
        """Start `kill-rank`, `hang` or `corrupt-checkpoint`, with `rank`, `window_s`, `within_s`,
        `is_forced`.
        """
        body = {"kind": kind, **_without_none(options)}
        return dict(self._transport.call("POST", path_of("jobs", job_id, "drills"), json_body=body))

    def of_cluster(self, kind: str, job_id: str | None = None, **options: Any) -> JsonObject:
        """Start `kill-node`, `partition` or, without a job, `kill-control`, with `node`, `for_s` and as for
        ranks.
        """
        body = {"kind": kind, **_without_none({"job_id": job_id, **options})}
        return dict(self._transport.call("POST", path_of("drills"), json_body=body))

    def history(self, job_id: str | None = None, limit: int = 20) -> list[JsonObject]:
        """Return the newest `limit` drills, oldest first; of one job or of all."""
        params = {"job": job_id, "limit": limit}
        return list(self._transport.call("GET", path_of("drills"), params=params)["items"])

    def wait(self, drill: JsonObject, timeout_s: float) -> JsonObject:
        """Return the drill with its result. `LimitReached` after `timeout_s`; the drill goes on."""
        deadline = time.monotonic() + timeout_s
        while True:
            matching = [
                candidate for candidate in self.history(drill["job_id"]) if candidate["id"] == drill["id"]
            ]
            if not matching:
                raise NotFound(f"no drill `{drill['id']}`", hint="shoal drill history")
            if matching[0]["result"] is not None:
                return matching[0]
            if time.monotonic() > deadline:
                raise LimitReached(
                    f"drill {drill['id']} has no result after {timeout_s:g} s", hint="shoal drill history"
                )
            # A drill without a job is searched among all events.
            time.sleep(POLL_S if drill["job_id"] else 4 * POLL_S)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class ServicesApi:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def serve(
        self,
        spec: Mapping[str, Any],
        *,
        workdir: Path | None = None,
        env: Mapping[str, str],
        key: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> JsonObject:
        """Create a service or a new release; `spec` has the fields of a YAML file. Secrets come
        from `env`.
        """
        return send(
            self._transport,
            {"spec": dict(spec)},
            workdir=workdir,
            secrets=tuple(spec.get("secrets", ())),
            env=env,
            key=key,
            progress=progress,
            to="services",
        )

    def all(self, project: str | None = None, name: str | None = None) -> list[JsonObject]:
        return items_of(self._transport, path_of("services"), project=project, name=name)

    def show(self, ref: str) -> JsonObject:
        """Return a service with its replicas and releases. `ref`: a name, `PROJECT/NAME` or `svc_...`."""
        return dict(self._transport.call("GET", path_of("services", self.service_id(ref))))

    def scale(self, ref: str, low: int, high: int) -> JsonObject:
        path = path_of("services", self.service_id(ref), "scale")
        return dict(self._transport.call("POST", path, json_body={"min": low, "max": high}))

    def rollout(self, ref: str, action: str) -> JsonObject:
        """`action` is `undo` or `promote`."""
        path = path_of("services", self.service_id(ref), "rollout")
        return dict(self._transport.call("POST", path, json_body={"action": action}))

    def stop(self, ref: str) -> JsonObject:
        return dict(self._transport.call("POST", path_of("services", self.service_id(ref), "stop")))

    def find(self, ref: str) -> list[JsonObject]:
        """Those that `NAME` or `PROJECT/NAME` may mean."""
        project, slash, name = ref.rpartition("/")
        return self.all(project if slash else None, name)

    def service_id(self, ref: str) -> str:
        """Return the id of the one service that `ref` names."""
        if ref.startswith("svc_"):
            return ref
        services = self.find(ref)
        if not services:
            raise NotFound(f"no service `{ref}`", hint="list what you can see with `shoal services`")
        if len(services) > 1:
            names = ", ".join(f"`{service['ref']}`" for service in services)
            raise SpecError(f"`{ref}` is a service in {len(services)} projects", hint=f"type one of {names}")
        return str(services[0]["id"])
