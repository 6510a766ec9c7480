"""Running contestants: start them, wait until they answer, watch them, stop them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.processes import BenchmarkError, descendants, spawn, stop, usage, wait_until
from benchmarks.proxy.contestants import ROOT, Contestant
from benchmarks.proxy.payload import CHAT
from benchmarks.proxy.samples import Case, Sample
from benchmarks.proxy.unary import burst

START_S = 120.0
"""Ray takes 15 s on an idle machine."""


@dataclass
class Running:
    contestant: Contestant
    port: int
    process: subprocess.Popen[bytes] | None = None
    """None: the process belongs to another program, and none of its usage is counted."""

    def pids(self) -> set[int]:
        """The proxy's processes."""
        if self.process is None:
            return set()
        everything = descendants([self.process.pid])
        marks = self.contestant.marks
        return (
            {pid for pid in everything if any(mark in _line(pid) for mark in marks)} if marks else everything
        )

    def cpu_s(self) -> float:
        """As exact as the scheduler's own count."""
        return sum(map(_charged_s, self.pids()))

    def memory_bytes(self) -> int:
        return usage(self.pids()).pss_bytes

    def sample(self, case: Case, seconds: float) -> Sample:
        """Send a burst. Return what its callers saw, and what it cost."""
        before = self.cpu_s()
        if case.method == "stream":
            seen = self._streams(case.connections)
            count, failed = int(seen["came"]), int(seen["expected"] - seen["came"])
            rate, p50_s, p99_s = count / seen["seconds"], seen["p50_s"], seen["p99_s"]
        else:
            done = burst(self.contestant, self.port, case, seconds)
            count, failed, p50_s, p99_s = done.requests, done.failed, done.p50_s, done.p99_s
            rate = count / max(1, round(seconds))
        return Sample((self.cpu_s() - before) / max(count, 1) * 1e6, rate, p50_s, p99_s, failed)

    def _streams(self, count: int) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.proxy.streams", str(self.port)]
        command += [f"{self.contestant.under}{CHAT}", str(count), *self.contestant.headers]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT)
        seen: dict[str, float] = json.loads(done.stdout)
        return seen

    def is_answering(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise BenchmarkError(f"{self.contestant.name} ended with {self.process.returncode}")
        headers = dict(header.split(": ", 1) for header in self.contestant.headers)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", f"{self.contestant.under}{self.contestant.get}", headers=headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextlib.contextmanager
def on(cpus: Iterable[int]) -> Iterator[None]:
    """Pin this process, and what it starts in this block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Field:
    """The contestants that were started in `folder`. All of them end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._started)

    def begin(self, contestant: Contestant, port: int) -> Running:
        """Return once it answers. Otherwise stop it and raise `BenchmarkError` with its output."""
        log = self.folder / f"{port}.log"
        path = f"{Path(contestant.command[0]).parent}:/usr/bin:/bin"
        env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PATH": path, "HOME": str(self.folder)}
        process = spawn(contestant.command, log=log, env={**env, **contestant.env})
        running = Running(contestant, port, process)
        self._started.append(running)
        try:
            wait_until(running.is_answering, START_S, f"{contestant.name} answering on {port}")
        except BenchmarkError as error:
            self._end([running])
            raise BenchmarkError(f"{error}: {log.read_text()[-500:]}") from None
        return running

    @staticmethod
    def _end(contestants: Iterable[Running]) -> None:
        stop(
            {
                pid
                for contestant in contestants
                if contestant.process
                for pid in descendants([contestant.process.pid])
            }
        )


def _charged_s(pid: int) -> float:
    charged = 0.0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            charged += int(path.read_text().split()[0]) / 1e9
    return charged


def _line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""
