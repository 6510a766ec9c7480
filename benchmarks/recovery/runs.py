"""One run of the program under each contestant: started, looked at through its steps, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

JOB = Path(__file__).with_name("job.py")
SOURCE = str(Path(__file__).parents[2] / "src")
BIN = Path(sys.executable).parent
STEPS = 100_000
"""More than any trial lasts for."""


@dataclass(frozen=True)
class Step:
    at: float
    pid: int
    """As the rank itself sees it."""
    rank: int
    number: int


class Run:
    """A contestant's run. `steps` is what happened so far."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.folder = tempfile.TemporaryDirectory(prefix="recovery-", dir="/var/tmp")
        data = Path(self.folder.name) / "data"
        data.mkdir()
        self.trace = data / "steps"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.folder.cleanup()

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def steps(self) -> list[Step]:
        with contextlib.suppress(FileNotFoundError):
            lines = self.trace.read_text().split("\n")[:-1]
            return [Step(float(a), int(p), int(r), int(n)) for a, p, r, n in map(str.split, lines)]
        return []

    def process_of(self, pid: int) -> int:
        """The process that the rank knows under this number, which may be one of its own namespace."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.trace).encode() not in (path / "cmdline").read_bytes():
                    continue
                numbers = next(line for line in (path / "status").read_text().split("\n") if "NSpid" in line)
                if int(numbers.split()[-1]) == pid:
                    return int(path.name)
        raise ProcessLookupError(pid)


class Torchrun(Run):
    """`tuned`: with the workaround for its store, without which most restarts fail."""

    tuned = False

    def start(self) -> None:
        extra = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.tuned else {}
        command = [
            str(BIN / "torchrun"),
            "--standalone",
            f"--nproc-per-node={self.ranks}",
            "--max-restarts=100",
        ]
        self._process = subprocess.Popen(
            [*command, str(JOB), "plain", str(STEPS), str(self.trace)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **extra},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        for pid in {step.pid for step in self.steps()}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class TunedTorchrun(Torchrun):
    tuned = True


class Shoal(Run):
    """A cluster of its own on this machine: `shoal up`, `shoal run`."""

    program, in_place = "resilient", True

    def start(self) -> None:
        home, data = Path(self.folder.name), self.trace.parent
        home.chmod(0o755)
        data.chmod(0o777)  # the job's user is another one
        self._environment = {
            **os.environ,
            "SHOAL_HOME": str(home / "home"),
            "PATH": f"{BIN}:/usr/bin:/bin",
        }
        spec = {
            "name": "recovery",
            "workdir": None,
            "ranks_per_node": self.ranks,
            "resources": {"cpus": 1, "memory": "8GB"},
            "mounts": [f"{data}:{data}", f"{SOURCE}:{SOURCE}:ro", f"{JOB.parent}:{JOB.parent}:ro"],
            "run": f"python {JOB} {self.program} {STEPS} {self.trace}",
            "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
            "retry": {"max": 1000, "backoff": 0, "in_place": self.in_place},
            "time_limit": "30m",
        }
        path = home / "job.yaml"
        path.write_text(json.dumps(spec))
        self._shoal("up", "--mount-roots", f"{data},{SOURCE},{JOB.parent}")
        self._shoal("run", "-d", str(path))

    def stop(self) -> None:
        self._shoal("down", "--jobs")

    def _shoal(self, *words: str) -> None:
        done = subprocess.run(
            [str(BIN / "shoal"), *words], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"shoal {' '.join(words)}: {done.stderr or done.stdout}")


class ShoalZygote(Shoal):
    program = "plain"


class ShoalCold(Shoal):
    program, in_place = "plain", False


CONTESTANTS: dict[str, type[Run]] = {
    "Shoal, spare": Shoal,
    "Shoal, zygote": ShoalZygote,
    "Shoal, cold": ShoalCold,
    "torchrun, tuned": TunedTorchrun,
    "torchrun": Torchrun,
}
