"""Row 37 on one machine: a job takes the port of a control plane that is down, and waits for tokens."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client.credentials import Endpoint
from shoal.client.transport import Transport
from shoal.errors import ServerUnreachable
from shoal.loopback import listeners
from shoal.wire import Credentials, EndKind
from tests.support.shares import Start, an_order

STRANGER = 65534
THIEF = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
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
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")


class Thief:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._out = process.stdout
        self.url = f"http://127.0.0.1:{int(self._out.readline())}"

    def caught(self) -> str:
        self._process.kill()
        return self._out.read()


@contextlib.contextmanager
def a_thief(status: int) -> Iterator[Thief]:
    command = [sys.executable, "-c", THIEF, str(status)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield Thief(process)


@pytest.mark.parametrize("status", [200, 401, 409])
def test_no_supervisor_gives_its_token_to_a_stranger_nor_stops_at_his_word(start: Start, status: int) -> None:
    with a_thief(status) as thief:
        order = an_order(run="sleep 0.6", control_url=thief.url, renew_s=0.1, fence_s=60.0, confinement=())
        share = start(order, Credentials(supervisor_token="shs_precious", proof_key="k"))
        process = share.spawn()
        outcome = share.outcome()
        process.kill()  # it would go on trying to tell for ten seconds
        assert outcome.kind is EndKind.SUCCEEDED, outcome
        assert thief.caught() == ""


def test_a_supervisor_that_meets_only_a_stranger_is_fenced(start: Start) -> None:
    with a_thief(200) as thief:
        order = an_order(run="sleep 60", control_url=thief.url, renew_s=0.1, fence_s=0.5, confinement=())
        share = start(order, Credentials(supervisor_token="shs_precious", proof_key="k"))
        process = share.spawn()
        assert share.outcome().kind is EndKind.FENCED
        process.kill()
        assert thief.caught() == ""


def test_a_stranger_would_catch_whatever_he_is_given() -> None:
    with a_thief(200) as thief:
        transport = Transport(lambda: Endpoint(thief.url, "shl_careless"), patience_s=0.0)
        transport.call("GET", "/v1/jobs")
        transport.close()
        assert "shl_careless" in thief.caught()


def test_the_command_line_gives_no_token_to_a_stranger_on_the_homes_old_port() -> None:
    with a_thief(200) as thief:
        transport = Transport(lambda: Endpoint(thief.url, "shl_precious", is_local=True), patience_s=0.0)
        with pytest.raises(ServerUnreachable, match=f"held by user {STRANGER}"):
            transport.call("GET", "/v1/jobs")
        transport.close()
        assert thief.caught() == ""


@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0", "::1", "::"])
@pytest.mark.parametrize("asked", ["127.0.0.1", "localhost", "::1", "192.0.2.1", "example.org"])
def test_whoever_listens_is_known_where_the_address_is_this_machines(bound: str, asked: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    if family is socket.AF_INET6 and not Path("/proc/net/tcp6").exists():
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as server:
        try:
            server.bind((bound, 0))
        except OSError as error:
            pytest.skip(f"this machine does not bind {bound}: {error}")
        server.listen()
        reaches = {
            "127.0.0.1": {"127.0.0.1", "localhost"},
            "0.0.0.0": {"127.0.0.1", "localhost"},
            "::1": {"::1"},
            "::": {"127.0.0.1", "localhost", "::1"},
        }
        expected = {os.geteuid()} if asked in reaches[bound] else set()
        assert listeners(asked, server.getsockname()[1]) == expected
