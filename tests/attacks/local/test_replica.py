"""A server that listens on a socket of its own: whoever starts data planes reaches it, and nobody else."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.runtime.listening import OnSocket, folder, path_in
from shoal.wire import Credentials, EndKind, Probe
from tests.support.confinements import CGROUP, JOB_UID, mode
from tests.support.shares import ATTEMPT_ID, RunningShare, Start, an_order, shares_in, until

SERVER = """
import os, socket
with socket.socket(socket.AF_UNIX) as server:
    server.bind(os.environ["SHOAL_SOCKET"])
    os.chmod(os.environ["SHOAL_SOCKET"], 0o666)  # as uvicorn does
    server.listen()
    print("listens without a port", "PORT" not in os.environ, flush=True)
    while True:
        link = server.accept()[0]
        link.sendall(os.environ["SHOAL_REPLICA_KEY"].encode())
        link.close()
"""
CALL = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
try:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(sys.argv[1])
        print("answered", link.recv(100))
except OSError as error:
    print(type(error).__name__)
"""
STRANGER = 65534
MODES = [mode(CGROUP, "bubblewrap", "uid"), mode("uid")]
pytestmark = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="takes a Python for everybody")


@pytest.fixture
def start() -> Iterator[Start]:
    """Where every user may pass: what must hold is the folder's own mode."""
    place = Path(tempfile.mkdtemp(prefix="shoal-gate-", dir="/srv"))
    place.chmod(0o755)
    with shares_in(place / "home") as make:
        yield make
    shutil.rmtree(place)


def replica(start: Start, confinement: tuple[str, ...]) -> tuple[RunningShare, str]:
    """One that runs, and the path of its socket."""
    order = an_order(
        run=f"exec /usr/bin/python3 -c '{SERVER}'",
        probe=Probe(is_socket=True),
        confinement=confinement,
        uid=JOB_UID,
    )
    share = start(order, Credentials(replica_secret="its own key"))
    share.spawn()
    until(lambda: "listens without a port True" in share.texts(), describe=share.describe)
    directory = folder(order, str(share.home))
    assert directory is not None
    return share, path_in(directory)


@pytest.mark.parametrize("confinement", MODES)
def test_socket_of_a_replica_is_reached_by_whoever_runs_shoal_and_by_no_other_user(
    start: Start, confinement: tuple[str, ...]
) -> None:
    share, path = replica(start, confinement)
    with OnSocket(path).connect(10.0) as link:
        assert link.recv(100) == b"its own key"
    above = Path(path).parent.stat()
    assert (above.st_uid, stat.S_IMODE(above.st_mode)) == (JOB_UID, 0o700)
    for user in (STRANGER, JOB_UID + 1):
        told = subprocess.run(
            [sys.executable, "-c", CALL, path, str(user)], capture_output=True, text=True, check=True
        )
        assert told.stdout.strip() == "PermissionError"
    os.kill(share.processes[0].pid, 15)
    assert share.outcome().kind is EndKind.STOPPED
    assert not Path(path).parent.exists()


@pytest.mark.parametrize("confinement", MODES[:1])
def test_socket_of_a_replica_is_not_there_for_another_job(start: Start, confinement: tuple[str, ...]) -> None:
    _, path = replica(start, confinement)
    run = f"exec python3 -c '{CALL}' {path}"
    for user in (JOB_UID, JOB_UID + 1):
        other = start(an_order(attempt_id=f"{ATTEMPT_ID}-{user}", run=run, confinement=confinement, uid=user))
        assert other.run().kind is EndKind.SUCCEEDED
        assert other.texts() == ["FileNotFoundError"]


@pytest.mark.parametrize("confinement", MODES[:1])
def test_folder_of_a_socket_goes_with_a_replica_whose_supervisor_was_killed(
    start: Start, confinement: tuple[str, ...]
) -> None:
    share, path = replica(start, confinement)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
    share.close()
    assert not Path(path).parent.exists()
