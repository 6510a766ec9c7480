"""Two real control planes on one PostgreSQL: each with a home of its own, over one shared directory."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.client import Shoal
from shoal.home import holder
from tests.support.real_plane import RealPlane, until

TAKEOVER_S = 60.0
"""A frozen leader is given up after 15 s; the rest is for a busy machine."""


class OnePlane(RealPlane):
    """One of the two. Its own `shoal` talks to it alone."""

    def start(self) -> dict[str, Any]:
        """What `shoal up --json` says."""
        done = self.command("up", *self._flags, "--json")
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    @property
    def pid(self) -> int:
        pid = holder(self.home)
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
        self.first = OnePlane(top / "first", *flags, demo=demo)
        self.second = OnePlane(top / "second", *flags, demo=demo)
        self._admin = ""

    def settle(self) -> None:
        """Whatever became of them before."""
        for one in (self.first, self.second):
            if holder(one.home) is None:
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
            if pid := holder(one.home):
                os.kill(pid, signal.SIGCONT)  # one that a test left frozen
        self.settle()
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
    planes.settle()
    try:
        yield planes
    finally:
        planes.down()
