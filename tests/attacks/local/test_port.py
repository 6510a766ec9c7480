"""Row 37 on one machine: a job takes the port of a control plane that is down, and waits for tokens."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.control_plane.home import hold, remember_port, remove_server_file, write_server_file
from shoal.client.connection import Connection
from shoal.client.credentials import Credentials as Saved
from shoal.client.credentials import Endpoint, refuse_strangers
from shoal.client.transport import Transport
from shoal.errors import ServerUnreachable
from shoal.identity import parse_signed
from shoal.local_sockets import FIRST_PROJECT_UID, SocketOwner, UnexpectedListener, socket_owners
from shoal.wire import EndKind, TaskCredentials
from tests.support.runtime.tasks import StartTask, a_task_spec

STRANGER, PROJECT, OWN = 65534, FIRST_PROJECT_UID + 3, os.geteuid()
THIEF = """
import os, socket, sys
if int(sys.argv[2]) != os.geteuid():
    os.setgid(65534); os.setuid(int(sys.argv[2]))
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
print(server.getsockname()[1], flush=True)
while True:
    client = server.accept()[0]
    said = client.recv(65536)
    if said:
        print(said, flush=True)
        client.sendall(f"HTTP/1.1 {sys.argv[1]} X\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}".encode())
    client.close()
"""
TURNCOAT = """
import socket, sys
server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 0)); server.listen()
print(server.getsockname()[1], flush=True)
client = server.accept()[0]
server.close()
print("accepted", flush=True)
sys.stdin.read()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")


class Thief:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        assert process.stdout is not None
        self._out = process.stdout
        self.url = f"http://127.0.0.1:{int(self._out.readline())}"

    def caught(self, waited_for: int = 0) -> str:
        """All that was said to it, of so many at least."""
        lines = [self._out.readline() for _ in range(waited_for)]
        self._process.kill()
        return "".join(lines) + self._out.read()


