"""Every port that a laboratory's Ray has opened, tried by who has no token, a wrong one, or the right one."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path

from tests.support.listeners import Listener, listeners
from tests.support.ray_lab import RAY_PYTHON, RayLab

KNOCK = Path(__file__).with_name("ray_knock.py")
"""A program of the Python that has Ray, and gRPC."""
WRONG = "0" * 48
SAFE = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/HealthCheck",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/grpc.health.v1.Health/Check",
    "GET /metrics",
    "GET /api/healthz",
    "GET /api/local_raylet_healthz",
    "GET /api/v0/logs",
)
"""What Ray's processes are asked; changes nothing, whoever may."""
TRIES = (*SAFE, "/ray.rpc.ObjectManagerService/Pull", "GET /")
REFUSALS = {"UNAUTHENTICATED", "401", "403"}
NO_SUCH = {"UNIMPLEMENTED", "UNAVAILABLE", "404", "405"}
"""It speaks something else, or has no such thing."""
ROLES = ("gcs_server", "raylet", "dashboard.py", "client.server", "bridge.py")


def rays_ports(lab: RayLab, pids: list[int]) -> dict[str, list[Listener]]:
    """Of these processes here, under an empty name, and of Ray's on every node."""
    found = {"": listeners(pids)}
    for name in lab.names:
        found[name] = listeners([pid for pid in lab.pids_on(name) if lab.is_own(pid)])
    return found


def role_of(listener: Listener) -> str:
    """Whose it is: `raylet`, `ray::DashboardAgent`."""
    program = listener.words.split(" --")[0]
    return next((role for role in ROLES if role in program), program.split(" ")[0])


def tried(
    lab: RayLab, place: str, found: list[Listener], tokens: tuple[str | None, ...], asked: tuple[str, ...]
) -> dict[str, set[str]]:
    """By role, what was answered, with a status in front of it where that is neither a refusal nor nothing.
    All listeners of one network by one process: its start takes longer than its questions.
    """
    inside = lab.entering(place) if place else []
    made = [(listener, one, token) for listener in found for token in tokens for one in asked]
    done = subprocess.run(
        [*inside, str(RAY_PYTHON), "-P", "-s", str(KNOCK)],
        input=json.dumps([(_host(one.host), one.port, said, token) for one, said, token in made]),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path("/"),
    )
    assert done.returncode == 0, (place, done.stderr)
    answered: dict[str, set[str]] = {role_of(listener): set() for listener in found}
    for (listener, one, _), said in zip(made, json.loads(done.stdout), strict=True):
        if said not in REFUSALS | NO_SUCH and not said.startswith("no HTTP"):
            answered[role_of(listener)].add(f"{said} {one}")
    return answered


def _host(host: str) -> str:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return "127.0.0.1" if address.is_unspecified else str(address)
