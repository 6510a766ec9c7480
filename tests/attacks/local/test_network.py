"""Programs of one project connect to those of another: refused, unless the other's owner opened its ports."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.runtime.confine import firewall
from shoal.runtime.replica.probe import PROTECT_EVERY_S
from shoal.wire import EndKind, ProbeSpec, TaskSpec
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, needs
from tests.support.runtime.tasks import RunningTask, StartTask, a_task_spec, tasks_in, until

pytestmark = [
    needs("uid", "nftables"),
    pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="takes a Python for everybody"),
]
WALLS = (CGROUP, "bubblewrap", "uid", "nftables")
OTHER_UID = JOB_UID + 1
NOBODY_UID = 65_534
SERVER = """
import os, socket
family = socket.AF_INET6 if os.environ["HOST"] == "::1" else socket.AF_INET
server = socket.create_server((os.environ["HOST"], int(os.environ.get("PORT", "0"))), family=family)
print("port", server.getsockname()[1], flush=True)
while True:
    link = server.accept()[0]
    link.sendall(b"hello")
    link.close()
"""
CLIENT = """
import socket, sys
try:
    link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
    print("answered" if link.recv(5) == b"hello" else "cut off")
except OSError as error:
    print(type(error).__name__)
"""


ALONE_ON_A_NODE = """
import socket, subprocess, sys, threading
from shoal.runtime.confine import firewall
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
def serve():
    while True:
        link = server.accept()[0]
        link.sendall(b"hello")
        link.close()
threading.Thread(target=serve, daemon=True).start()
def asked(*who):
    words = [*who, "/usr/bin/python3", "-c", sys.argv[1], "127.0.0.1", str(port)]
    return subprocess.run(words, capture_output=True, text=True).stdout
other = ("setpriv", f"--reuid={sys.argv[2]}", "--clear-groups")
for _ in range(2):
    firewall.protect(port, 0)
print(asked(*other), asked())
for _ in range(2):
    firewall.release(port, 0)
print(asked(*other))
"""
STRANGER_AT_A_PORT = """
import os, socket, subprocess, sys, time
from shoal.runtime.confine import firewall
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
project, stranger = int(sys.argv[1]), int(sys.argv[2])
os.seteuid(stranger)  # the kernel takes the user of a socket from the process that makes it
server = socket.create_server(("127.0.0.1", 0))
os.seteuid(0)
port = server.getsockname()[1]
def asked(port=port):
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
        return "answered"
    except OSError as error:
        return type(error).__name__
for is_open in (False, True):
    firewall.protect(port, project, is_open=is_open)
    print(asked())
firewall.LINGER_S = 5  # a busy machine may need a second for the next line
firewall.release(port, project)
print(asked())
firewall.protect(port, stranger)
print(asked())
firewall.release(port, stranger)
until = time.monotonic() + 30
while f" {port} " in subprocess.check_output([firewall.find_nft(), "list", "ruleset"], text=True):
    assert time.monotonic() < until
print(asked())
daemon = socket.create_server(("127.0.0.1", 0))
firewall.protect(daemon.getsockname()[1], project)
print(asked(daemon.getsockname()[1]))
"""
SERVERS_AT_A_NAMED_PORT = """
import os, socket, subprocess, sys
from shoal.runtime.confine import firewall
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
project, tenant, person = map(int, sys.argv[2:])
port = 25432
firewall.protect(port, project, is_named=True)
for server in (person, tenant, project):
    os.seteuid(server)  # the kernel takes the user of a socket from the process that makes it
    link = socket.create_server(("127.0.0.1", port))
    os.seteuid(0)
    for uid in (0, person + 1):
        words = ["/usr/bin/python3", "-c", sys.argv[1], str(port), "5"]
        print(subprocess.check_output(words, text=True, user=uid, group=uid, extra_groups=[]).strip())
    link.close()
