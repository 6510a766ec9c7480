"""A real control plane in a home of its own: started by `shoal up`, killed with `kill -9`, started again.

Two real control planes on one PostgreSQL: each with a home of its own, over one shared directory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from shoal.home import pid_holding
from shoal.runtime.files import spool
from tests.support.host.processes import pause_s

T = TypeVar("T")
LIMIT_S = 60.0


def until(is_so: Callable[[], T], description: str, within_s: float = LIMIT_S) -> T:
    """The first true answer; fails when the deadline passes."""
    since = time.monotonic()
    while not (answer := is_so()):
        assert time.monotonic() < since + within_s, f"not within {within_s:g} s: {description}"
        time.sleep(pause_s(since))
    return answer


class RankGate:
    """Ranks come here and wait. Whoever is held is running; when its connection ends, it does not run."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        self.held: list[socket.socket] = []

    def run_line(self, exit_code: int = 0, before: str = "") -> str:
        """A `run` that waits here and ends with this code."""
        port = self._listener.getsockname()[1]
        wait = f"exec 3<>/dev/tcp/127.0.0.1/{port}; read -r -n1 <&3; exit {exit_code}"
        return f"exec bash -c '{before}{wait}'"

    def wait_for_ranks(self, count: int = 1) -> None:
        """Wait until that many more ranks have come."""
        for _ in range(count):
            self.held.append(self._listener.accept()[0])

    def is_gone(self, index: int) -> bool:
        """Whether the rank that came at that place runs no more."""
        held = self.held[index]
        held.setblocking(False)
        try:
            return held.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def open(self) -> None:
        for held in self.held:
            with suppress(OSError):  # somebody may be gone already
                held.setblocking(True)
                held.sendall(b"x")

    def close(self) -> None:
        for held in (*self.held, self._listener):
            held.close()


@contextmanager
def open_gate() -> Iterator[RankGate]:
    gate = RankGate()
    try:
        yield gate
    finally:
        gate.close()


class RealPlane:
    engine_name = "local"

    def __init__(self, home: Path, *flags: str, demo: str = "2x2") -> None:
        self.home = home
        self._flags = ("--listen", "127.0.0.1:0", "--demo", demo, *flags)
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        self.env = {**own, "SHOAL_HOME": str(home), "NO_COLOR": "1"}
        self.shoal = Shoal(env=self.env)

    def command(self, *argv: str, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """One `shoal` command, as a person types it."""
        return subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *argv],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.env,
            cwd=self.home.parent,
        )

    def up(self) -> int:
        """Start it; returns the process."""
        done = self.command("up", *self._flags, "--json")
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["pid"])

    def kill(self) -> None:
        """`kill -9`, and wait until nobody holds the home."""
        pid = pid_holding(self.home)
        assert pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid_holding(self.home) is None, "the killed control plane lets go of its home")

    def down(self) -> None:
        if pid_holding(self.home) is None:
            self.up()
        self.command("down", "--jobs")
        self.shoal.transport.close()

    # Jobs.

    def submit(self, run: str, **fields: Any) -> JobHandle:
        resources = fields.pop("resources", {"gpus": 1})
        return self.shoal.submit(run=run, workdir=None, resources=resources, ranks_per_node=1, **fields)

    def until_status(self, job: JobHandle, *wanted: str) -> JobHandle:
        until(lambda: job.refresh().status in wanted, f"{job.ref} is {' or '.join(wanted)}")
        return job

    def attempts(self, job: JobHandle) -> list[dict[str, Any]]:
        return list(job.refresh().data["attempts"])

    def spool_task(self, attempt: dict[str, Any]) -> spool.SpoolTask:
        """The directory of its first node."""
        return spool.SpoolTask(self.home / "spool" / "live" / attempt["attempt_id"] / attempt["nodes"][0])


@contextmanager
def running_plane(home: Path, *flags: str, demo: str = "2x2") -> Iterator[RealPlane]:
    """One that is up; afterwards nothing of it runs."""
    plane = RealPlane(home, *flags, demo=demo)
    plane.up()
    try:
        yield plane
    finally:
        plane.down()


TAKEOVER_S = 60.0
"""A frozen leader is given up after 15 s; the rest is for a busy machine."""


class PairedPlane(RealPlane):
    """One of the two. Its own `shoal` talks to it alone."""

    def start(self) -> dict[str, Any]:
        """What `shoal up --json` says."""
        done = self.command("up", *self._flags, "--json")
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    @property
    def pid(self) -> int:
        pid = pid_holding(self.home)
        assert pid, f"nobody runs in {self.home}"
        return pid

    @property
    def url(self) -> str:
        return str(json.loads((self.home / "server.json").read_text())["url"])

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def health(self) -> dict[str, Any]:
        """What `/healthz` says; nothing while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/healthz", timeout=5.0) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except (OSError, ValueError):
            return {}

    @property
    def role(self) -> str | None:
        return self.health().get("role")

    def until_role(self, role: str) -> None:
        until(lambda: self.role == role, f"{self.home.name} is {role}", TAKEOVER_S)

    def token(self) -> str:
        saved = json.loads((self.home / "credentials.json").read_text())
        return str(saved["servers"]["local"]["token"])


class TwoPlanes:
    """`first` leads and `second` stands by since the last `settle`."""

    def __init__(self, top: Path, database: str, *flags: str, demo: str = "2x2") -> None:
        self.shared = top / "shared"
        flags = ("--database", database, "--shared", str(self.shared), *flags)
        self.first = PairedPlane(top / "first", *flags, demo=demo)
        self.second = PairedPlane(top / "second", *flags, demo=demo)
        self._admin = ""

    def ensure_roles(self) -> None:
        """Whatever became of them before."""
        for one in (self.first, self.second):
            if pid_holding(one.home) is None:
                one.start()
        roles = until(self._roles, "one leads and one stands by", TAKEOVER_S)
        if roles == ["standby", "leader"]:
            self.first, self.second = self.second, self.first
        until(
            lambda: self.second.health().get("leader") == self.first.url,
            "the one that stands by sees the other",
            TAKEOVER_S,
        )
        self._admin = self._admin or self.first.token()

    def client(self, patience_s: float = TAKEOVER_S) -> Shoal:
        """One that knows both."""
        return Shoal(env=self.env(f"{self.first.url},{self.second.url}"), patience_s=patience_s)

    def env(self, urls: str) -> dict[str, str]:
        return {**self.first.env, "SHOAL_TOKEN": self._admin, "SHOAL_URL": urls}

    def down(self) -> None:
        """Nothing of them runs afterwards."""
        for one in (self.first, self.second):
            if pid := pid_holding(one.home):
                os.kill(pid, signal.SIGCONT)  # one that a test left frozen
        self.ensure_roles()
        self.second.signal(signal.SIGTERM)
        with self.client() as shoal:
            for job in shoal.jobs(status=("queued", "starting", "running", "stopping")):
                shoal.stop(job["job_id"])
        done = self.first.command("down")
        assert done.returncode == 0, done.stderr

    def _roles(self) -> list[str | None] | None:
        roles = [self.first.role, self.second.role]
        return roles if sorted(map(str, roles)) == ["leader", "standby"] else None


@contextmanager
def two_planes(planes: TwoPlanes) -> Iterator[TwoPlanes]:
    """Both up; afterwards nothing of them runs."""
    planes.ensure_roles()
    try:
        yield planes
    finally:
        planes.down()
