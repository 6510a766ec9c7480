"""Every TCP port that a laboratory's Slurm has opened, tried by who has no credential of its munge, one of
another munge, or the right one.

Slurm's own commands are the knockers, with a configuration that says what to show: they speak its language,
whatever the version.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.host.processes import Listener, listeners
from tests.support.slurm.real_slurm import SlurmLab

OWN_MUNGE, FOREIGN_MUNGE, NO_CREDENTIAL = "Slurm's own munge's", "another munge's", "none"
"""Which credential is shown."""
REFUSED = "refused"
SAFE = (
    *(("squeue", "-h"), ("scontrol", "show", "node"), ("scontrol", "show", "slurmd")),
    ("sacctmgr", "-n", "-P", "show", "cluster"),
)
"""What may be asked with the right one: it changes nothing."""
NOISE = (
    ("as long as it says", False, "\0\0\0\4\1\2\3\4"),
    ("a line", False, "GET / HTTP/1.1\r\n\r\n"),
    ("TLS", True, "\0\0\0\4\1\2\3\4"),
)
REST = ("/slurm/{0}/jobs", "/slurm/{0}/nodes", "/slurm/{0}/diag", "/slurmdb/{0}/users", "/slurmdb/{0}/jobs")
QUESTIONS = {
    "slurmctld": (
        ("scontrol", "show", "node"),
        ("squeue", "-h"),
        ("scontrol", "show", "config"),
        ("sbatch", "--job-name=intruder", "--hold", "-o/dev/null", "--wrap=true"),
        ("scancel", "--partition=main"),
        ("scontrol", "update", "NodeName=n0", "State=DRAIN", "Reason=intruder"),
        ("scontrol", "token", "username=root"),
    ),
    "slurmdbd": (
        ("sacctmgr", "-n", "-P", "show", "cluster"),
        ("sacct", "-n", "-X", "-a", "-S", "now-1hour"),
        ("sacctmgr", "-i", "add", "account", "intruder"),
    ),
    "slurmd": (("scontrol", "show", "slurmd"),),
}
"""By who is asked, in ways that matter."""


def slurm_listeners(lab: SlurmLab) -> dict[str, list[Listener]]:
    """Of its daemons here, under an empty name, and of those and of what they started on every node."""
    assert lab.accounting is not None
    assert lab.rest is not None
    controller = int((lab.root / "run" / "slurmctld.pid").read_text())
    result = {"": listeners([controller, lab.accounting.pid, lab.rest.pid])}
    for name in lab.names:
        result[name] = listeners([pid for pid in lab.pids_on(name) if lab.is_cluster_process(pid)])
    return result


def role_of(listener: Listener) -> str:
    """Whose it is: `slurmctld`, `srun`."""
    return Path(listener.command_line.split(" ")[0].rstrip(":")).name


class Intruder:
    """Somebody who reaches every port and knows Slurm's configuration, but has not its munge key."""

    def __init__(self, lab: SlurmLab, folder: Path) -> None:
        self._lab = lab
        self._conf = {
            OWN_MUNGE: lab.root / "etc" / "slurm.conf",
            FOREIGN_MUNGE: self._write(folder / "foreign.conf", f"{folder}/munge.sock", "auth/munge"),
            NO_CREDENTIAL: self._write(folder / "nothing.conf", f"{folder}/munge.sock", "auth/none"),
        }

    def _write(self, path: Path, socket: str, auth: str) -> Path:
        config = (self._lab.root / "etc" / "slurm.conf").read_text()
        text = config.replace(f"{self._lab.root}/run/munge.sock", socket)
        text = re.sub(r"^AuthType=.*$", f"AuthType={auth}", text, flags=re.MULTILINE)
        path.write_text(re.sub(r"^AuthAlt.*\n", "", text, flags=re.MULTILINE))
        return path

    def ask(self, credential: str, *command: str) -> str:
        """`0` and what was printed, or that it was refused, and how."""
        environment = {**self._lab.environment, "SLURM_CONF": str(self._conf[credential])}
        # Who asks for the state of a slurmd asks that of the same machine.
        inside = self._lab.netns_command(self._lab.names[-1]) if "slurmd" in command else []
        done = subprocess.run(
            [*inside, *command], env=environment, capture_output=True, text=True, check=False, cwd="/"
        )
        return f"0 {done.stdout}" if done.returncode == 0 else f"{REFUSED}: {done.stderr}"


@contextlib.contextmanager
def an_intruder(lab: SlurmLab, folder: Path) -> Iterator[Intruder]:
    """With a munge of their own, which is gone afterwards."""
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"socket": "munge.sock", "key-file": "key", "seed-file": "seed", "log-file": "log"}
    arguments = [f"--{name}={folder / file}" for name, file in files.items()]
    munge = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--pid-file={folder}/pid", *arguments],
        env=lab.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        lab.until((folder / "munge.sock").exists, "the other munge answers")
        yield Intruder(lab, folder)
    finally:
        munge.terminate()
        munge.wait()


class RestAnswer(NamedTuple):
    status: int
    body: str


def ask_rest(lab: SlurmLab, token: str | None) -> dict[str, RestAnswer]:
    """What slurmrestd answers to who has this token of root's, by path."""
    assert lab.rest is not None
    version = "v0.0.38" if lab.run("sinfo", "--version").split()[1] < "23" else "v0.0.42"
    headers = {"X-SLURM-USER-NAME": "root"} | ({"X-SLURM-USER-TOKEN": token} if token is not None else {})
    result = {}
    for path in (item.format(version) for item in REST):
        link = http.client.HTTPConnection(lab.rest.url.removeprefix("http://"), timeout=30)
        try:
            link.request("GET", path, headers=headers)
            answer = link.getresponse()
            result[path] = RestAnswer(answer.status, answer.read().decode())
        finally:
            link.close()
    return result
