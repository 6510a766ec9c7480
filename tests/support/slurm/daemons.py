"""A slurmdbd for the laboratory's Slurm, over a MariaDB of its own that listens at a file alone.

A slurmrestd for the laboratory's Slurm, with tokens: as nobody, for it refuses to be root or SlurmUser.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.host.processes import PATH
from tests.support.slurm.other_version import SlurmRoot

ACCOUNTING_PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacctmgr")
ACCOUNTING_START_S = 60.0
ACCOUNTING_POLL_S = 0.1
SLURMDBD_CONF = """AuthType=auth/munge
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


def missing_for_accounting(path: str) -> str | None:
    missing = [name for name in ACCOUNTING_PROGRAMS if shutil.which(name, path=path) is None]
    return f"no {', '.join(missing)} here: `scripts/setup engines` installs them" if missing else None


class SlurmAccounting:
    """Blocking. `up` before slurmctld, `down` after it."""

    def __init__(self, root: Path, port: int, environment: dict[str, str], extra_lines: list[str]) -> None:
        """`more`: further lines for slurmdbd.conf."""
        self._root = root
        self._extra_lines = extra_lines
        self._port = port
        self._environment = {**environment, "MYSQL_UNIX_PORT": str(root / "run" / "mariadb.sock")}
        self._database: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    @property
    def slurm_conf_lines(self) -> list[str]:
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
        conf.write_text(
            "\n".join([SLURMDBD_CONF.format(root=self._root, port=self._port), *self._extra_lines, ""])
        )
        conf.chmod(0o600)
        data, temporary = self._root / "mariadb", self._root / "mariadb-tmp"
        temporary.mkdir()
        # A MariaDB that starts removes the temporary tables it finds: also another's, in a shared /tmp.
        arguments = ["--no-defaults", f"--datadir={data}", f"--tmpdir={temporary}", "--user=root"]
        self._run(
            ["mariadb-install-db", *arguments, "--skip-test-db", "--auth-root-authentication-method=normal"]
        )
        socket = self._environment["MYSQL_UNIX_PORT"]
        server_options = [
            f"--socket={socket}",
            "--skip-networking",
            f"--pid-file={self._root}/run/mariadb.pid",
        ]
        self._database = self._spawn(["mariadbd", *arguments, *server_options])
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
        arguments = ["sacctmgr", "-n", "-P", "show", "cluster"]
        done = subprocess.run(arguments, env=self._environment, capture_output=True, check=False)
        return done.returncode == 0

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False, cwd="/"
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._root / "log" / f"{command[0]}.out").open("ab") as log:
            return subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, cwd="/", start_new_session=True
            )

    def _until(self, is_so: Callable[[], bool], description: str) -> None:
        deadline = time.monotonic() + ACCOUNTING_START_S
        while not is_so():
            assert time.monotonic() < deadline, f"not within {ACCOUNTING_START_S:g} s: {description}"
            time.sleep(ACCOUNTING_POLL_S)


REST_PROGRAMS = ("slurmrestd", "setpriv")
REST_START_S = 60.0
REST_POLL_S = 0.05
# As nobody, but below folders of the tests that only root may enter.
AS_NOBODY = (
    "setpriv",
    "--reuid=nobody",
    "--regid=nogroup",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
)


def missing_for_rest(path: str) -> str | None:
    missing = [name for name in REST_PROGRAMS if shutil.which(name, path=path) is None]
    return f"no {', '.join(missing)} here: `scripts/setup engines` installs them" if missing else None


class SlurmRestServer:
    """Blocking. `write` before slurmctld starts, `up` after it, `down` before it."""

    def __init__(
        self,
        root: Path,
        port: int,
        environment: dict[str, str],
        other_root: SlurmRoot | None,
        *,
        has_accounting: bool,
    ) -> None:
        self._root = root
        self._environment = environment
        self._other_root = other_root
        self._has_accounting = has_accounting
        self.url = f"http://127.0.0.1:{port}"
        self.socket = root / "run" / "rest.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def slurm_conf_lines(self) -> list[str]:
        """For slurm.conf and slurmdbd.conf."""
        key = self._root / "etc" / "jwt.key"
        return ["AuthAltTypes=auth/jwt", f"AuthAltParameters=jwt_key={key}"]

    def write_key(self) -> None:
        key = self._root / "etc" / "jwt.key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)

    def up(self) -> None:
        """Returns when it takes connections, at its port and at its file."""
        self.socket.unlink(missing_ok=True)
        arguments = ["slurmrestd", "-f", self._environment["SLURM_CONF"], "-a", "rest_auth/jwt"]
        if not self._has_accounting:  # what speaks of accounting refuses to start without
            is_old = self._run("sinfo", "--version").split()[1] < "23"
            arguments += ["-s", "openapi/v0.0.38" if is_old else "openapi/slurmctld"]
        arguments += [self.url.removeprefix("http://"), f"unix:{self.socket}"]
        with (self._root / "log" / "slurmrestd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._other_root.enter_command if self._other_root is not None else []),
                    *AS_NOBODY,
                    *arguments,
                ],
                env={**self._environment, "PATH": PATH, "SLURM_JWT": "daemon"},
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        deadline = time.monotonic() + REST_START_S
        while not self.socket.exists():
            assert self._process.poll() is None, "slurmrestd ended; see log/slurmrestd.log"
            assert time.monotonic() < deadline, f"slurmrestd does not listen within {REST_START_S:g} s"
            time.sleep(REST_POLL_S)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As by `kill -9`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None

    down = kill

    def token(self, user: str = "root", lifespan_s: int = 3600) -> str:
        """As `scontrol` prints it, without the name in front."""
        result = self._run("scontrol", "token", f"username={user}", f"lifespan={lifespan_s}")
        return result.strip().partition("=")[2]

    def token_file(self, path: Path, user: str = "root", lifespan_s: int = 3600) -> Path:
        """A file that its owner alone can read, as it should be."""
        path.write_text(self.token(user, lifespan_s) + "\n")
        path.chmod(0o600)
        return path

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