"""
ASK = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), float(sys.argv[2])).close()
    print("answered")
except OSError as error:
    print(type(error).__name__)
"""
TENANT_AT_SHOALS_PORT = """
import os, socket, subprocess, sys, time
from shoal.runtime.confine import firewall
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
other = subprocess.Popen(["unshare", "--net", "sleep", "100"])
here = os.readlink("/proc/self/ns/net")
while os.readlink(f"/proc/{other.pid}/ns/net") == here:
    time.sleep(0.01)
inside = ["nsenter", "-t", str(other.pid), "-n"]
for command in (
    ["ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(other.pid)],
    ["ip", "address", "add", "10.88.0.1/24", "dev", "v0"],
    ["ip", "link", "set", "v0", "up"],
    [*inside, "ip", "address", "add", "10.88.0.2/24", "dev", "v1"],
    [*inside, "ip", "link", "set", "v1", "up"],
):
    subprocess.run(command, check=True)
ASK = '''
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
    print("answered")
except OSError as error:
    print(type(error).__name__)
'''
def asked(host, timeout_s, *way):
    words = [*way, "/usr/bin/python3", "-c", ASK, host, str(port), str(timeout_s)]
    return subprocess.check_output(words, text=True).strip()
def server(uid):
    os.seteuid(uid)  # the kernel takes the user of a socket from the process that makes it
    try:
        return socket.create_server(("0.0.0.0", port))
    finally:
        os.seteuid(0)
port = 0
with server(0) as free:
    port = free.getsockname()[1]
with server(int(sys.argv[1])):
    print(asked("127.0.0.1", 20), asked("10.88.0.1", 20, *inside))
    firewall.hold({port})
    print(asked("127.0.0.1", 1), asked("10.88.0.1", 1, *inside))
for uid in (0, int(sys.argv[2])):
    with server(uid):
        print(asked("127.0.0.1", 20), asked("10.88.0.1", 20, *inside))
other.kill()
"""
FROM_PORTS = """
import socket, sys
answers = []
for port in range(int(sys.argv[3]), int(sys.argv[3]) + int(sys.argv[4])):
    link = socket.socket()
    link.settimeout(20)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    link.bind(("127.0.0.1", port))
    try:
        link.connect((sys.argv[1], int(sys.argv[2])))
        answers.append("answered" if link.recv(5) == b"hello" and not link.recv(1) else "cut off")
    except OSError as error:
        answers.append(type(error).__name__)
    link.close()
print(*sorted(set(answers)))
"""


def python(code: str, *arguments: object) -> str:
    return shlex.join(["/usr/bin/python3", "-c", code, *map(str, arguments)])


def a_server(start: StartTask, host: str = "127.0.0.1", **changes: object) -> tuple[RunningTask, int]:
    task_spec = a_task_spec(
        run=f"exec {python(SERVER)}", env={"HOST": host}, uid=JOB_UID, confinement=WALLS, **changes
    )
    task = start(task_spec)
    task.spawn()
    until(lambda: any(text.startswith("port ") for text in task.texts()), 30.0, task.describe)
    return task, int(task.texts()[-1].split()[1])


def asked_by_a_job(start: StartTask, uid: int, host: str, port: int) -> str:
    name = f"att_{uid}_{port}"
    task_spec: TaskSpec = a_task_spec(
        attempt_id=name, run=python(CLIENT, host, port), uid=uid, confinement=WALLS, project="other"
    )
    task = start(task_spec)
    assert task.run().kind is EndKind.SUCCEEDED, task.describe()
    return task.texts()[-1]


def asked_by_us(host: str, port: int) -> str:
    return subprocess.check_output([sys.executable, "-c", CLIENT, host, str(port)], text=True).strip()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartTask]:
    with tasks_in(tmp_path / "home") as make:
        yield make


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_server_is_reached_by_its_own_project_and_by_no_other(start: StartTask, host: str) -> None:
    _, port = a_server(start, host)
    assert asked_by_a_job(start, OTHER_UID, host, port) == "ConnectionRefusedError"
    assert asked_by_a_job(start, JOB_UID, host, port) == "answered"
    assert asked_by_us(host, port) == "answered"


def as_user(uid: int, server: int, first: int) -> str:
    command = ["/usr/bin/python3", "-c", FROM_PORTS, "127.0.0.1", str(server), str(first), "20"]
    return subprocess.check_output(command, text=True, user=uid, group=uid, extra_groups=[]).strip()


def test_another_project_does_not_pass_from_a_port_that_the_own_one_has_just_asked_from(
    start: StartTask,
) -> None:
    _, port = a_server(start)
    firewall.close(OTHER_UID)
    assert as_user(JOB_UID, port, 21_000) == "answered"
    assert as_user(OTHER_UID, port, 21_000) == "ConnectionRefusedError"


def test_calls_refused_to_another_project_do_not_block_callers_of_a_server(
    start: StartTask,
) -> None:
    _, port = a_server(start)
    firewall.close(OTHER_UID)
    assert as_user(OTHER_UID, port, 22_000) == "ConnectionRefusedError"
    assert as_user(JOB_UID, port, 22_000) == "answered"
    assert as_user(OTHER_UID, port, 23_000) == "ConnectionRefusedError"
    assert as_user(NOBODY_UID, port, 23_000) == "answered"


def test_server_whose_owner_opened_its_ports_is_reached_by_every_project(start: StartTask) -> None:
    _, port = a_server(start, has_open_network=True)
    assert asked_by_a_job(start, OTHER_UID, "127.0.0.1", port) == "answered"


def test_running_replica_is_reached_only_by_shoal(start: StartTask) -> None:
    replica, port = a_server(start, probe=ProbeSpec(interval_s=0.1))
    assert asked_by_a_job(start, JOB_UID, "127.0.0.1", port) == "ConnectionRefusedError"
    assert asked_by_a_job(start, OTHER_UID, "127.0.0.1", port) == "ConnectionRefusedError"
    assert asked_by_us("127.0.0.1", port) == "answered"
    assert str(port) in protected()
    replica.processes[0].terminate()
    replica.outcome()
    until(lambda: str(port) not in protected(), 30.0, protected)


