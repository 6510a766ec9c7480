"""A cluster of simulated nodes, used as a person uses it: through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.style.tree import ROOT
from tests.support.runtime.tasks import pids_with

LIMIT_S = 110.0
LOOK_S = 0.4
"""Each look starts a program, and what it looks for needs the processor too."""


class SimulatedCluster:
    """Two simulated nodes of two GPUs in a home of their own, used through the command line."""

    def __init__(self, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        path = f"{Path(sys.executable).parent}:{kept['PATH']}"
        self.env = {**kept, "SHOAL_HOME": str(home), "PATH": path}

    def __call__(self, *argv: str, code: int = 0) -> str:
        """What the command prints; it must end with this code."""
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *argv],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def follow(self, job: str) -> Iterator[str]:
        """The job's lines as they come, until it ends."""
        command = [sys.executable, "-m", "shoal.cli.main", "logs", "-f", job]
        with subprocess.Popen(command, env=self.env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield from process.stdout
        assert process.returncode == 0

    def until(self, is_so: Callable[[], bool]) -> None:
        """Look again and again; fails when the deadline passes."""
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
            time.sleep(LOOK_S)

    def jobs(self, name: str) -> list[dict[str, Any]]:
        return list(json.loads(self("queue", "--all", "--name", name, "--json")))


@contextmanager
def running_cluster(home: Path, *flags: str) -> Iterator[SimulatedCluster]:
    """One that is up; afterwards nothing of it runs."""
    cluster = SimulatedCluster(home)
    cluster("up", "--listen", "127.0.0.1:0", *flags)
    try:
        yield cluster
    finally:
        cluster("down", "--jobs")


def rank_pid(job: str, script: str, number: int) -> int:
    """The newest process of one rank of a job."""
    mine = {f"RANK={number}".encode(), f"SLURM_JOB_NAME={job}".encode()}
    found = [
        pid
        for pid in pids_with(script)
        if mine <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    ]
    return found[-1]
