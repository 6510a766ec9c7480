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
    def __init__(self, top: Path, database: str) -> None:
        self.shared = top / "shared"
        flags = ("--database", database, "--shared", str(self.shared))
        self.first = OnePlane(top / "first", *flags, demo="2x2")
        self.second = OnePlane(top / "second", *flags, demo="2x2")

    def up(self) -> None:
        """The first leads, the second stands by."""
        assert self.first.start()["role"] == "leader"
        assert self.second.start()["role"] == "standby"

    @property
    def leader(self) -> OnePlane:
        return next(one for one in (self.first, self.second) if one.role == "leader")

    def client(self, patience_s: float = TAKEOVER_S) -> Shoal:
        """One that knows both."""
        env = {**self.first.env, "SHOAL_TOKEN": self.first.token(), "SHOAL_URL": self.urls}
        return Shoal(env=env, patience_s=patience_s)

    @property
    def urls(self) -> str:
        return f"{self.first.url},{self.second.url}"

    def down(self) -> None:
        for one in (self.first, self.second):
            pid = holder(one.home)
            if pid:
                os.kill(pid, signal.SIGCONT)  # one that a test left frozen
        self.first.command("up", *self.first._flags)
        self.second.command("down")
        self.first.until_role("leader")
        self.first.down()


@contextmanager
def two_planes(top: Path, database: str) -> Iterator[TwoPlanes]:
    planes = TwoPlanes(top, database)
    planes.up()
    try:
        yield planes
    finally:
        planes.down()