def test_replica_whose_owner_opened_its_port_is_reached_by_its_project(start: StartTask) -> None:
    _, port = a_server(start, probe=ProbeSpec(interval_s=0.1), has_open_network=True)
    assert asked_by_a_job(start, JOB_UID, "127.0.0.1", port) == "answered"


def test_port_is_protected_on_a_node_where_no_project_has_a_user_of_its_own() -> None:
    """A node of Slurm or Ray: all jobs are one user's, so nothing was closed between projects before."""
    output = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", ALONE_ON_A_NODE, CLIENT, str(NOBODY_UID)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert output.stdout.split() == ["ConnectionRefusedError", "answered", "answered"]


def test_only_the_replicas_project_and_shoals_own_daemons_answer_at_its_port() -> None:
    """Until the server listens, whoever binds the port with SO_REUSEADDR would get its callers' requests."""
    output = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", STRANGER_AT_A_PORT, str(JOB_UID), str(OTHER_UID)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert output.stdout.split() == ["TimeoutError"] * 3 + ["answered"] * 3


def test_person_may_have_the_port_that_a_service_named() -> None:
    """A member names any number. A database that starts there later answers, and no other project does."""
    uids = map(str, (FIRST_PROJECT_UID, FIRST_PROJECT_UID + 1, NOBODY_UID - 2))
    output = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", SERVERS_AT_A_NAMED_PORT, ASK, *uids],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    persons, tenants, replicas = (
        ["answered"] * 2,
        ["TimeoutError"] * 2,
        ["answered", "ConnectionRefusedError"],
    )
    assert output.stdout.split() == [*persons, *tenants, *replicas]


def test_no_project_answers_at_shoals_own_port_to_callers_on_other_machines_neither() -> None:
    """A job binds the port when its daemon ends, and callers would send their tokens there."""
    output = subprocess.run(
        [
            "unshare",
            "--net",
            sys.executable,
            "-c",
            TENANT_AT_SHOALS_PORT,
            str(FIRST_PROJECT_UID),
            str(NOBODY_UID),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert output.stdout.split() == ["answered"] * 2 + ["TimeoutError"] * 2 + ["answered"] * 4


def test_protection_of_a_port_is_renewed_long_before_it_ends() -> None:
    assert PROTECT_EVERY_S * 4 < firewall.PORT_S


def protected() -> str:
    program = firewall.find_nft()
    assert program is not None
    return subprocess.check_output(
        [program, "list", "set", *firewall.TABLE.split(), "replica_ports"], text=True
    )


FROM_PORT = """
import socket, sys
link = socket.socket()
link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
try:
    link.bind(("127.0.0.1", int(sys.argv[2])))
    link.settimeout(20)
    link.connect(("127.0.0.1", int(sys.argv[1])))
    print("answered" if link.recv(5) == b"hello" else "cut off")
except OSError as error:
    print(type(error).__name__)
"""


def asked_from(source: int, uid: int, port: int) -> str:
    """Quicker than a job: what counts is the user."""
    if uid:
        firewall.close(uid)
    command = ["/usr/bin/python3", "-c", FROM_PORT, str(port), str(source)]
    return subprocess.check_output(command, text=True, user=uid, group=uid, extra_groups=[]).strip()


@pytest.fixture
def source() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_port_that_the_projects_own_client_has_just_let_go_lets_no_other_in(
    start: StartTask, source: int
) -> None:
    _, port = a_server(start)
    assert asked_from(source, JOB_UID, port) == "answered"
    assert asked_from(source, OTHER_UID, port) == "ConnectionRefusedError"


def test_port_from_which_another_project_was_refused_serves_the_servers_own(
    start: StartTask, source: int
) -> None:
    _, port = a_server(start)
    assert asked_from(source, OTHER_UID, port) == "ConnectionRefusedError"
    assert asked_from(source, JOB_UID, port) == "answered"


def test_port_from_which_a_project_asked_serves_people_at_once(start: StartTask, source: int) -> None:
    _, port = a_server(start)
    assert asked_from(source, OTHER_UID, port) == "ConnectionRefusedError"
    assert asked_from(source, 0, port) == "answered"


CLOSED_AND_FLUSHED = """
import subprocess
from shoal.runtime.confine import firewall
told = [firewall.closed_uids()]
for uid in (1900000001, 1900000002):
    firewall.close(uid)
told.append(firewall.closed_uids())
subprocess.run([firewall.find_nft(), "flush", "ruleset"], check=True)
assert told == [set(), {1900000001, 1900000002}], told
assert firewall.closed_uids() == set()
"""


def test_rules_that_were_flushed_are_missed() -> None:
    subprocess.run(["unshare", "--net", sys.executable, "-c", CLOSED_AND_FLUSHED], check=True, timeout=120)
