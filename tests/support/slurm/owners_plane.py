"""The name that a job has in Slurm's queue, as tests find it there.

A control plane of root's for several people with Unix accounts of their own, on a laboratory's Slurm.

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
from shoal.engines.slurm.render import job_name
from tests.support.planes.cluster_plane import ClusterPlane
from tests.support.runtime.tasks import SOURCE, a_task_spec
from tests.support.slurm.real_slurm import SlurmLab


def slurm_name(job: JobHandle, attempt_id: str, replacement: int = 0) -> str:
    data = job.refresh().data
    order = a_task_spec(
        attempt_id=attempt_id, job_name=data["name"], project=data["project"], job_number=data["number"]
    )
    return job_name(order.identity, replacement)


ACCOUNT_PROGRAMS = ("useradd", "userdel", "setpriv")


def what_is_missing() -> str | None:
    """Why there can be no jobs of other users here, and what to do; None: there can."""
    missing = [name for name in ACCOUNT_PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here: `apt-get install passwd util-linux`"
    if not readable_python():
        return f"no Python {sys.version_info.minor} that every user may run: /usr/bin/python3"
    if not works_as_nobody(readable_python(), "-c", "import shoal.wire", PYTHONPATH=PYTHON_PATH):
        return f"other users may not read {SOURCE}: put the clone elsewhere, such as below /srv"
    return None


PYTHON_PATH = f"{SOURCE}:{sysconfig.get_path('purelib')}"


def readable_python() -> str:
    """One that has our version and that every user may run; empty: there is none."""
    same = f"import sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    return next(
        (item for item in (sys.executable, "/usr/bin/python3") if works_as_nobody(item, "-c", same)), ""
    )


def works_as_nobody(*command: str, **env: str) -> bool:
    """Whether the command ends well for a user who has no rights of root's."""
    # By a shell: `setpriv` itself finds what it starts with the powers of root.
    arguments = ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", 'exec "$@"', "sh", *command]
    return subprocess.run(arguments, capture_output=True, check=False, cwd="/", env=env).returncode == 0


class OwnersPlane(ClusterPlane):
    lab: SlurmLab

    def __init__(self, home: Path, lab: SlurmLab) -> None:
        super().__init__(home, lab)
        self._clients: list[Shoal] = []

    def connect(self, *options: str, python: str = "") -> dict[str, object]:
        self.shared.mkdir(mode=0o755)
        self.spool.mkdir()
        self.spool.chmod(0o1777)  # everybody's, as /tmp is
        arguments = ["--as-owners", "--python", python or readable_python(), "--python-path", PYTHON_PATH]
        arguments += ["--shared", str(self.shared), "--spool", str(self.spool), "--json"]
        done = self.command("connect", "slurm", *arguments, *options)
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout)
        return result

    def new_user(self, name: str) -> Shoal:
        """A user of Shoal's, a member of the first project, with a token of their own."""
        self.shoal.users.create(name)
        self.shoal.projects.set_member("default", name, "member")
        token = self.shoal.tokens.create(user=name)["text"]
        self._clients.append(Shoal(env={**self.env, "SHOAL_TOKEN": token}))
        return self._clients[-1]

    def down(self) -> None:
        super().down()
        for client in self._clients:
            client.transport.close()

    def run_as(self, shoal: Shoal, run: str, **fields: Any) -> JobHandle:
        fields = {"resources": {"cpus": 1}, "ranks_per_node": 1, **fields}
        return shoal.submit(run=run, workdir=None, **fields)


@contextlib.contextmanager
def unix_accounts(*names: str) -> Iterator[dict[str, int]]:
    """Unix accounts of these names, and nobody's afterwards; their uids."""
    created = []
    try:
        for name in names:
            subprocess.run(["useradd", "--no-create-home", name], check=True)
            created.append(name)
        yield {name: pwd.getpwnam(name).pw_uid for name in names}
    finally:
        for name in created:
            subprocess.run(["userdel", "--force", name], check=True, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="shoal-owners-", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_as_user(uid: int, *command: str, lab: SlurmLab) -> subprocess.CompletedProcess[str]:
    """As somebody does it who has logged in to the lab's machine."""
    arguments = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups", *command]
    env = {name: lab.environment[name] for name in ("SLURM_CONF", "PATH")}
    return subprocess.run(arguments, env=env, capture_output=True, text=True, check=False, cwd="/")


def account_name(purpose: str) -> str:
    """Of an account that nobody has."""
    return f"shoal-{purpose}-{os.getpid() % 100_000}"
