"""One run of the program under each contestant: start it, read its steps, and always end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from shoal.runtime.process.network import free_port

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "src")
BIN = Path(sys.executable).parent
STEPS = 100_000
"""More than any trial takes."""
ASK_EVERY_S = 5.0
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer("127.0.0.1:0", 1, 100, 100, int(sys.argv[1]))
print(server.address(), flush=True)
time.sleep(3600)
"""


@dataclass(frozen=True)
class Step:
    at: float
    pid: int
    """The pid as the rank itself sees it."""
    born: int
    rank: int
    number: int


class Run:
    """A contestant's run. `steps` is what happened until now."""

    def __init__(self, ranks: int, nodes: int = 1) -> None:
        self.ranks, self.nodes = ranks, nodes
        self.folder = tempfile.TemporaryDirectory(prefix="recovery-", dir="/var/tmp")
        data = Path(self.folder.name) / "data"
        data.mkdir()
        self.trace = data / "steps"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for pid in self.processes():  # torchrun's workers outlive a torchrun that is killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.folder.cleanup()

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def steps(self) -> list[Step]:
        with contextlib.suppress(FileNotFoundError):
            lines = self.trace.read_text().split("\n")[:-1]
            return [Step(float(at), *map(int, rest)) for at, *rest in map(str.split, lines)]
        return []

    def how_it_ended(self) -> str:
        """Why no process of it runs, in the contestant's words; empty while it may run."""
        return ""

    def node_of(self, pid: int) -> list[int]:
        """The processes that die with the node of this rank, first the one that manages the others."""
        raise NotImplementedError

    def process_of(self, pid: int) -> int:
        """The process that the rank knows under this pid, which may be a pid of its own namespace."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process}/status").read_text()
                numbers = next(line for line in status.split("\n") if "NSpid" in line)
                if int(numbers.split()[-1]) == pid:
                    return process
        raise ProcessLookupError(pid)

    def processes(self) -> Iterator[int]:
        """All processes that have this run's file on their command line."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.trace).encode() in (path / "cmdline").read_bytes():
                    yield int(path.name)


class Torchrun(Run):
    """`settings` and `variables`: what an experienced user would give it."""

    settings: tuple[str, ...] = ()
    variables: ClassVar[dict[str, str]] = {}

    def start(self) -> None:
        port = free_port("127.0.0.1", 0)
        self._agents = [self._agent(port) for _ in range(self.nodes)]

    def _agent(self, port: int) -> subprocess.Popen[bytes]:
        command = [
            str(BIN / "torchrun"),
            f"--nnodes=1:{self.nodes}",
            f"--nproc-per-node={self.ranks // self.nodes}",
            "--max-restarts=100",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            *self.settings,
        ]
        return subprocess.Popen(
            [*command, str(JOB), "plain", str(STEPS), str(self.trace)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def node_of(self, pid: int) -> list[int]:
        agent = _parent(pid)
        workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return [agent, *map(int, workers)]

    def stop(self) -> None:
        for agent in self._agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


class TunedTorchrun(Torchrun):
    """With the workaround for its store, without which most restarts fail, and quick to notice a missing
    node.
    """

    settings = ("--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",)
    variables: ClassVar[dict[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchft(Run):
    """A loop restarts a replica as soon as it is gone. The lighthouse reports losses."""

    _loops: list[subprocess.Popen[bytes]]
    _lighthouse: subprocess.Popen[str]
    heartbeat_ms = 1000
    """Its default is 5000; with that, survivors stand still for as long."""

    def start(self) -> None:
        command = [sys.executable, "-c", LIGHTHOUSE, str(self.heartbeat_ms)]
        self._lighthouse = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._lighthouse.stdout is not None
        address = self._lighthouse.stdout.readline().strip()
        self._loops = [self._loop(rank, address) for rank in range(self.ranks)]

    def _loop(self, rank: int, address: str) -> subprocess.Popen[bytes]:
        program = JOB.with_name("torchft_job.py")
        once = f"{sys.executable} {program} {STEPS} {self.trace}"
        return subprocess.Popen(
            ["/bin/sh", "-c", f"while sleep 0.05; do {once}; done"],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "TORCHFT_LIGHTHOUSE": address,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        for pid in [loop.pid for loop in self._loops] + [self._lighthouse.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


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
            "ranks_per_node": self.ranks // self.nodes,
            "resources": {"nodes": self.nodes, "cpus": 2 // self.nodes, "memory": "8GB"},
            "mounts": [f"{data}:{data}", f"{SOURCE}:{SOURCE}:ro", f"{JOB.parent}:{JOB.parent}:ro"],
            "run": f"python {JOB} {self.program} {STEPS} {self.trace}",
            "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
            "retry": {"max": 1000, "backoff": 0, "in_place": self.in_place},
            "time_limit": "30m",
        }
        path = home / "job.yaml"
        path.write_text(json.dumps(spec))
        simulated = () if self.nodes == 1 else ("--demo", f"{self.nodes}x1")
        self._shoal("up", *simulated, "--mount-roots", f"{data},{SOURCE},{JOB.parent}")
        self._shoal("run", "-d", str(path))
        self._ask_at = time.monotonic() + ASK_EVERY_S

    def how_it_ended(self) -> str:
        if time.monotonic() < self._ask_at:
            return ""
        self._ask_at = time.monotonic() + ASK_EVERY_S
        (job,) = json.loads(self._shoal("queue", "--all", "--json"))
        return "" if job["ended_at"] is None else str(job["because"])

    def node_of(self, pid: int) -> list[int]:
        """The supervisor: the kernel ends its ranks with it."""
        while "shoal.runtime.supervisor" not in Path(f"/proc/{pid}/cmdline").read_text():
            pid = _parent(pid)
        return [pid]

    def stop(self) -> None:
        self._shoal("down", "--jobs")

    def _shoal(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "shoal"), *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"shoal {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout


class ShoalZygote(Shoal):
    program = "plain"


class ShoalCold(Shoal):
    program, in_place = "plain", False


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


TORCHFT = "torchft, heartbeat 1 s"
CONTESTANTS: dict[str, type[Run]] = {
    "Shoal, spare": Shoal,
    "Shoal, zygote": ShoalZygote,
    "Shoal, cold": ShoalCold,
    "torchrun, tuned": TunedTorchrun,
    "torchrun": Torchrun,
    TORCHFT: Torchft,
}
