"""A supervisor of an ordinary user: no root, no cgroups, bubblewrap where user namespaces are allowed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.runtime.replica import listeners
from shoal.wire import EndKind, ProbeSpec, TaskSpec
from tests.support.runtime.tasks import SOURCE, RunningTask, a_task_spec, pids_with, until

NOBODY = 65534
PACKAGES = str(Path(msgspec.__file__).parents[1])
SETPRIV = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
PROGRAM = "import msgspec; from shoal.runtime.confine.detect import detect; print(*detect())"


def find_python() -> tuple[list[str], str]:
    """Return an interpreter of this version that an ordinary user can run, and the confinement it can
    set up.
    """
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*SETPRIV, python]
        environment = {"PYTHONPATH": f"{SOURCE}:{PACKAGES}", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*command, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode == 0:
            return command, done.stdout.strip()
    return [], ""


if os.geteuid() != 0:
    pytest.skip(
        "only root can become another user; the other tests already run without root", allow_module_level=True
    )
COMMAND, WORDS = find_python()
if "bubblewrap" not in WORDS:
    pytest.skip(
        "an ordinary user has no Python of this version or no user namespaces", allow_module_level=True
    )


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="shoal", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def a_share(home: Path, task_spec: TaskSpec) -> RunningTask:
    task = RunningTask(home, task_spec)
    task.command = COMMAND
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return task


def run(home: Path, task_spec: TaskSpec) -> RunningTask:
    task = a_share(home, task_spec)
    task.spawn(PYTHONPATH=f"{SOURCE}:{PACKAGES}", PYTHONDONTWRITEBYTECODE="1")
    return task


def test_ordinary_user_gets_a_sandbox_and_keeps_its_uid(home: Path) -> None:
    script = "id -u; grep CapEff /proc/self/status; ls /proc | grep -c '^[0-9]'; touch x /tmp/y; touch /etc/z"
    task = run(home, a_task_spec(run=script))
    outcome = task.outcome()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 1), outcome
    uid, capabilities, count = task.texts()
    assert uid == str(NOBODY)
    assert capabilities.endswith("0" * 16)
    assert int(count) < 10
    task.close()


@pytest.mark.parametrize("confinement", [None, ("bubblewrap",), ("rlimits", "affinity"), ()])
def test_signals_survive_and_the_tree_is_gone(home: Path, confinement: tuple[str, ...] | None) -> None:
    mark = f"35.{os.getpid()}"
    script = f"setsid sleep {mark} & sleep 0.2; kill -SEGV $$"
    task = run(home, a_task_spec(run=script, ranks_per_node=2, confinement=confinement))
    outcome = task.outcome()
    assert (outcome.kind, outcome.signal) == (EndKind.SIGNALED, signal.SIGSEGV), outcome
    assert pids_with(mark) == []
    task.close()


def test_sigterm_reaches_the_rank_behind_the_sandbox(home: Path) -> None:
    task = run(
        home, a_task_spec(run="trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    )
    until(lambda: "ready" in task.texts(), describe=task.describe)
    task.processes[0].terminate()
    assert task.outcome().kind is EndKind.STOPPED
    assert task.texts() == ["ready", "saved"]
    task.close()


def test_killed_supervisor_takes_everything_with_it(home: Path) -> None:
    mark = f"36.{os.getpid()}"
    task = run(home, a_task_spec(run=f"setsid sleep {mark} & echo ready; sleep {mark}"))
    until(lambda: "ready" in task.texts(), describe=task.describe)
    task.processes[0].kill()
    until(lambda: pids_with(mark) == [])
    task.close()


def test_private_network_has_a_socket_broker_without_root(home: Path) -> None:
    server = 'import os, socket; at = socket.create_server(("127.0.0.1", int(os.environ["PORT"]))); '
    server += 'print("listens", flush=True); '
    # The server answers every client, because its supervisor's probe may come first.
    server += '[(link := at.accept()[0], link.sendall(b"hello")) for _ in iter(int, 1)]'
    task_spec = a_task_spec(run=f"exec python3 -c '{server}'", probe=ProbeSpec(has_own_network=True))
    task = run(home, task_spec)
    until(lambda: "listens" in task.texts(), describe=task.describe)
    directory = listeners.socket_folder(task_spec, str(home))
    assert directory is not None
    door = listeners.socket_path(directory)
    until(
        lambda: Path(door).exists(), describe=task.describe
    )  # the server may listen before its socket broker
    with listeners.connect_through_broker(door, 10.0) as link:
        assert link.recv(100) == b"hello"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", listeners.OWN_PORT), 5)
    task.close()
