"""A slurmrestd for the laboratory's Slurm, with tokens: as nobody, for it refuses to be root or SlurmUser."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.support.host import PATH
from tests.support.slurm_root import SlurmRoot

NEEDED = ("slurmrestd", "setpriv")
START_S = 60.0
POLL_S = 0.05
# As nobody, but below folders of the tests that only root may enter.
NOBODY = (
    "setpriv",
    "--reuid=nobody",
    "--regid=nogroup",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
)


def what_is_missing(path: str) -> str | None:
    missing = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"no {', '.join(missing)} here: `scripts/setup engines` installs them" if missing else None


class Rest:
    """Blocking. `write` before slurmctld starts, `up` after it, `down` before it."""

    def __init__(
        self,
        root: Path,
        port: int,
        environment: dict[str, str],
        other: SlurmRoot | None,
        *,
        has_accounting: bool,
    ) -> None:
        self._root = root
        self._environment = environment
        self._other = other
        self._has_accounting = has_accounting
        self.url = f"http://127.0.0.1:{port}"
        self.socket = root / "run" / "rest.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def words(self) -> list[str]:
        """For slurm.conf and slurmdbd.conf."""
        key = self._root / "etc" / "jwt.key"
        return ["AuthAltTypes=auth/jwt", f"AuthAltParameters=jwt_key={key}"]

    def write(self) -> None:
        key = self._root / "etc" / "jwt.key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)

    def up(self) -> None:
        """Returns when it takes connections, at its port and at its file."""
        self.socket.unlink(missing_ok=True)
        words = ["slurmrestd", "-f", self._environment["SLURM_CONF"], "-a", "rest_auth/jwt"]
        if not self._has_accounting:  # what speaks of accounting refuses to start without
            is_old = self._run("sinfo", "--version").split()[1] < "23"
            words += ["-s", "openapi/v0.0.38" if is_old else "openapi/slurmctld"]
        words += [self.url.removeprefix("http://"), f"unix:{self.socket}"]
        with (self._root / "log" / "slurmrestd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*(self._other.entering if self._other is not None else []), *NOBODY, *words],
                env={**self._environment, "PATH": PATH, "SLURM_JWT": "daemon"},
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self.socket.exists():
            assert self._process.poll() is None, "slurmrestd ended; see log/slurmrestd.log"
            assert time.monotonic() < deadline, f"slurmrestd does not listen within {START_S:g} s"
            time.sleep(POLL_S)

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
        told = self._run("scontrol", "token", f"username={user}", f"lifespan={lifespan_s}")
        return told.strip().partition("=")[2]

    def token_file(self, path: Path, user: str = "root", lifespan_s: int = 3600) -> Path:
        """A file that its owner alone can read, as it should be."""
        path.write_text(self.token(user, lifespan_s) + "\n")
        path.chmod(0o600)
        return path

    def _run(self, *words: str) -> str:
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
