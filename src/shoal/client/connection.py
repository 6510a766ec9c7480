"""All requests to a control plane as blocking calls that return plain data.

Separate from `sdk`, which reads specs, so that `shoal queue` does not pay for what `spec` imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from shoal.client.credentials import Endpoint, endpoint_at, find_endpoint
from shoal.client.handles import ArrayHandle, JobHandle
from shoal.client.resources import (
    DrillsApi,
    ProjectsApi,
    ServicesApi,
    TokensApi,
    UsersApi,
    WindowsApi,
    items_of,
)
from shoal.client.stream import ServerReach, StreamEvent, follow
from shoal.client.submission import project_of, send
from shoal.client.transport import Transport, path_of
from shoal.errors import NotFound, SpecError, StateError
from shoal.home import home_from_env

JobData = dict[str, Any]
MAX_NAMED = 10


@contextmanager
def name_missing_project(project: str | None) -> Iterator[None]:
    """Name the project in a 404. The server gives one reply for a missing project and for a hidden one."""
    try:
        yield
    except NotFound as error:
        if project is None:
            raise
        raise NotFound(
            f"no project `{project}`, or one you may not see", hint="see yours with `shoal project`"
        ) from error


class Connection:
    """A connection to one control plane. Not for use by two threads at once.

    Without arguments it uses the server that the `shoal` command uses. `patience_s` is how long to wait for a
    server that was reached and is gone, for example during a restart.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        env: Mapping[str, str] = os.environ,
        patience_s: float = 60.0,
    ) -> None:
        def locate() -> Endpoint:
            return endpoint_at(url.rstrip("/"), token, home_from_env(env)) if url else find_endpoint(env)

        self.env = env
        self.patience_s = patience_s
        self.transport = Transport(locate, patience_s=patience_s)
        self.on_progress: Callable[[str], None] | None = None
        """Called with the steps of a submit that may take time: reading, packing, sending the work
        directory."""
        self.users = UsersApi(self.transport)
        self.projects = ProjectsApi(self.transport)
        self.tokens = TokensApi(self.transport)
        self.windows = WindowsApi(self.transport)
        self.drills = DrillsApi(self.transport)
        self.services = ServicesApi(self.transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.transport.close()

    def send(
        self,
        request: Mapping[str, Any],
        *,
        workdir: Path | None = None,
        secrets: Sequence[str] = (),
        key: str | None = None,
    ) -> JobHandle | ArrayHandle:
        """Submit `{"spec": ...}` or `{"flags": ...}` unchanged; the server parses it.

        `secrets` are names; their values come from the environment.
        """
        with name_missing_project(project_of(request)):
            answer = send(
                self.transport,
                request,
                workdir=workdir,
                secrets=secrets,
                env=self.env,
                key=key,
                progress=self.on_progress,
            )
        behind = answer.get("left_behind")
        jobs = [
            JobHandle(self, job, was_repeated=bool(answer.get("was_repeated")), left_behind=behind)
            for job in answer["jobs"]
        ]
        if answer.get("array_id") is None:
            return jobs[0]
        return ArrayHandle(self, str(answer["array_id"]), int(answer["count"]), jobs)

    def jobs(
        self,
        *,
        project: str | None = None,
        status: tuple[str, ...] = (),
        name: str | None = None,
        owner: str | None = None,
        array: str | None = None,
        limit: int | None = None,
        predict: bool = False,
    ) -> Iterator[JobData]:
        """Yield the jobs that this user may see, newest first, fetched page by page; at most `limit`.

        `predict`: waiting jobs have an `outlook`, which says when they will start.
        """
        params = {"project": project, "status": status, "name": name, "owner": owner, "array": array}
        params["predict"] = "true" if predict else None
        cursor, left = None, limit
        while left is None or left > 0:
            size = min(500, left) if left is not None else 500
            with name_missing_project(project):
                page = self.transport.call(
                    "GET", path_of("jobs"), params={**params, "cursor": cursor, "limit": size}
                )
            yield from page["items"]
            left = None if left is None else left - len(page["items"])
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def job(self, ref: str) -> JobHandle:
        """Return the job that `ref` names: `17`, `vision/17`, `job_...`, or a name (the newest job of that
        name, or an array's newest element).
        """
        return JobHandle(self, self.job_data(self.job_id(ref)))

    def job_id(self, ref: str) -> str:
        return ref if ref.startswith("job_") else str(self.find(ref)[0]["job_id"])

    def find(self, ref: str) -> tuple[JobData, str | None]:
        """Return the job that `ref` names. If it names an array, return its newest element and the array's
        id.
        """
        page = self.transport.call("GET", path_of("jobs"), params={"ref": ref})
        jobs = page["items"]
        if not jobs:
            raise NotFound(f"no job `{ref}`", hint="list what you can see with `shoal queue --all`")
        if len(jobs) > 1:
            names = [f"`{job['ref']}`" for job in jobs[:MAX_NAMED]]
            more = f" and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else ""
            raise SpecError(
                f"`{ref}` is a job in {len(jobs)} projects", hint=f"type one of {', '.join(names)}{more}"
            )
        return dict(jobs[0]), page.get("array_id")

    def job_data(self, job_id: str) -> JobData:
        """One job with its attempts, explanation and spec."""
        return dict(self.transport.call("GET", path_of("jobs", job_id)))

    def why(self, ref: str, *, predict: bool = False) -> dict[str, Any]:
        """Explain the job's state. `predict`: a waiting job has an `outlook`, with what would
        start it now.
        """
        params = {"predict": "true" if predict else None}
        return dict(self.transport.call("GET", path_of("jobs", self.job_id(ref), "why"), params=params))

    def metrics(self, ref: str, *, names: Sequence[str] = (), points: int = 60) -> dict[str, Any]:
        """Return the measurements of the job and its nodes: `items`, each a curve of at most `points`
        points.
        """
        params = {"name": tuple(names), "points": points}
        return dict(self.transport.call("GET", path_of("jobs", self.job_id(ref), "metrics"), params=params))

    def checkpoints(self, ref: str, *, verify: bool = False) -> dict[str, Any]:
        """Return the contents of the checkpoint directory: `items`, and the `decision` how often to save."""
        path = path_of("jobs", self.job_id(ref), "checkpoints")
        return dict(self.transport.call("GET", path, params={"verify": "true" if verify else None}))

    def stop(self, ref: str) -> JobHandle:
        """Ask one job to end: `job_...`, `17` or a name. Returns at once; use `wait` to see the end.

        A name that stands for an array stops all of it and returns its newest element.
        """
        return self.stop_all(ref)[-1]

    def stop_all(self, ref: str) -> list[JobHandle]:
        """Ask the job that `ref` names, or every element of the array, to end."""
        job_id, array_id = ref, None
        if not ref.startswith("job_"):
            job, array_id = self.find(ref)
            job_id = str(job["job_id"])
        if array_id is None:
            return [JobHandle(self, self.transport.call("POST", path_of("jobs", job_id, "stop")))]
        self.stop_array(array_id)
        elements = sorted(self.jobs(array=array_id), key=lambda job: int(job["number"]))
        return [JobHandle(self, job) for job in elements]

    def retry_all(self, ref: str) -> list[JobHandle]:
        """Start a new attempt of the job that `ref` names; of an array, of every element that did not
        succeed.

        `StateError` if an array has no such element.
        """
        if ref.startswith("job_"):
            return [self.retry(ref)]
        job, array_id = self.find(ref)
        if array_id is None:
            return [self.retry(str(job["job_id"]))]
        elements = sorted(self.jobs(array=array_id), key=lambda job: int(job["number"]))
        unwell = [str(job["job_id"]) for job in elements if job["status"] in ("failed", "cancelled")]
        if not unwell:
            raise StateError(
                f"no element of array `{ref}` has failed or was cancelled",
                hint=f"see them with `shoal queue --all --name {job['name']}`",
            )
        return [self.retry(job_id) for job_id in unwell]

    def retry(self, ref: str) -> JobHandle:
        """Start a new attempt of a job that has ended."""
        return JobHandle(self, self.transport.call("POST", path_of("jobs", self.job_id(ref), "retry")))

    def stop_array(self, array_id: str) -> None:
        self.transport.call("POST", path_of("arrays", array_id, "stop"))

    def wait(self, ref: str, timeout_s: float | None = None) -> JobHandle:
        return self.job(ref).wait(timeout_s)

    def logs(
        self,
        ref: str,
        *,
        follow: bool = False,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
        stacks: bool = False,
    ) -> Iterator[JobData]:
        """Yield log lines, oldest first. With `follow`, of every attempt until the job has ended.

        `stacks`: the stacks of hung ranks instead of their output.
        """
        if follow:
            yield from (e.data for e in self.follow_logs(ref, rank=rank, tail=tail) if e.kind == "line")
            return
        path, cursor = path_of("jobs", self.job_id(ref), "logs"), None
        while True:
            params = {
                "rank": rank,
                "attempt": attempt,
                "stacks": True if stacks else None,
                "tail": tail,
                "cursor": cursor,
            }
            page = self.transport.call("GET", path, params=params)
            yield from page["items"]
            # A tail is one page: lines behind its cursor were written after the request.
            if tail is not None or not page.get("next_cursor") or page["next_cursor"] == cursor:
                return
            cursor = page["next_cursor"]

    def follow_logs(
        self,
        ref: str,
        *,
        rank: int | None = None,
        tail: int | None = None,
        on_change: Callable[[ServerReach], None] | None = None,
    ) -> Iterator[StreamEvent]:
        """Yield `placed`, `attempt`, `line`, `again` and finally one `end` event, across restarts of the
        server.

        `on_change` is called when the server goes and when it answers again.
        """
        path = path_of("jobs", self.job_id(ref), "logs", "stream")
        for event in follow(self.transport, path, {"rank": rank, "tail": tail}, on_change):
            yield event
            if event.kind == "end":
                return

    def nodes(self) -> list[dict[str, Any]]:
        return items_of(self.transport, path_of("nodes"))

    def node(self, name: str) -> dict[str, Any]:
        return dict(self.transport.call("GET", path_of("nodes", name)))

    def cordon(self, node: str, because: str = "") -> dict[str, Any]:
        """Place no new work there. Running jobs keep running."""
        return self._decide(node, "cordon", because)

    def drain(self, node: str, because: str = "") -> dict[str, Any]:
        """Place no new work there. Running jobs are stopped and queued again."""
        return self._decide(node, "drain", because)

    def resume(self, node: str, because: str = "") -> dict[str, Any]:
        return self._decide(node, "resume", because)

    def declare_dead(self, node: str, because: str = "") -> dict[str, Any]:
        """Assert that nothing runs there any more, so its attempts are replaced at once."""
        return self._decide(node, "declare-dead", because)

    def remove_node(self, node: str) -> None:
        """Remove a node from the list. It must be silent and hold nothing."""
        self.transport.call("DELETE", path_of("nodes", node))

    def events(
        self, *, after: int | None = None, limit: int = 100, tail: int | None = None, **filters: str | None
    ) -> list[dict[str, Any]]:
        """Return events in order, after the event numbered `after`, or the newest `tail`.

        Filters: `project job service node kind`.
        """
        params = {"after": after, "tail": tail, "limit": limit, **filters}
        with name_missing_project(filters.get("project")):
            return list(self.transport.call("GET", path_of("events"), params=params)["items"])

    def follow_events(self, *, after: int | None = None, **filters: str | None) -> Iterator[dict[str, Any]]:
        """Yield events as they come, with the filters of `events`."""
        with name_missing_project(filters.get("project")):
            params = {"after": after, **filters}
            yield from (e.data for e in follow(self.transport, path_of("events", "stream"), params))

    def audit(
        self, *, after: int | None = None, limit: int = 100, tail: int | None = None
    ) -> list[dict[str, Any]]:
        params = {"after": after, "tail": tail, "limit": limit}
        return list(self.transport.call("GET", path_of("audit"), params=params)["items"])

    def verify_audit(self) -> dict[str, Any]:
        return dict(self.transport.call("GET", path_of("audit", "verify")))

    def status(self) -> dict[str, Any]:
        return dict(self.transport.call("GET", path_of("status")))

    def me(self) -> dict[str, Any]:
        return dict(self.transport.call("GET", path_of("me")))

    def _decide(self, node: str, verb: str, because: str) -> dict[str, Any]:
        return dict(self.transport.call("POST", path_of("nodes", node, verb), json_body={"because": because}))
