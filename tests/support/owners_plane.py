"""A control plane of root's for several people with Unix accounts of their own, on a laboratory's Slurm.

The accounts are real, made by `useradd` under names that nobody has, and gone afterwards. Everything lies in
a folder that they can reach, which the folders of tests are not.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.client import Shoal
from shoal.client.handles import JobHandle
from tests.support.cluster_plane import ClusterPlane
from tests.support.shares import SOURCE
from tests.support.slurm_lab import SlurmLab

NEEDED = ("useradd", "userdel", "setpriv")


def what_is_missing() -> str | None:
    """Why there can be no jobs of other users here, and what to do; None: there can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here: `apt-get install passwd util-linux`"
    if not readable_python():
        return f"no Python {sys.version_info.minor} that every user may run: /usr/bin/python3"
    if not as_nobody(readable_python(), "-c", "import shoal.wire", PYTHONPATH=PYTHON_PATH):
        return f"other users may not read {SOURCE}: put the clone elsewhere, such as below /srv"
    return None


PYTHON_PATH = f"{SOURCE}:{sysconfig.get_path('purelib')}"


def readable_python() -> str:
    """One that has our version and that every user may run; empty: there is none."""
    same = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    return next((one for one in (sys.executable, "/usr/bin/python3") if as_nobody(one, "-c", same)), "")


def as_nobody(*command: str, **env: str) -> bool:
    """Whether the command ends well for a user who has no rights of root's."""
    # By a shell: `setpriv` itself finds what it starts with the powers of root.
    words = ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", 'exec "$@"', "sh", *command]
    return subprocess.run(words, capture_output=True, check=False, cwd="/", env=env).returncode == 0


class OwnersPlane(ClusterPlane):
    lab: SlurmLab

    def __init__(self, home: Path, lab: SlurmLab) -> None:
        super().__init__(home, lab)
        self._people: list[Shoal] = []

    def connect(self, *more: str, python: str = "") -> dict[str, object]:
        self.shared.mkdir(mode=0o755)
        self.spool.mkdir()
        self.spool.chmod(0o1777)  # everybody's, as /tmp is
        words = ["--as-owners", "--python", python or readable_python(), "--python-path", PYTHON_PATH]
        words += ["--shared", str(self.shared), "--spool", str(self.spool), "--json"]
        done = self.command("connect", "slurm", *words, *more)
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told

    def person(self, name: str) -> Shoal:
        """A user of Shoal's, a member of the first project, with a token of their own."""
        self.shoal.users.create(name)
        self.shoal.projects.set_member("default", name, "member")
        token = self.shoal.tokens.create(user=name)["text"]
        self._people.append(Shoal(env={**self.env, "SHOAL_TOKEN": token}))
        return self._people[-1]

    def down(self) -> None:
        super().down()
        for one in self._people:
            one.transport.close()

    def run_as(self, shoal: Shoal, run: str, **fields: Any) -> JobHandle:
        fields = {"resources": {"cpus": 1}, "ranks_per_node": 1, **fields}
        return shoal.submit(run=run, workdir=None, **fields)


@contextlib.contextmanager
def accounts(*names: str) -> Iterator[dict[str, int]]:
    """Unix accounts of these names, and nobody's afterwards; their uids."""
    made = []
    try:
        for name in names:
            subprocess.run(["useradd", "--no-create-home", name], check=True)
            made.append(name)
        yield {name: pwd.getpwnam(name).pw_uid for name in names}
    finally:
        for name in made:
            subprocess.run(["userdel", "--force", name], check=True, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="shoal-owners-", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def as_user(uid: int, *command: str, lab: SlurmLab) -> subprocess.CompletedProcess[str]:
    """As somebody does it who has logged in to the lab's machine."""
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups", *command]
    env = {name: lab.environment[name] for name in ("SLURM_CONF", "PATH")}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd="/")


def name_of(purpose: str) -> str:
    """Of an account that nobody has."""
    return f"shoal-{purpose}-{os.getpid() % 100_000}"
