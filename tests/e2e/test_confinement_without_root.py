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

from shoal.runtime import listening
from shoal.wire import EndKind, Order, Probe
from tests.support.shares import SOURCE, RunningShare, an_order, processes_with, until

NOBODY = 65534
PACKAGES = str(Path(msgspec.__file__).parents[1])
SETPRIV = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
PROGRAM = "import msgspec; from shoal.runtime.confine.detect import detect; print(*detect())"


def find_python() -> tuple[list[str], str]:
    """An interpreter of this version that an ordinary user can run, and what it can confine with."""
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
    made = Path(tempfile.mkdtemp(prefix="shoal", dir="/var/tmp"))
    yield made
    shutil.rmtree(made)


def a_share(home: Path, order: Order) -> RunningShare:
    share = RunningShare(home, order)
    share.command = COMMAND
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return share


def run(home: Path, order: Order) -> RunningShare:
    share = a_share(home, order)
    share.spawn(PYTHONPATH=f"{SOURCE}:{PACKAGES}", PYTHONDONTWRITEBYTECODE="1")
    return share


def test_ordinary_user_gets_a_sandbox_and_stays_itself(home: Path) -> None:
    script = "id -u; grep CapEff /proc/self/status; ls /proc | grep -c '^[0-9]'; touch x /tmp/y; touch /etc/z"
    share = run(home, an_order(run=script))
    outcome = share.outcome()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 1), outcome
    uid, capabilities, count = share.texts()
    assert uid == str(NOBODY)
    assert capabilities.endswith("0" * 16)
    assert int(count) < 10
    share.close()


@pytest.mark.parametrize("confinement", [None, ("bubblewrap",), ("rlimits", "affinity"), ()])
def test_signals_survive_and_the_tree_is_gone(home: Path, confinement: tuple[str, ...] | None) -> None:
    mark = f"35.{os.getpid()}"
    script = f"setsid sleep {mark} & sleep 0.2; kill -SEGV $$"
    share = run(home, an_order(run=script, ranks_per_node=2, confinement=confinement))
    outcome = share.outcome()
    assert (outcome.kind, outcome.signal) == (EndKind.SIGNALED, signal.SIGSEGV), outcome
    assert processes_with(mark) == []
    share.close()


def test_sigterm_reaches_the_rank_behind_the_sandbox(home: Path) -> None:
    share = run(
        home, an_order(run="trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    )
    until(lambda: "ready" in share.texts(), describe=share.describe)
    share.processes[0].terminate()
    assert share.outcome().kind is EndKind.STOPPED
    assert share.texts() == ["ready", "saved"]
    share.close()


def test_killed_supervisor_takes_everything_with_it(home: Path) -> None:
    mark = f"36.{os.getpid()}"
    share = run(home, an_order(run=f"setsid sleep {mark} & echo ready; sleep {mark}"))
    until(lambda: "ready" in share.texts(), describe=share.describe)
    share.processes[0].kill()
    until(lambda: processes_with(mark) == [])
    share.close()


def test_network_of_its_own_has_a_door_without_root_too(home: Path) -> None:
    server = 'import os, socket; at = socket.create_server(("127.0.0.1", int(os.environ["PORT"]))); '
    server += 'print("listens", flush=True); '
    # To everybody, and nobody is hung up on: its supervisor's probe may come first.
    server += '[(link := at.accept()[0], link.sendall(b"hello")) for _ in iter(int, 1)]'
    order = an_order(run=f"exec python3 -c '{server}'", probe=Probe(has_own_network=True))
    share = run(home, order)
    until(lambda: "listens" in share.texts(), describe=share.describe)
    directory = listening.folder(order, str(home))
    assert directory is not None
    door = listening.path_in(directory)
    until(lambda: Path(door).exists(), describe=share.describe)  # who listens may be before its door
    with listening.through(door, 10.0) as link:
        assert link.recv(100) == b"hello"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", listening.OWN_PORT), 5)
    share.close()
