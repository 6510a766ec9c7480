"""Make a share on disk and run a real supervisor on it, as an engine would.

A control plane that does nothing but take renewals.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

import shoal
from shoal.proof import prove
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import Renewal, RenewalReply, TaskCredentials, TaskOutcome, TaskSpec
from tests.support.host.processes import pause_s
from tests.support.runtime.task_specs import task_spec_of

SOURCE = str(Path(shoal.__file__).parents[1])
ATTEMPT_ID = f"att_{uuid.uuid4().hex}"
"""Of this process alone: what is left of a share is found by its attempt, whoever runs the other tests."""
NODE_PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def a_task_spec(**changes: object) -> TaskSpec:
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
        "cpus": 1.0,
        "grace_s": 5.0,
    }
    return task_spec_of(**{**values, **changes})


def a_claim(task: spool.SpoolTask, **changes: object) -> spool.Claim:
    """Of another process than the one that will be looked for, made in the share's own directory."""
    facts = os.stat(task.directory)  # noqa: PTH116 - the spool names its files by strings
    values = {"boot_id": spool.boot_id(), "start_ticks": 1, "at": 0.0}
    return spool.Claim(**{**values, "device": facts.st_dev, "inode": facts.st_ino, **changes})  # type: ignore[arg-type]


class RunningTask:
    """A share with its supervisor's process; leaves nothing behind when closed."""

    def __init__(self, home: Path, task_spec: TaskSpec, credentials: TaskCredentials | None = None) -> None:
        self.home = home
        self.task_spec = task_spec
        self.credentials = credentials or TaskCredentials()
        self.directory = home / "spool" / "live" / task_spec.identity.attempt_id / task_spec.identity.node
        self.directory.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
        self.task = spool.SpoolTask(self.directory)
        spool.write_task_spec(self.task, task_spec)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command = [sys.executable]
        """What runs Python; a test may put another user in front."""

    def spawn(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start one supervisor, which may find that there is nothing for it to do."""
        with Path(self.task.errors).open("ab") as errors:
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

    def outcome(self, timeout_s: float = 30.0) -> TaskOutcome:
        """Wait for the outcome."""
        until(lambda: spool.read_outcome(self.task) is not None, timeout_s, self.describe)
        outcome = spool.read_outcome(self.task)
        assert outcome is not None
        return outcome

    def run(self, **environment: str) -> TaskOutcome:
        """Spawn and wait for the end."""
        process = self.spawn(**environment)
        result = self.outcome()
        process.wait(30)
        return result

    def log(self) -> list[tuple[str, str, str]]:
        """(rank, stream, text) of every line so far."""
        with contextlib.suppress(FileNotFoundError):
            data = Path(self.task.log).read_bytes().decode("utf-8", "replace")
            return [tuple(line.split(" ", 3)[1:]) for line in data.split("\n")[:-1]]  # type: ignore[misc]
        return []

    def texts(self, stream: str = "o") -> list[str]:
        return [text for _, letter, text in self.log() if letter == stream]

    def describe(self) -> str:
        """What there is to see when a wait was in vain."""
        errors = Path(self.task.errors).read_text()
        files = sorted(path.name for path in self.directory.iterdir())
        return f"files {files}, log {self.log()[-10:]}, errors {errors}"

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(10)
        assert spool.kill_leftovers(self.directory, self.task_spec)


def stop_all_processes(
    task: RunningTask, process: subprocess.Popen[bytes], gap_s: float = 0.1
) -> TaskOutcome:
    """All of it, as by Slurm without control groups, or by systemd: the supervisor last."""
    for pid in tree.descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    time.sleep(gap_s)
    process.send_signal(signal.SIGTERM)
    return task.outcome()


StartTask = Callable[..., RunningTask]
"""Takes an order and perhaps credentials; the share is not spawned yet."""


@contextlib.contextmanager
def tasks_in(home: Path) -> Iterator[StartTask]:
    """Make shares below one SHOAL_HOME; afterwards nothing of them runs."""
    created: list[RunningTask] = []

    def make(order: TaskSpec, credentials: TaskCredentials | None = None) -> RunningTask:
        created.append(RunningTask(home, order, credentials))
        return created[-1]

    try:
        yield make
    finally:
        for share in created:
            share.close()


def until(condition: Callable[[], bool], timeout_s: float = 20.0, describe: Callable[[], str] = str) -> None:
    """Poll until it holds; fail with what there is to see."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() < since + timeout_s, f"not within {timeout_s} s: {describe()}"
        time.sleep(pause_s(since))


def pids_with(text: str) -> list[int]:
    """Living processes whose command line holds this text."""
    result = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and text.encode() in (path / "cmdline").read_bytes():
                result.append(int(path.name))
    return result


def open_files() -> list[str]:
    """What this process has open, as the kernel names it."""
    result = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            result.append(str(link.readlink()))
    return result


TASK_CREDENTIALS = TaskCredentials(proof_key="known to both")


def proven_reply(body: dict[str, Any], **fields: Any) -> tuple[int, dict[str, Any]]:
    """What the true control plane answers to this renewal."""
    result = prove(TASK_CREDENTIALS.proof_key, msgspec.convert(body, Renewal), RenewalReply(**fields))
    return 200, msgspec.to_builtins(result)


class RenewalServer:
    """Answers renewals as `answer` says and remembers them."""

    def __init__(self) -> None:
        self.renewals: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.reply: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]] = proven_reply
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                plane.renewals.append({**body, "path": self.path})
                plane.tokens.append(self.headers["Authorization"])
                status, answer = plane.reply(body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def phases(self) -> list[str]:
        return [renewal["phase"] for renewal in self.renewals]

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