@contextlib.contextmanager
def a_thief(status: int = 200, *, uid: int = OWN) -> Iterator[Thief]:
    command = [sys.executable, "-c", THIEF, str(status), str(uid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Thief(process)
        finally:
            process.kill()


@contextlib.contextmanager
def listening(host: str = "127.0.0.1", port: int = 0) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        yield server


def home_at(home: Path, url: str) -> dict[str, str]:
    """A home whose control plane was last at `url`, and the environment of its owner."""
    write_server_file(home, {"url": url, "pid": 1})
    remember_port(home, int(url.rpartition(":")[2]))
    Saved(home).save("local", "shl_precious")
    Saved(home).save(url, "shl_precious")
    return {"SHOAL_HOME": str(home)}


def refused(thief: Thief, env: dict[str, str]) -> str:
    """The words of a command that met the thief and gave it nothing."""
    with pytest.raises(ServerUnreachable) as caught, Connection(env=env, patience_s=0.0) as shoal:
        shoal.me()
    assert thief.caught() == ""
    assert "`shoal up`" in str(caught.value.hint)
    return str(caught.value)


# The server of one's own home: the process that holds it, and nobody else of the same user.


def test_no_token_of_a_home_goes_to_a_process_of_the_same_user_once_its_server_is_dead(
    tmp_path: Path,
) -> None:
    with a_thief() as thief:
        refusal = refused(thief, home_at(tmp_path, thief.url))
    assert "no control plane runs in" in refusal
    assert f"held by user {OWN} (process {thief.pid})" in refusal


@pytest.mark.parametrize("end", ["kill -9", "shoal down"])
@pytest.mark.parametrize("by", ["SHOAL_URL", "shoal login", "an argument"])
def test_it_makes_no_difference_that_the_homes_server_was_named_by_its_address(
    tmp_path: Path, by: str, end: str
) -> None:
    with a_thief() as thief:
        env = home_at(tmp_path, thief.url)
        if end == "shoal down":
            remove_server_file(tmp_path, 1)
        if by == "shoal login":
            Saved(tmp_path).use(thief.url)
        connection = Connection(thief.url, "shl_precious", env=env, patience_s=0.0)
        if by != "an argument":
            named = {"SHOAL_URL": thief.url} if by == "SHOAL_URL" else {}
            connection = Connection(env=env | named, patience_s=0.0)
        with pytest.raises(ServerUnreachable, match=f"process {thief.pid}"), connection as shoal:
            shoal.me()
        assert thief.caught() == ""


def test_nor_while_a_new_server_of_the_home_lives_elsewhere(tmp_path: Path) -> None:
    with hold(tmp_path), a_thief() as thief:
        refusal = refused(thief, home_at(tmp_path, thief.url))
    assert f"process {os.getpid()} is the control plane" in refusal
    assert f"(process {thief.pid})" in refusal


def test_a_thief_that_has_the_dead_servers_process_id_is_found_out(tmp_path: Path) -> None:
    with hold(tmp_path), a_thief() as thief:
        (tmp_path / "server.lock").write_text(f"{thief.pid}\n")  # as if the new holder had not written yet
        refused(thief, home_at(tmp_path, thief.url))


def test_a_connection_that_a_thief_accepted_before_the_server_came_back_is_not_the_servers(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", TURNCOAT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as thief:
        assert thief.stdout is not None
        port = int(thief.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as link:
            assert thief.stdout.readline() == "accepted\n"
            with hold(tmp_path), listening(port=port):
                endpoint = Endpoint(f"http://127.0.0.1:{port}", None, is_local=True, home=tmp_path)
                with pytest.raises(UnexpectedListener, match=f"process {thief.pid}"):
                    refuse_strangers(link, endpoint)
                with socket.create_connection(("127.0.0.1", port)) as honest:
                    assert refuse_strangers(honest, endpoint) == OWN
        thief.kill()


def test_the_holder_of_the_home_is_trusted_before_it_accepts_and_after(tmp_path: Path) -> None:
    with hold(tmp_path), listening() as server:
        endpoint = Endpoint("http://127.0.0.1", None, is_local=True, home=tmp_path)
        with socket.create_connection(server.getsockname()) as link:
            assert refuse_strangers(link, endpoint) == OWN
            with server.accept()[0]:
                assert refuse_strangers(link, endpoint) == OWN
            with pytest.raises(ConnectionResetError):
                refuse_strangers(link, endpoint)


@needs_root
def test_the_command_line_gives_no_token_to_another_user_on_the_homes_old_port(tmp_path: Path) -> None:
    with a_thief(uid=STRANGER) as thief:
        assert f"held by user {STRANGER} (process" in refused(thief, home_at(tmp_path, thief.url))


# Any other server of this machine: the user who ran it at login, and never a project's.


@needs_root
@pytest.mark.parametrize("uid", [STRANGER, PROJECT])
def test_a_server_one_logged_in_to_is_known_by_its_user(tmp_path: Path, uid: int) -> None:
    with a_thief(uid=uid) as thief:
        env = home_at(tmp_path, thief.url)  # one's own server may have had the port of theirs
        Saved(tmp_path).save(thief.url, "shl_precious", listener_uid=0)
        Saved(tmp_path).use(thief.url)
        refusal = refused(thief, env)
    assert f"held by user {uid} (process" in refusal
    assert "it was user 0" in refusal


@needs_root
@pytest.mark.parametrize("how", ["SHOAL_URL", "an argument"])
def test_no_token_goes_to_a_projects_user_where_nothing_is_remembered(tmp_path: Path, how: str) -> None:
    with a_thief(uid=PROJECT) as thief:
        env = {"SHOAL_HOME": str(tmp_path), "SHOAL_URL": thief.url, "SHOAL_TOKEN": "shl_precious"}
        connection = (
            Connection(env=env) if how == "SHOAL_URL" else Connection(thief.url, "shl_precious", env=env)
        )
        with pytest.raises(ServerUnreachable, match=f"user {PROJECT} .*projects' jobs"), connection as shoal:
            shoal.me()
        assert thief.caught() == ""


@needs_root
def test_server_of_another_non_project_user_is_used_if_no_user_is_remembered() -> None:
    with a_thief(uid=STRANGER) as thief:
        transport = Transport(lambda: Endpoint(thief.url, "shl_careless"), patience_s=0.0)
        transport.call("GET", "/v1/jobs")
        transport.close()
        assert transport.listener_uid == STRANGER
        assert "shl_careless" in thief.caught()


# Supervisors: they tell whoever listens, and what they tell is of no use to him.


@pytest.mark.parametrize("status", [200, 401, 409])
def test_a_supervisor_gives_a_stranger_nothing_to_use_nor_stops_at_his_word(
    start: StartTask, status: int, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    run = f"until [ -e {end} ]; do sleep 0.05; done"
    with a_thief(status) as thief:
        task_spec = a_task_spec(run=run, control_url=thief.url, renew_s=0.1, fence_s=60.0, confinement=())
        task = start(task_spec, TaskCredentials(proof_key="precious", job_token="shj_precious"))
        process = task.spawn()
        caught = thief.caught(waited_for=3)
        end.touch()
        outcome = task.outcome()
        process.kill()  # it would go on trying to tell for ten seconds
        assert outcome.kind is EndKind.SUCCEEDED, outcome
    tokens = re.findall(r"Bearer (\S+?)\\r", caught)
    assert len(tokens) == len(set(tokens)) > 1
    assert "precious" not in caught
    assert [parse_signed(b"k" * 32, token) for token in tokens] == [None] * len(tokens)


def test_a_supervisor_that_meets_only_a_stranger_is_fenced(start: StartTask) -> None:
    with a_thief(200) as thief:
        task_spec = a_task_spec(
            run="sleep 60", control_url=thief.url, renew_s=0.1, fence_s=0.5, confinement=()
        )
        task = start(task_spec, TaskCredentials(proof_key="precious"))
        process = task.spawn()
        assert task.outcome().kind is EndKind.FENCED
        process.kill()


@pytest.mark.parametrize(
    ("bound", "wanted"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "::1"),
        ("::", "::1"),
        ("::", "127.0.0.1"),
    ],
)
def test_server_of_a_connection_is_identified_by_user_and_socket(bound: str, wanted: str) -> None:
    try:
        with listening(bound) as server, socket.create_connection((wanted, server.getsockname()[1])) as link:
            inode = str(os.fstat(server.fileno()).st_ino)
            assert socket_owners(link) == (SocketOwner(OWN, inode),)
            with server.accept()[0] as end:
                assert socket_owners(link) == (SocketOwner(OWN, str(os.fstat(end.fileno()).st_ino)),)
    except OSError as error:
        pytest.skip(f"this machine does not bind {bound}: {error}")
