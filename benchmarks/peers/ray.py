"""A real Ray head, installed into an environment of its own under .cache/, held in a private network.

Ray pins packages that Shoal does not want to be held to, hence the separate environment and constraints.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import private_network
from benchmarks.processes import BenchmarkError, Usage, call, descendants, free_ports, stop, usage, wait_until

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".cache" / "ray"
CONSTRAINTS = ROOT / "constraints-bench.txt"


def install() -> None:
    """Make the environment once; a second call returns at once."""
    stamp = HOME / "installed"
    wanted = f"{CONSTRAINTS.read_text()}{sys.version}{HOME}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print("installing Ray into .cache/ray (about a minute, 400 MB)", flush=True)
    call([sys.executable, "-m", "venv", "--clear", HOME], timeout_s=120)
    pip: list[str | Path] = [
        HOME / "bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        CONSTRAINTS,
        "ray[default]",
    ]
    call(pip, timeout_s=900)
    stamp.write_text(wanted)


class Ray:
    """One head node that takes jobs. Its processes are recognised by the session folder on their command
    line.
    """

    def __init__(self) -> None:
        if not private_network.is_private():
            raise BenchmarkError(
                "Ray listens on every address, and there is no private network to hold it in"
            )
        install()
        # Ray puts sockets below here and Linux allows 107 characters for one: keep it short.
        self.home = Path(tempfile.mkdtemp(prefix="sbr-", dir="/tmp"))
        self.port, self.dashboard_port, *self._agent_ports = free_ports(6)
        self.env = {
            "PATH": f"{HOME / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": self.url,
            "PYTHONWARNINGS": "ignore",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def __enter__(self) -> Self:
        # Ports that are given are not waited for: on a busy machine that wait of 15 s is what fails.
        grpc, metrics, listen, runtime_env = self._agent_ports
        try:
            call(
                [
                    "ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={self.port}",
                    "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}",
                    f"--dashboard-agent-grpc-port={grpc}", f"--metrics-export-port={metrics}",
                    f"--dashboard-agent-listen-port={listen}", f"--runtime-env-agent-port={runtime_env}",
                    f"--temp-dir={self.home}", "--num-cpus=8", "--object-store-memory=100000000",
                    "--disable-usage-stats",
                ],
                env={key: value for key, value in self.env.items() if key != "RAY_ADDRESS"},
                timeout_s=120,
            )  # fmt: skip
            wait_until(self._is_ready, 60, "Ray's job server")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_ready(self) -> bool:
        try:
            return isinstance(self.request("GET", "/api/jobs/"), list)
        except (OSError, BenchmarkError, http.client.HTTPException):
            return False

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.dashboard_port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise BenchmarkError(f"Ray answered {answer.status}: {text[:500]!r}")
        return json.loads(text)

    def submit_command(self, script: str, *options: str) -> list[str]:
        return ["ray", "job", "submit", "--no-wait", *options, "--", "bash", "-c", script]

    def run_submit(self, script: str, *options: str) -> None:
        call(self.submit_command(script, *options), env=self.env, timeout_s=60)

    def num_jobs(self) -> int:
        return len(self.request("GET", "/api/jobs/"))

    def pids(self) -> set[int]:
        """Processes that carry this head's own folder or port on their command line, and their children."""
        marks = (str(self.home), f":{self.port}")
        matching = set()
        for entry in Path("/proc").iterdir():
            try:
                line = (
                    (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
                )
            except OSError:
                continue  # it ended while we looked
            if "ray" in line and any(mark in line for mark in marks) and int(entry.name) != os.getpid():
                matching.add(int(entry.name))
        return descendants(matching)

    def usage(self) -> Usage:
        return usage(self.pids())

    def close(self) -> None:
        stop(self.pids(), grace_s=5)
        stop(self.pids(), grace_s=2)  # workers the raylet started while it was being stopped
        shutil.rmtree(self.home, ignore_errors=True)


def version() -> str:
    shown = subprocess.run([HOME / "bin/ray", "--version"], capture_output=True, text=True, check=False)
    return shown.stdout.strip().rpartition(" ")[2]
