"""The door for nodes opens with the lead and closes without it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import serve
from shoal.control import ControlPlane
from shoal.errors import AlreadyLed
from shoal.settings import Settings

pytestmark = pytest.mark.anyio


async def test_who_does_not_lead_turns_nodes_away_and_lets_go_of_their_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []

    def another_leads(settings: Settings) -> None:
        ports.append(settings.nodes_port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", settings.nodes_port), timeout=5)
        raise AlreadyLed("another control plane leads")

    monkeypatch.setattr(ControlPlane, "open", another_leads)
    settings = Settings(home=tmp_path, nodes_host="127.0.0.1", nodes_port=0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2):
            with pytest.raises(AlreadyLed):
                await serve._lead(settings, listener, None, None)  # type: ignore[arg-type]
    for port in ports:
        socket.create_server(("127.0.0.1", port), reuse_port=False).close()


TUNED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from shoal.api.server import MAX_CONNECTIONS, max_connections
from shoal.cli.serve import tune
tune()
print(max_connections() == min(MAX_CONNECTIONS, hard // 2))
"""


def test_server_takes_as_many_connections_as_the_machine_lets_it() -> None:
    ran = subprocess.run([sys.executable, "-c", TUNED], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
