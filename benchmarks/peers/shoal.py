"""Shoal itself, as a user starts it: `shoal up` in a home of its own, used over HTTP and with the CLI."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import http_load
from benchmarks.processes import (
    BenchmarkError,
    Usage,
    answers,
    call,
    descendants,
    is_gone,
    stop,
    usage,
    wait_until,
)

PROJECT = "default"
PROGRAM = Path(sys.executable).with_name("shoal")


class Shoal:
    """One control plane with its local engine. `demo` adds simulated nodes, as in `16x8`."""

    def __init__(self, *, demo: str | None = None) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
        self.demo = demo
        (self.home / "empty").mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home / "empty"),
            "LANG": "C.UTF-8",
            "SHOAL_HOME": str(self.home),
        }

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Run `shoal up`. After `kill` this starts a new control plane on the same home."""
        call([PROGRAM, "up", *(["--demo", self.demo] if self.demo else [])], env=self.env, timeout_s=120)
        wait_until(lambda: answers(self.port), 30, "Shoal's port")

    def _server(self) -> dict[str, Any]:
        """What the control plane wrote when it began to listen."""
        return dict(json.loads((self.home / "server.json").read_text()))

    @property
    def pid(self) -> int:
        return int(self._server()["pid"])

    @property
    def port(self) -> int:
        """A different one after every start, if the usual one is taken."""
        return int(str(self._server()["url"]).rpartition(":")[2])

    @property
    def token(self) -> str:
        saved = json.loads((self.home / "credentials.json").read_text())
        return str(saved["servers"]["local"]["token"])

    def kill(self) -> None:
        """Kill the control plane with SIGKILL, like a crash."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid), 10, "the control plane's end")

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, json.dumps(body) if body else None, self._headers())
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status not in (200, 201):
            raise BenchmarkError(f"{method} {path} answered {answer.status}: {text[:500]!r}")
        return json.loads(text)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}

    def submit(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `POST /v1/jobs`."""
        return dict(self.request("POST", "/v1/jobs", {"spec": spec, "project": PROJECT}))

    def submit_request(self, spec: dict[str, Any]) -> http_load.Render:
        """Return the same request as prepared bytes. Every index has its own idempotency key, as the client
        sends one.
        """
        headers = self._headers()
        body = json.dumps({"spec": spec, "project": PROJECT}).encode()
        run = os.urandom(6).hex()

        def render(index: int) -> bytes:
            keyed = headers | {"Idempotency-Key": f"bench-{run}-{index}"}
            return http_load.request("POST", "/v1/jobs", keyed, body)

        return render

    def get_request(self, path: str) -> http_load.Render:
        prepared = http_load.request("GET", path, self._headers())
        return lambda _: prepared

    def run_command(self, script: str, *options: str) -> list[str]:
        """Return `shoal run -d`: the whole command is measured, interpreter start included.

        It snapshots the directory it is started in, so start it in an empty one (`HOME`).
        """
        return [str(PROGRAM), "run", "-d", "--project", PROJECT, *options, "--", "sh", "-c", script]

    def num_open(self) -> int:
        """Jobs that were accepted and have not ended."""
        counts = self.request("GET", "/v1/status")["counts"]
        return sum(counts.get(word, 0) for word in ("queued", "starting", "running", "stopping"))

    def control_usage(self) -> Usage:
        return usage([self.pid])

    def close(self) -> None:
        """Stop the control plane and every process of its jobs, and remove its folder."""
        ours = [self.pid] if (self.home / "server.json").is_file() else []
        stop(ours)
        for _ in range(2):  # a supervisor that was starting when the first look was taken
            stop(self._jobs_processes(), grace_s=2)
        shutil.rmtree(self.home, ignore_errors=True)

    def _jobs_processes(self) -> set[int]:
        """Supervisors carry their spool folder, which is below our home, on their command line."""
        pids = set()
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue  # it ended while we looked
            if os.fsencode(self.home) in line:
                pids.add(int(entry.name))
        return descendants(pids) - {os.getpid()}
