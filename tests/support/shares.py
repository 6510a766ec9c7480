"""Make a share on disk and run a real supervisor on it, as an engine would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal.runtime import spool, tree
from shoal.wire import Credentials, Limits, NodeOutcome, Order
from tests.support.patience import pause_s

SOURCE = str(Path(spool.__file__).parents[2])
ATTEMPT_ID = f"att_{uuid.uuid4().hex}"
"""Of this process alone: what is left of a share is found by its attempt, whoever runs the other tests."""
NODE_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def an_order(**changes: object) -> Order:
    """A small order for one rank that says hello."""
    values: dict[str, object] = {
        "attempt_id": ATTEMPT_ID,
        "epoch": 1,
        "job_id": "job_0001",
        "job_number": 7,
        "job_name": "hello",
        "project": "demo",
        "node": "node-1",
        "node_rank": 0,
        "nodes": ("node-1",),
        "ranks_per_node": 1,
        "run": "echo hello",
        "limits": Limits(cpus=1.0),
        "grace_s": 5.0,
    }
    return Order(**{**values, **changes})  # type: ignore[arg-type]


def a_claim(share: spool.Share, **changes: object) -> spool.Claim:
    """Of another process than the one that will be looked for, made in the share's own directory."""
    facts = os.stat(share.directory)  # noqa: PTH116 - the spool names its files by strings
    values = {"boot_id": spool.boot_id(), "start_ticks": 1, "at": 0.0}
    return spool.Claim(**{**values, "device": facts.st_dev, "inode": facts.st_ino, **changes})  # type: ignore[arg-type]


class RunningShare:
    """A share with its supervisor's process; leaves nothing behind when closed."""

    def __init__(self, home: Path, order: Order, credentials: Credentials | None = None) -> None:
        self.home = home
        self.order = order
        self.credentials = credentials or Credentials()
        self.directory = home / "spool" / "live" / order.attempt_id / order.node
        self.directory.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
        self.share = spool.Share(self.directory)
        spool.write_order(self.share, order)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command = [sys.executable]
        """What runs Python; a test may put another user in front."""

    def spawn(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start one supervisor, which may find that there is nothing for it to do."""
        with Path(self.share.errors).open("ab") as errors:
            process = subprocess.Popen(
                [*self.command, "-m", "shoal.runtime.supervisor", str(self.directory)],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                cwd="/",
                env={"PYTHONPATH": SOURCE, "SHOAL_PATH": NODE_PATH, "PATH": "/usr/bin:/bin", **environment},
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self.credentials))
        process.stdin.close()
        self.processes.append(process)
        return process

    def outcome(self, timeout_s: float = 30.0) -> NodeOutcome:
        """Wait for the outcome."""
        until(lambda: spool.read_outcome(self.share) is not None, timeout_s, self.describe)
        found = spool.read_outcome(self.share)
        assert found is not None
        return found

    def run(self, **environment: str) -> NodeOutcome:
        """Spawn and wait for the end."""
        process = self.spawn(**environment)
        found = self.outcome()
        process.wait(30)
        return found

    def log(self) -> list[tuple[str, str, str]]:
        """(rank, stream, text) of every line so far."""
        with contextlib.suppress(FileNotFoundError):
            data = Path(self.share.log).read_bytes().decode("utf-8", "replace")
            return [tuple(line.split(" ", 3)[1:]) for line in data.split("\n")[:-1]]  # type: ignore[misc]
        return []

    def texts(self, stream: str = "o") -> list[str]:
        return [text for _, letter, text in self.log() if letter == stream]

    def describe(self) -> str:
        """What there is to see when a wait was in vain."""
        errors = Path(self.share.errors).read_text()
        files = sorted(path.name for path in self.directory.iterdir())
        return f"files {files}, log {self.log()[-10:]}, errors {errors}"

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(10)
        assert spool.kill_leftovers(self.directory, self.order)


def told_to_end(share: RunningShare, process: subprocess.Popen[bytes], gap_s: float = 0.1) -> NodeOutcome:
    """All of it, as by Slurm without control groups, or by systemd: the supervisor last."""
    for pid in tree.descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    time.sleep(gap_s)
    process.send_signal(signal.SIGTERM)
    return share.outcome()


Start = Callable[..., RunningShare]
"""Takes an order and perhaps credentials; the share is not spawned yet."""


@contextlib.contextmanager
def shares_in(home: Path) -> Iterator[Start]:
    """Make shares below one SHOAL_HOME; afterwards nothing of them runs."""
    made: list[RunningShare] = []

    def make(order: Order, credentials: Credentials | None = None) -> RunningShare:
        made.append(RunningShare(home, order, credentials))
        return made[-1]

    try:
        yield make
    finally:
        for share in made:
            share.close()


def until(condition: Callable[[], bool], timeout_s: float = 20.0, describe: Callable[[], str] = str) -> None:
    """Poll until it holds; fail with what there is to see."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() < since + timeout_s, f"not within {timeout_s} s: {describe()}"
        time.sleep(pause_s(since))


def processes_with(text: str) -> list[int]:
    """Living processes whose command line holds this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and text.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def open_files() -> list[str]:
    """What this process has open, as the kernel names it."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found
