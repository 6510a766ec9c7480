"""Replicas on a socket or in a network of their own: whoever starts data planes reaches them, nobody else."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.local_sockets import receive_socket
from shoal.runtime.replica.listeners import SocketListener, socket_folder, socket_path
from shoal.serving.table import ReplicaConfig
from shoal.wire import EndKind, ProbeSpec, TaskCredentials, TaskSpec
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, mode
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import ATTEMPT_ID, RunningTask, StartTask, a_task_spec, tasks_in, until
from tests.support.serving.data_plane_lab import request_bytes, running_lab, service

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
HIDDEN = """
import http.server, os, socket
def reached(port):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError as error:
        return type(error).__name__
    return "reached"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from inside")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("0.0.0.0", int(os.environ["PORT"])), Handler)
print("the machine from inside:", reached(int(os.environ["OUTSIDE"])), flush=True)
server.serve_forever()
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
def start() -> Iterator[StartTask]:
    """Where every user may pass: what must hold is the folder's own mode."""
    place = Path(tempfile.mkdtemp(prefix="shoal-gate-", dir="/srv"))
    place.chmod(0o755)
    with tasks_in(place / "home") as make:
        yield make
    shutil.rmtree(place)


def replica(start: StartTask, confinement: tuple[str, ...]) -> tuple[RunningTask, str]:
    """One that runs on a socket, and the path of that."""
    task_spec = a_task_spec(run=f"exec /usr/bin/python3 -c '{SERVER}'", probe=ProbeSpec(is_socket=True))
    return running(start, task_spec, confinement, "listens without a port True")


def running(
    start: StartTask, task_spec: TaskSpec, confinement: tuple[str, ...], says: str
) -> tuple[RunningTask, str]:
    """The share once it has said so, and the path of its socket or door."""
    task_spec = change_task_spec(task_spec, confinement=confinement, uid=JOB_UID)
    task = start(task_spec, TaskCredentials(replica_secret="its own key"))
    task.spawn()
    until(lambda: says in task.texts(), describe=task.describe)
    directory = socket_folder(task_spec, str(task.home))
    assert directory is not None
    return task, socket_path(directory)


def called_by(user: int, path: str) -> str:
    """How somebody fares who connects there as that user."""
    command = [sys.executable, "-c", CALL, path, str(user)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("confinement", MODES)
def test_socket_of_a_replica_is_reached_only_by_the_user_that_runs_shoal(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    task, path = replica(start, confinement)
    with SocketListener(path).connect(10.0) as link:
        assert link.recv(100) == b"its own key"
    above = Path(path).parent.stat()
    assert (above.st_uid, stat.S_IMODE(above.st_mode)) == (JOB_UID, 0o700)
    assert {called_by(user, path) for user in (STRANGER, JOB_UID + 1)} == {"PermissionError"}
    os.kill(task.processes[0].pid, signal.SIGTERM)
    assert task.outcome().kind is EndKind.STOPPED
    assert not Path(path).parent.exists()


@pytest.mark.parametrize("confinement", MODES[:1])
def test_socket_of_a_replica_is_not_there_for_another_job(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    _, path = replica(start, confinement)
    run = f"exec python3 -c '{CALL}' {path}"
    for user in (JOB_UID, JOB_UID + 1):
        other = start(
            a_task_spec(attempt_id=f"{ATTEMPT_ID}-{user}", run=run, confinement=confinement, uid=user)
        )
        assert other.run().kind is EndKind.SUCCEEDED
        assert other.texts() == ["FileNotFoundError"]


@pytest.mark.parametrize("confinement", MODES[:1])
def test_folder_of_a_socket_goes_with_a_replica_whose_supervisor_was_killed(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    task, path = replica(start, confinement)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
    task.close()
    assert not Path(path).parent.exists()


@pytest.mark.parametrize("confinement", MODES[:1])
async def test_replica_in_its_own_network_is_reached_only_through_its_socket_broker(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"OUTSIDE": str(outside.getsockname()[1])}
        setup = "exec 3<>/dev/tcp/127.0.0.1/$OUTSIDE && echo setup has the network"
        task_spec = a_task_spec(
            run=f"exec /usr/bin/python3 -c '{HIDDEN}'",
            setup=f"bash -c '{setup}'",
            env=env,
            probe=ProbeSpec(has_own_network=True, port=port),
        )
        says = "the machine from inside: ConnectionRefusedError"
        task, path = running(start, task_spec, confinement, says)
        assert "setup has the network" in task.texts("s")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    assert {called_by(user, path) for user in (STRANGER, JOB_UID)} == {"PermissionError"}
    async with running_lab() as lab:
        lab.serve(service(ReplicaConfig(replica_id="one", address=f"broker:{path}", release=1)))
        for _ in range(3):
            assert (await lab.ask(request_bytes())).body == b"from inside"
    os.kill(task.processes[0].pid, signal.SIGTERM)
    assert task.outcome().kind is EndKind.STOPPED
    assert not Path(path).parent.exists()


@pytest.mark.parametrize("confinement", MODES[1:])
def test_replica_that_cannot_have_a_network_of_its_own_is_not_started(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    task_spec = a_task_spec(probe=ProbeSpec(has_own_network=True), confinement=confinement, uid=JOB_UID)
    outcome = start(task_spec).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "a network of its own needs bubblewrap" in outcome.message


@pytest.mark.parametrize("reply", ["file", "datagram", "nothing", "port"])
def test_broken_socket_broker_counts_as_closed(reply: str) -> None:
    here, there = socket.socketpair()
    kind = socket.SOCK_DGRAM if reply == "datagram" else socket.SOCK_STREAM
    with here, there, socket.socket(socket.AF_INET, kind) as fresh, tempfile.TemporaryFile() as file:
        descriptor = file.fileno() if reply == "file" else fresh.fileno()
        port = b"70000" if reply == "port" else b"8000"
        socket.send_fds(there, [port], [] if reply == "nothing" else [descriptor])
        with pytest.raises(OSError, match=r"the socket broker sent|Socket operation on non-socket"):
            receive_socket(here)
