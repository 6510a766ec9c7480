"""An HTTP proxy for the apt of machines that reach nobody but their bridge: it asks in their place.

A desk at which somebody types `shoal cluster`, and what the machines before it are like.

They are of `tests/support/host/machines.py`: what one has, beyond being bare, is shell that runs in it first.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.style.tree import ROOT
from tests.support.host.machines import MachineLab, machines


class _Proxy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        wanted = {
            name: value for name, value in self.headers.items() if name.lower() in {"range", "if-range"}
        }
        try:
            answer = urllib.request.urlopen(urllib.request.Request(self.path, headers=wanted), timeout=60)
        except urllib.error.HTTPError as refusal:
            self.send_error(refusal.code)
            return
        with answer:
            self.send_response(answer.status)
            for name in ("Content-Length", "Content-Type", "Content-Range", "Last-Modified"):
                if value := answer.headers.get(name):
                    self.send_header(name, value)
            self.end_headers()
            shutil.copyfileobj(answer, self.wfile)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def apt_proxy(address: str) -> Iterator[str]:
    """The proxy's URL, at this address of ours."""
    with ThreadingHTTPServer((address, 0), _Proxy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


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
SHOW_KEY_DIGEST = "sudo sha256sum /etc/munge/munge.key"


@dataclass
class AdminShell:
    """Where somebody sits and types `shoal`."""

    lab: MachineLab
    home: Path

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SHOAL_HOME": str(self.home), "COLUMNS": "200"}

    def run_unchecked(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command, and how it ended."""
        return subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *arguments],
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def run(self, *arguments: str, code: int) -> subprocess.CompletedProcess[str]:
        """Type a command. It must end with this exit code."""
        done = self.run_unchecked(*arguments)
        tail = (done.stdout + done.stderr)[-4000:]
        wrong = [line for line in done.stdout.splitlines() if "FAILED" in line or '"detail": "' in line]
        assert done.returncode == code, (
            f"{arguments}: {done.returncode}: {[w for w in wrong if len(w) > 30]} {tail}"
        )
        return done

    def kill(self, *arguments: str, after_s: float) -> bool:
        """Type a command, and kill it then; whether it was at work still."""
        command = [sys.executable, "-m", "shoal.cli.main", "cluster", *arguments]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=quiet, stderr=quiet) as typed:
            try:
                typed.wait(after_s)
            except subprocess.TimeoutExpired:
                typed.kill()
                return True
        return False

    def run_cluster(self, *arguments: str, code: int = 0) -> str:
        done = self.run("cluster", *arguments, code=code)
        return done.stdout + done.stderr

    def run_cluster_json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("cluster", *arguments, "--json", code=code).stdout)
        return found

    def host_options(self, *names: str, user: str = "ana") -> tuple[str, ...]:
        hosts = ",".join(self.lab.address(name) for name in names)
        known, key = str(self.lab.known_hosts), str(self.lab.identity)
        words = ("--hosts", hosts, "--name", "lab", "--user", user)
        return (*words, "--identity", key, "--known-hosts", known)

    def node_states(self, controller: str = "node-a") -> dict[str, str]:
        """Slurm's own word about each node."""
        lines = self.lab.ssh(controller, "sinfo -h -N -p main -o '%N %t'").stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_for_states(self, wanted: dict[str, str]) -> None:
        deadline = time.monotonic() + 90
        while (seen := self.node_states()) != wanted:
            assert time.monotonic() < deadline, seen
            time.sleep(0.5)

    def as_user(self, command: str) -> str:
        """A command of Slurm's by a user that every machine has: root's jobs are refused."""
        typed = shlex.quote(f"cd / && {command}")
        return self.lab.ssh("node-a", f"su -s /bin/sh ana -c {typed}").stdout

    def srun(self, flags: str, command: str = "hostname") -> list[str]:
        return sorted(self.as_user(f"srun {flags} {command}").split())


@contextmanager
def admin_shell(folder: Path) -> Iterator[AdminShell]:
    """A desk before a lab without machines; what was started at it ends with the `with` block."""
    folder.chmod(0o755)
    with machines(folder / "lab") as lab:
        desk = AdminShell(lab, folder / "home")
        try:
            yield desk
        finally:
            desk.run("down", code=0)


def daemon_pids(lab: MachineLab, name: str) -> list[str]:
    return lab.ssh(name, "cat /run/*.pid /run/munge/*.pid /run/mysqld/*.pid 2>/dev/null; true").stdout.split()


def cluster_traces(lab: MachineLab, name: str) -> list[str]:
    """What a cluster leaves on a machine."""
    paths = "/var/lib/shoal-cluster /etc/munge/munge.key /etc/slurm/*.conf /usr/local/sbin/shoal-*"
    paths += " /run/slurm*.pid /usr/local/lib/shoal-node*"
    look = f"ls -d {paths} 2>/dev/null"
    running = "pgrep -l 'slurm|munge' || true"
    hosts = "grep shoal /etc/hosts || true"
    return lab.ssh(name, f"{look}; {running}; {hosts}").stdout.split()
