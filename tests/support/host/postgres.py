"""A real PostgreSQL for tests: its own data directory, a Unix socket, and no other way in."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest

INSTALL = "apt-get install postgresql"
START_S = 60.0


class PostgresServer:
    """One server process, a child of this one. `stop` and `start` may alternate."""

    def __init__(self, binaries: Path, home: Path, user: str | None) -> None:
        self._binaries = binaries
        self._home = home
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count(1)

    def create(self) -> None:
        self._run("initdb", "-D", str(self._home / "data"), "-U", "shoal", "-A", "trust", "-E", "UTF8", "-N")

    def start(self) -> None:
        # Not synced to disk: what the server promises about power cuts is not ours to test.
        command = [str(self._binaries / "postgres"), "-D", str(self._home / "data"), "-k", str(self._home)]
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=40"]
        log = (self._home / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                command + options, stdout=log, stderr=log, user=self._user, cwd="/", start_new_session=True
            )
        self._wait_ready()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT closes connections and stops; SIGQUIT is a crash."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(timeout=START_S)
        self._process = None

    def freeze(self) -> None:
        """It answers nobody until it is thawed, and closes nothing."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def new_database(self, like: str = "template1") -> str:
        """A copy of one that nobody is connected to; of itself, it is empty."""
        name = f"shoal_{next(self._numbers)}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {like}".encode())
        return name

    def drop_database(self, name: str) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def dsn(self, database: str) -> str:
        return f"host={self._home} user=shoal dbname={database}"

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://shoal@/{database}?host={self._home}"

    def _signal_all(self, number: signal.Signals) -> None:
        """The server and the processes that serve its sessions."""
        assert self._process is not None
        own = self._process.pid
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if own in (int(stat.parent.name), int(fields[1])):
                    os.kill(int(stat.parent.name), number)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.dsn("postgres")).close()
            except psycopg.OperationalError:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, user=self._user, cwd="/", check=False)
        assert done.returncode == 0, done.stderr


def find_binaries() -> Path | None:
    """Where `initdb` and `postgres` are: Debian keeps them out of PATH, newest version wins."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    on_path = shutil.which("postgres")
    candidates = [*([Path(on_path).resolve().parent] if on_path else []), *reversed(debian)]
    return next((path for path in candidates if (path / "initdb").exists()), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(f"no PostgreSQL server on this machine: {INSTALL}")
    # PostgreSQL refuses to run as root.
    user = _unprivileged() if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    if user is not None:
        shutil.chown(home, user)
    server = PostgresServer(binaries, home, user)
    try:
        server.create()
        server.start()
        yield server
        # What it holds is thrown away: no need to wait until it is in order.
        server.stop(signal.SIGQUIT)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _unprivileged() -> str:
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
