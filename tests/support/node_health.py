"""The program that slurmd runs every minute on a node, beside processes on paper."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from shoal.cluster import render
from tests.support.bare_machines import facts_of, found, three


class NodeHealth:
    """Of one node. Slurm's own commands are those of the environment it runs in."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder = folder
        inventory = three()
        host = found(inventory, facts_of(inventory.hosts)).hosts[0].model_copy(update={"name": node})
        assert host.found is not None
        text = render.health_check(host, host.found).content.decode()
        text = text.replace("/ /tmp /var/spool/slurmd", str(folder)).replace("/proc", f"{folder}/proc")
        self.make("health", text)
        for name in ("munge", "unmunge"):
            self.make(name, "#!/bin/sh\n")
        self.thread(1, 1, "/init.scope")
        self.is_full(False)

    def make(self, name: str, text: str) -> None:
        """A program of this name that it finds before any other."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def is_full(self, is_full: bool) -> None:
        self.make("df", f"#!/bin/sh\necho head; echo disk 9 9 9 {99 if is_full else 5}% /\n")

    def thread(self, pid: int, tid: int, group: str) -> None:
        for place in (f"{pid}/task/{tid}", *([f"{pid}"] if pid == tid else [])):
            (self.folder / "proc" / place).mkdir(parents=True, exist_ok=True)
            (self.folder / "proc" / place / "cgroup").write_text(f"4:memory:{group}\n0::{group}\n")

    def run(self, environment: Mapping[str, str]) -> None:
        env = {**environment, "PATH": f"{self.folder}:{environment['PATH']}"}
        subprocess.run([str(self.folder / "health")], env=env, check=False, capture_output=True)
