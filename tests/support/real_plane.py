"""A real control plane in a home of its own: started by `shoal up`, killed with `kill -9`, started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from shoal.home import holder
from shoal.runtime import spool
from tests.support.patience import pause_s

T = TypeVar("T")
LIMIT_S = 60.0


def until(is_so: Callable[[], T], what: str, within_s: float = LIMIT_S) -> T:
    """The first true answer; fails when the deadline passes."""
    since = time.monotonic()
    while not (answer := is_so()):
        assert time.monotonic() < since + within_s, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s(since))
    return answer


class Gate:
    """Ranks come here and wait. Whoever is held is running; when its connection ends, it does not run."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        self.held: list[socket.socket] = []

    def run(self, exit_code: int = 0, before: str = "") -> str:
        """A `run` that waits here and ends with this code."""
        port = self._listener.getsockname()[1]
        wait = f"exec 3<>/dev/tcp/127.0.0.1/{port}; read -r -n1 <&3; exit {exit_code}"
        return f"exec bash -c '{before}{wait}'"

    def hold(self, count: int = 1) -> None:
        """Wait until that many more ranks have come."""
        for _ in range(count):
            self.held.append(self._listener.accept()[0])

    def is_gone(self, place: int) -> bool:
        """Whether the rank that came at that place runs no more."""
        held = self.held[place]
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
def open_gate() -> Iterator[Gate]:
    gate = Gate()
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
        pid = holder(self.home)
        assert pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: holder(self.home) is None, "the killed control plane lets go of its home")

    def down(self) -> None:
        if holder(self.home) is None:
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

    def share(self, attempt: dict[str, Any]) -> spool.Share:
        """The directory of its first node."""
        return spool.Share(self.home / "spool" / "live" / attempt["attempt_id"] / attempt["nodes"][0])


@contextmanager
def a_plane(home: Path, *flags: str, demo: str = "2x2") -> Iterator[RealPlane]:
    """One that is up; afterwards nothing of it runs."""
    plane = RealPlane(home, *flags, demo=demo)
    plane.up()
    try:
        yield plane
    finally:
        plane.down()
