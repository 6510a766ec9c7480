"""Every port that a laboratory's Ray has opened, tried by who has no token, a wrong one, or the right one."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path

from tests.support.host.processes import Listener, listeners
from tests.support.ray.real_ray import RAY_PYTHON, RayLab

PROBE = Path(__file__).with_name("probe.py")
"""A program of the Python that has Ray, and gRPC."""
WRONG_TOKEN = "0" * 48
SAFE_REQUESTS = (
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
ALL_REQUESTS = (*SAFE_REQUESTS, "/ray.rpc.ObjectManagerService/Pull", "GET /")
REFUSALS = {"UNAUTHENTICATED", "401", "403"}
UNIMPLEMENTED = {"UNIMPLEMENTED", "UNAVAILABLE", "404", "405"}
"""It speaks something else, or has no such thing."""
ROLES = ("gcs_server", "raylet", "dashboard.py", "client.server", "bridge.py")


def ray_listeners(lab: RayLab, pids: list[int]) -> dict[str, list[Listener]]:
    """Of these processes here, under an empty name, and of Ray's on every node."""
    result = {"": listeners(pids)}
    for name in lab.names:
        result[name] = listeners([pid for pid in lab.pids_on(name) if lab.is_cluster_process(pid)])
    return result


def role_of(listener: Listener) -> str:
    """Whose it is: `raylet`, `ray::DashboardAgent`."""
    program = listener.command_line.split(" --")[0]
    return next((role for role in ROLES if role in program), program.split(" ")[0])


def probe_listeners(
    lab: RayLab, node: str, targets: list[Listener], tokens: tuple[str | None, ...], requests: tuple[str, ...]
) -> dict[str, set[str]]:
    """By role, what was answered, with a status in front of it where that is neither a refusal nor nothing.
    All listeners of request network by request process: its start takes longer than its questions.
    """
    inside = lab.netns_command(node) if node else []
    created = [(listener, request, token) for listener in targets for token in tokens for request in requests]
    done = subprocess.run(
        [*inside, str(RAY_PYTHON), "-P", "-s", str(PROBE)],
        input=json.dumps(
            [(_host(request.host), request.port, output, token) for request, output, token in created]
        ),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path("/"),
    )
    assert done.returncode == 0, (node, done.stderr)
    answered: dict[str, set[str]] = {role_of(listener): set() for listener in targets}
    for (listener, request, _), output in zip(created, json.loads(done.stdout), strict=True):
        if output not in REFUSALS | UNIMPLEMENTED and not output.startswith("no HTTP"):
            answered[role_of(listener)].add(f"{output} {request}")
    return answered


def _host(host: str) -> str:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    return "127.0.0.1" if address.is_unspecified else str(address)
