"""A desk at which somebody types `shoal cluster`, and what the machines before it are like.

They are of `tests/support/machines.py`: what one has, beyond being bare, is shell that runs in it first.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.style.tree import ROOT
from tests.support.machines import Lab, machines

ANA = """\
useradd -m -s /bin/sh -u 4242 ana
usermod -p '*' ana
"""
SUDO = """\
echo 'ana ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/ana
chmod 440 /etc/sudoers.d/ana
"""
WITH_GPUS = """\
for i in 1 3; do mknod -m 666 "/dev/nvidia$i" c 240 "$i"; done
cat >/usr/bin/nvidia-smi <<'END'
#!/bin/sh
case "$*" in
  *index,mig*) printf '0, Disabled, NVIDIA H200\\n1, Disabled, NVIDIA H200\\n' ;;
  *index*) printf '0\\n1\\n' ;;
  -q) printf '    Minor Number                                       : %s\\n' 1 3 ;;
esac
END
chmod +x /usr/bin/nvidia-smi
"""
"""Two, in words of a real driver (580, H200), whose files are not numbered as they are counted."""
BEHIND_UFW = """\
printf '#!/bin/sh\\necho Status: active\\n' >/usr/sbin/ufw
chmod +x /usr/sbin/ufw
"""
FOREIGN_KEY = """\
head -c 512 /dev/urandom >/etc/munge/munge.key
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
"""
KEY_LOOK = "sudo sha256sum /etc/munge/munge.key"


@dataclass
class Desk:
    """Where somebody sits and types `shoal`."""

    lab: Lab
    home: Path

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SHOAL_HOME": str(self.home), "COLUMNS": "200"}

    def typed(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command, and how it ended."""
        return subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *words],
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def run(self, *words: str, code: int) -> subprocess.CompletedProcess[str]:
        """Type a command. It must end with this exit code."""
        done = self.typed(*words)
        tail = (done.stdout + done.stderr)[-4000:]
        wrong = [line for line in done.stdout.splitlines() if "FAILED" in line or '"detail": "' in line]
        assert done.returncode == code, (
            f"{words}: {done.returncode}: {[w for w in wrong if len(w) > 30]} {tail}"
        )
        return done

    def kill(self, *words: str, after_s: float) -> bool:
        """Type a command, and kill it then; whether it was at work still."""
        command = [sys.executable, "-m", "shoal.cli.main", "cluster", *words]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=quiet, stderr=quiet) as typed:
            try:
                typed.wait(after_s)
            except subprocess.TimeoutExpired:
                typed.kill()
                return True
        return False

    def type(self, *words: str, code: int = 0) -> str:
        done = self.run("cluster", *words, code=code)
        return done.stdout + done.stderr

    def ask(self, *words: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("cluster", *words, "--json", code=code).stdout)
        return found

    def reach(self, *names: str, user: str = "ana") -> tuple[str, ...]:
        hosts = ",".join(self.lab.address(name) for name in names)
        known, key = str(self.lab.known_hosts), str(self.lab.identity)
        words = ("--hosts", hosts, "--name", "lab", "--user", user)
        return (*words, "--identity", key, "--known-hosts", known)

    def states(self, controller: str = "node-a") -> dict[str, str]:
        """Slurm's own word about each node."""
        lines = self.lab.ssh(controller, "sinfo -h -N -p main -o '%N %t'").stdout.splitlines()
        return dict(line.split() for line in lines)

    def await_states(self, wanted: dict[str, str]) -> None:
        deadline = time.monotonic() + 90
        while (seen := self.states()) != wanted:
            assert time.monotonic() < deadline, seen
            time.sleep(0.5)

    def as_user(self, command: str) -> str:
        """A command of Slurm's by a user that every machine has: root's jobs are refused."""
        typed = shlex.quote(f"cd / && {command}")
        return self.lab.ssh("node-a", f"su -s /bin/sh ana -c {typed}").stdout

    def srun(self, flags: str, command: str = "hostname") -> list[str]:
        return sorted(self.as_user(f"srun {flags} {command}").split())


@contextmanager
def desk_before(folder: Path) -> Iterator[Desk]:
    """A desk before a lab without machines; what was started at it ends with the `with` block."""
    folder.chmod(0o755)
    with machines(folder / "lab") as lab:
        desk = Desk(lab, folder / "home")
        try:
            yield desk
        finally:
            desk.run("down", code=0)


def pids(lab: Lab, name: str) -> list[str]:
    return lab.ssh(name, "cat /run/*.pid /run/munge/*.pid /run/mysqld/*.pid 2>/dev/null; true").stdout.split()


def traces(lab: Lab, name: str) -> list[str]:
    """What a cluster leaves on a machine."""
    paths = "/var/lib/shoal-cluster /etc/munge/munge.key /etc/slurm/*.conf /usr/local/sbin/shoal-*"
    paths += " /run/slurm*.pid /usr/local/lib/shoal-node*"
    look = f"ls -d {paths} 2>/dev/null"
    running = "pgrep -l 'slurm|munge' || true"
    hosts = "grep shoal /etc/hosts || true"
    return lab.ssh(name, f"{look}; {running}; {hosts}").stdout.split()
