"""What can befall a service under load. Each is done for real, and seen to have happened."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

from shoal.cli.control_plane.home import running_data_plane
from shoal.client.credentials import LOCAL, Credentials
from shoal.home import pid_holding
from tests.support.planes.real import until
from tests.support.serving.service import CallerCrowd, ServedApp, server_pid

PATH = "/default/hello/"


def address_of(served: ServedApp) -> str:
    url = until(lambda: served.plane.shoal.services.show("hello")["url"], "the data plane listens")
    return str(url).removeprefix("http://").partition("/")[0]


def token_of(served: ServedApp) -> str:
    return str(Credentials(served.plane.home).token(LOCAL))


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


class ServiceUnderFire:
    """A service of `replicas` on two nodes, and who calls it meanwhile."""

    def __init__(self, served: ServedApp, replicas: int = 3, dice: random.Random | None = None) -> None:
        self.served = served
        self.replicas = replicas
        self.killed_replicas: set[str] = set()
        self._dice = dice or random.Random(1)
        self._version = 0
        self._crowd: CallerCrowd | None = None
        self._serve()
        served.until_ready(replicas)

    def start_callers(self, *kinds: Any) -> CallerCrowd:
        self._crowd = CallerCrowd(address_of(self.served), PATH, token_of(self.served), *kinds)
        return self._crowd

    def _serve(self) -> dict[str, Any]:
        self._version += 1
        return self.served.serve(
            replicas=self.replicas,
            env={"VERSION": str(self._version)},
            limits={"rps": 10_000 + self._version},
            drain="30s",
            grace="2s",
        )

    def _service_view(self) -> dict[str, Any]:
        return dict(self.served.plane.shoal.services.show("hello"))

    def kill_replica(self) -> None:
        """`kill -9` of the server itself."""
        replica_id = self._kill(self.served.replicas())
        until(lambda: replica_id not in self.served.replicas(), "it is in no table any more")
        self.served.until_ready(self.replicas)

    def _kill(self, among: dict[str, str]) -> str:
        replica_id, address = self._dice.choice(sorted(among.items()))
        pid = server_pid(address)
        self.killed_replicas.add(replica_id)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} is gone")
        return replica_id

    def roll_out(self) -> None:
        """To a new version, with another limit."""
        number = self._serve()["newest_release"]
        until(lambda: self._service_view()["rollout"]["stage"] == "done", "it took over", 180)
        assert self._service_view()["release"] == number
        until(
            lambda: {one["release"] for one in self._service_view()["servers"]} == {number},
            "the old ones are gone",
        )
        if self._crowd is not None:
            seen = self._crowd
            until(lambda: str(self._version) in seen.versions, f"version {self._version} answers")
        table = self.served.table(wait_s=20.0)
        assert table is not None
        assert table.services[0].limits.rps == 10_000 + self._version

    def kill_control_plane(self) -> None:
        """`kill -9`, a while without, and another one."""
        self._restart()

    def kill_control_plane_and_take_its_port(self) -> None:
        """The next one listens elsewhere, and the data plane has to find it."""
        self._restart(takes_its_port=True)

    def kill_replica_without_a_control_plane(self) -> None:
        """Nobody is there to take it out of the table, nor to start another."""
        self._restart(kills_replica=True)

    def _restart(self, *, takes_its_port: bool = False, kills_replica: bool = False) -> None:
        plane, there = self.served.plane, self.served.replicas()
        before, url, serving = (
            pid_holding(plane.home),
            plane.shoal.transport.endpoint.url,
            running_data_plane(plane.home),
        )
        plane.kill()
        gone = self._kill(there) if kills_replica else ""
        if self._crowd is not None:
            self._crowd.wait_for_more(5)
        taken = socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))) if takes_its_port else None
        try:
            plane.up()
        finally:
            if taken is not None:
                taken.close()
        assert pid_holding(plane.home) not in (None, before)
        self._service_view()  # and so the client finds it
        assert not takes_its_port or plane.shoal.transport.endpoint.url != url
        assert running_data_plane(plane.home) == serving, "the data plane is the one that was there"
        until(lambda: gone not in self.served.replicas(), "who was killed is in no table any more")
        self.served.until_ready(self.replicas)

    def change_table(self) -> None:
        """A token that is made, works, is revoked and works no more: in every process."""
        tokens = self.served.plane.shoal.tokens
        made = tokens.create(project="default", service="hello", label="made under load")
        until(lambda: self._statuses(made["text"]) == {200}, "the new token is known")
        tokens.revoke(made["id"])
        until(lambda: 200 not in self._statuses(made["text"]), "the revoked token is not")

    def _statuses(self, token: str) -> set[int]:
        """Of a few requests, each on a connection of its own: it may meet any process."""
        found = set()
        for _ in range(8):
            link = http.client.HTTPConnection(address_of(self.served), timeout=60)
            link.request("GET", PATH, headers={"authorization": f"Bearer {token}"})
            found.add(link.getresponse().status)
            link.close()
        return found

    def replace_data_plane(self) -> None:
        """All its processes, as an upgrade does."""
        parent = int(running_data_plane(self.served.plane.home)["pid"])  # type: ignore[index]
        before = children_of(parent)
        os.kill(parent, signal.SIGHUP)
        until(lambda: not before & children_of(parent), "all are others", 120)
        assert len(children_of(parent)) == len(before)

    def replace_one_process(self) -> None:
        """Of the data plane's several: it is asked to end."""
        parent = int(running_data_plane(self.served.plane.home)["pid"])  # type: ignore[index]
        before = children_of(parent)
        gone = self._dice.choice(sorted(before))
        os.kill(gone, signal.SIGTERM)
        until(lambda: gone not in children_of(parent), f"process {gone} is gone", 120)
        until(lambda: len(children_of(parent)) == len(before), "another one is there")
        assert before - {gone} <= children_of(parent)

    def drain_node(self) -> None:
        node = self._dice.choice(sorted(self.served.nodes()))
        assert self.served.plane.command("drain", node).returncode == 0
        until(lambda: node not in self.served.nodes(), f"nothing is on {node}", 120)
        self.served.until_ready(self.replicas)
        assert self.served.plane.command("resume", node).returncode == 0


FAULTS = (
    ServiceUnderFire.kill_replica,
    ServiceUnderFire.roll_out,
    ServiceUnderFire.kill_control_plane,
    ServiceUnderFire.kill_control_plane_and_take_its_port,
    ServiceUnderFire.kill_replica_without_a_control_plane,
    ServiceUnderFire.change_table,
    ServiceUnderFire.replace_data_plane,
    ServiceUnderFire.replace_one_process,
    ServiceUnderFire.drain_node,
)
