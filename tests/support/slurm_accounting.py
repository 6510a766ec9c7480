"""A slurmdbd for the laboratory's Slurm, over a MariaDB of its own that listens at a file alone."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NEEDED = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr")
START_S = 60.0
POLL_S = 0.1
CONF = """AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock
DbdHost=localhost
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=lab
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
"""


def what_is_missing(path: str) -> str | None:
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"no {', '.join(missing)} here: `scripts/setup engines` installs them" if missing else None


class Accounting:
    """Blocking. `up` before slurmctld, `down` after it."""

    def __init__(self, root: Path, port: int, environment: dict[str, str], more: list[str]) -> None:
        """`more`: further lines for slurmdbd.conf."""
        self._root = root
        self._more = more
        self._port = port
        self._environment = {**environment, "MYSQL_UNIX_PORT": str(root / "run" / "mariadb.sock")}
        self._database: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    @property
    def words(self) -> list[str]:
        """For slurm.conf."""
        return [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=localhost",
            f"AccountingStoragePort={self._port}",
            f"AccountingStoragePass={self._root}/run/munge.sock",
            "AccountingStorageTRES=gres/gpu",
        ]

    def up(self) -> None:
        conf = self._root / "etc" / "slurmdbd.conf"
        conf.write_text("\n".join([CONF.format(root=self._root, port=self._port), *self._more, ""]))
        conf.chmod(0o600)
        data, temporary = self._root / "mariadb", self._root / "mariadb-tmp"
        temporary.mkdir()
        # A MariaDB that starts removes the temporary tables it finds: also another's, in a shared /tmp.
        words = ["--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}", "--user=root"]
        self._run(
            ["mariadb-install-db", *words, "--skip-test-db", "--auth-root-authentication-method=normal"]
        )
        socket = self._environment["MYSQL_UNIX_PORT"]
        own = [f"--socket={socket}", "--skip-networking", f"--pid-file={self._root}/run/mariadb.pid"]
        self._database = self._spawn(["mariadbd", *words, *own])
        self._until(lambda: Path(socket).exists(), "MariaDB listens")
        self.start()
        self._run(["sacctmgr", "-i", "add", "cluster", "lab"])

    def start(self) -> None:
        """slurmdbd; returns when it answers."""
        self._daemon = self._spawn(["slurmdbd", "-D"])
        self._until(self._answers, "slurmdbd answers")

    @property
    def pid(self) -> int:
        """Of slurmdbd."""
        assert self._daemon is not None
        return self._daemon.pid

    def kill(self) -> None:
        """slurmdbd, as by `kill -9`."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()

    def down(self) -> None:
        for process in (self._daemon, self._database):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()

    def jobs(self) -> str:
        """What it has written down: name and state of each."""
        return self._run(["sacct", "-n", "-X", "-P", "-a", "-S", "now-1hour", "-o", "JobName%80,State"])

    def _answers(self) -> bool:
        words = ["sacctmgr", "-n", "-P", "show", "cluster"]
        done = subprocess.run(words, env=self._environment, capture_output=True, check=False)
        return done.returncode == 0

    def _run(self, words: list[str]) -> str:
        done = subprocess.run(
            words, env=self._environment, capture_output=True, text=True, check=False, cwd="/"
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def _spawn(self, words: list[str]) -> subprocess.Popen[bytes]:
        with (self._root / "log" / f"{words[0]}.out").open("ab") as log:
            return subprocess.Popen(
                words, env=self._environment, stdout=log, stderr=log, cwd="/", start_new_session=True
            )

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not is_so():
            assert time.monotonic() < deadline, f"not within {START_S:g} s: {what}"
            time.sleep(POLL_S)
