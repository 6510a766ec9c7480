"""Somebody who uses a cluster in trouble: plain requests, each asked once, so that every answer is seen."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from shoal.client.credentials import Endpoint, find_endpoint
from tests.soak.cluster import SoakCluster
from tests.support.host.processes import pause_s

T = TypeVar("T")
LIMIT_S = 90.0
TAKEN = (200, 201)
WAITING = """\
echo "start $SHOAL_EPOCH" >> "/witness/{name}"
while [ ! -e "/witness/{name}.go" ]; do sleep 0.1; done
"""


class Person:
    """Asks over connections of their own. Remembers what was acknowledged and what was refused."""

    def __init__(self, cluster: SoakCluster) -> None:
        self.cluster = cluster
        self.endpoint = self.locate()
        self.acknowledged: dict[str, str] = {}
        """By key: the job's id."""
        self.refused: dict[str, dict[str, Any]] = {}
        """By key: what was asked."""

    def locate(self) -> Endpoint:
        """Where the control plane is now, and who we are there."""
        return find_endpoint(self.cluster.env)

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """Status and answer. `OSError`, `http.client.HTTPException`: none came."""
        parts = urlsplit(self.endpoint.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=90)
        headers = {"Authorization": f"Bearer {self.endpoint.token}", "Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def submit(self, spec: dict[str, Any], key: str | None = None) -> int:
        """The status; 0 when no answer came."""
        key = key or uuid.uuid4().hex
        try:
            status, answer = self.ask("POST", "/v1/jobs", {"spec": spec}, key)
        except (OSError, http.client.HTTPException):
            status, answer = 0, None
        if status in TAKEN:
            self.acknowledged[key] = answer["jobs"][0]["job_id"]
            self.refused.pop(key, None)
        else:
            self.refused[key] = spec
        return status

    def start(self, name: str, **fields: Any) -> str:
        """A job that runs until it is let go; its id, once it runs."""
        key = uuid.uuid4().hex
        status = self.submit(self.waiting(name, **fields), key)
        assert status in TAKEN, f"the submission was answered with {status}"
        job_id = self.acknowledged[key]
        until(lambda: (self.cluster.witness / name).exists() or self._has_ended(job_id), f"{name} runs")
        assert (self.cluster.witness / name).exists(), self.job(job_id)["because"]
        return job_id

    def _has_ended(self, job_id: str) -> bool:
        return bool(self.job(job_id)["ended_at"])

    def waiting(self, name: str, **fields: Any) -> dict[str, Any]:
        return {
            "name": name,
            "run": WAITING.format(name=name),
            "resources": {"cpus": 1, "memory": "64MB"},
            "mounts": [{"source": str(self.cluster.witness), "target": "/witness"}],
            "workdir": None,
            "grace": "1s",
            **fields,
        }

    def short(self, name: str) -> dict[str, Any]:
        return {"name": name, "run": "true", "resources": {"cpus": 1, "memory": "64MB"}, "workdir": None}

    def let_go(self, name: str) -> None:
        (self.cluster.witness / f"{name}.go").touch()

    def job(self, job_id: str) -> dict[str, Any]:
        status, answer = self.ask("GET", f"/v1/jobs/{job_id}")
        assert status == 200, f"{status} {answer}"
        return dict(answer)

    def jobs(self) -> list[dict[str, Any]]:
        status, answer = self.ask("GET", "/v1/jobs?limit=500")
        assert status == 200, f"{status} {answer}"
        return list(answer["items"])

    def wait_for(self, job_id: str, status: str) -> dict[str, Any]:
        """Asked again through every failure, as a person would."""

        def seen() -> dict[str, Any] | None:
            try:
                job = self.job(job_id)
            except (OSError, http.client.HTTPException, AssertionError):
                return None
            return job if job["status"] == status else None

        return until(seen, f"{job_id} is {status}") or {}

    def is_log_intact(self) -> bool:
        status, answer = self.ask("GET", "/v1/audit/verify")
        assert status == 200, f"{status} {answer}"
        return bool(answer["is_intact"])

    def close(self) -> None:
        """Stop whatever is left, so that nothing of it outlives the test."""
        with self.cluster.client() as shoal:
            for job in shoal.jobs(status=("queued", "starting", "running", "stopping")):
                shoal.stop(str(job["job_id"]))
        until(lambda: not self.cluster.leftovers(), "everything is gone")


@contextlib.contextmanager
def running(root: Path, **options: Any) -> Iterator[Person]:
    """A cluster below `root` and somebody who uses it. Leaves no process behind, whatever happens."""
    cluster = SoakCluster(root, **options)
    try:
        cluster.wait_ready()
        person = Person(cluster)
        yield person
        person.close()
    finally:
        cluster.close()
        for pid in cluster.find_processes().all_of_jobs():
            cluster.kill(pid)


def until(true: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
    """What `true` returned as soon as it was true of something."""
    since = time.monotonic()
    while not (seen := true()):
        assert time.monotonic() < since + limit_s, f"never within {limit_s} s: {what}"
        time.sleep(pause_s(since))
    return seen


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def is_root() -> bool:
    return os.geteuid() == 0
