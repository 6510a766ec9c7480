"""CPU seconds of chosen processes and of all they start, counted by the kernel, whatever else runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

OLD, NEW = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")


class CpuAccount:
    """A cgroup of its own, of either version. Needs root. Call `close` after its processes have ended."""

    def __init__(self) -> None:
        self._is_old = OLD.is_dir()
        self._folder = (OLD if self._is_old else NEW) / f"shoal-bench-{os.getpid()}"
        self._folder.mkdir(exist_ok=True)

    def add(self, pids: Iterable[int]) -> None:
        """Count the process, and what it starts from now on."""
        for pid in pids:
            (self._folder / "cgroup.procs").write_text(str(pid))

    def cpu_s(self) -> float:
        if self._is_old:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        fields = dict(map(str.split, (self._folder / "cpu.stat").read_text().splitlines()))
        return int(fields["usage_usec"]) / 1e6

    def close(self) -> None:
        self._folder.rmdir()
