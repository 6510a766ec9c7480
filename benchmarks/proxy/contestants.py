"""The proxies: each with two upstreams behind it, one worker, keep-alive both sides, no access log.

A contestant that is not installed raises `LeftOut` with the command to type.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import free_ports
from benchmarks.proxy.configs import HAPROXY, NGINX, envoy_config

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".cache" / "proxies" / "bin"
"""Where `scripts/setup proxies` puts those that come from a package index."""
ALL_ON = "Shoal, all on"
TOKEN = "shoal_bench_0123456789abcdef0123456789abcdef"


class LeftOut(Exception):
    """There is no such row, and why."""


@dataclass(frozen=True)
class Contestant:
    name: str
    command: list[str]
    under: str = ""
    """The prefix of every path."""
    get: str = "/v1/models"
    headers: tuple[str, ...] = ()
    """The headers that a caller sends."""
    env: dict[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    """Text on the command lines of those of its processes that are the proxy; none: all of them are."""


Maker = Callable[[Path, int, list[int]], Contestant]
"""Makes a contestant from a folder for its files, its port, and the ports of the servers behind it."""


def _program(name: str) -> str:
    path = shutil.which(name, path=f"{PEERS}:/usr/sbin:/usr/bin")
    if path is None:
        raise LeftOut(f"{name} is not installed; to have it: scripts/setup proxies")
    return path


def nginx(folder: Path, port: int, behind: list[int]) -> Contestant:
    servers = " ".join(f"server 127.0.0.1:{upstream_port};" for upstream_port in behind)
    path = folder / "nginx.conf"
    path.write_text(NGINX.format(folder=folder, port=port, servers=servers))
    return Contestant("nginx", [_program("nginx"), "-c", str(path), "-p", str(folder)])


def haproxy(folder: Path, port: int, behind: list[int]) -> Contestant:
    servers = "\n".join(f"  server s{upstream_port} 127.0.0.1:{upstream_port}" for upstream_port in behind)
    path = folder / "haproxy.cfg"
    path.write_text(HAPROXY.format(port=port, servers=servers))
    return Contestant("HAProxy", [_program("haproxy"), "-db", "-f", str(path)])


def shoal(folder: Path, port: int, behind: list[int]) -> Contestant:
    return _shoal("Shoal", folder / "plain.json", port, behind, {"is_public": True})


def shoal_with_all(folder: Path, port: int, behind: list[int]) -> Contestant:
    """Tokens, limits that are never reached, counts and histograms."""
    caller = {"digest": hashlib.sha256(TOKEN.encode()).hexdigest(), "name": "ana", "project": "bench"}
    limits = {"rps": 1e6, "concurrency": 4096, "per": "token"}
    every: dict[str, object] = {"callers": [caller], "limits": limits}
    return _shoal(ALL_ON, folder / "all.json", port, behind, every, f"authorization: Bearer {TOKEN}")


def _shoal(
    name: str, path: Path, port: int, behind: list[int], more: dict[str, object], *headers: str
) -> Contestant:
    replicas = [
        {"replica_id": f"r{upstream_port}", "address": f"127.0.0.1:{upstream_port}", "release": 1}
        for upstream_port in behind
    ]
    service = {"project": "bench", "name": "echo", "cap": 1024, "replicas": replicas, **more}
    path.write_text(json.dumps({"version": 1, "services": [service]}))
    command = [sys.executable, "-m", "shoal.serving", "--listen", f"127.0.0.1:{port}", "--table", str(path)]
    return Contestant(name, command, under="/bench/echo", headers=headers)


def envoy(folder: Path, port: int, behind: list[int]) -> Contestant:
    path = folder / "envoy.json"
    path.write_text(json.dumps(envoy_config(port, behind)))
    return Contestant("Envoy", [_program("envoy"), "-c", str(path), "--concurrency", "1", "-l", "off"])


def vllm_router(folder: Path, port: int, behind: list[int]) -> Contestant:
    return _router("vLLM router", [_program("vllm-router")], port, behind)


def sglang_router(folder: Path, port: int, behind: list[int]) -> Contestant:
    return _router("SGLang router", [_program("sglang-router"), "launch"], port, behind)


def _router(name: str, argv: list[str], port: int, behind: list[int]) -> Contestant:
    """The other proxies pass on any path; a router passes on only the paths of an inference server."""
    argv += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--policy",
        "power_of_two",
        "--log-level",
        "error",
    ]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_ports(1)[0])]
    workers = [f"http://127.0.0.1:{upstream_port}" for upstream_port in behind]
    return Contestant(name, [*argv, "--worker-urls", *workers], get="/get_model_info")


def ray_serve(folder: Path, port: int, behind: list[int]) -> Contestant:
    return _ray("Ray Serve", folder / "r", port, {}, "ray::ProxyActor")


def ray_serve_haproxy(folder: Path, port: int, behind: list[int]) -> Contestant:
    """As its guide advises for the highest request rate."""
    env = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    marks = ("ray::ProxyActor", "ray::HAProxyManager", "haproxy")
    return _ray("Ray Serve, HAProxy", folder / "h", port, env, *marks)


def _ray(name: str, folder: Path, port: int, env: dict[str, str], *marks: str) -> Contestant:
    _program("serve")
    command = [str(PEERS / "python"), "-m", "benchmarks.proxy.ray_serve", str(port), str(folder)]
    env = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore", **env}
    return Contestant(name, command, env=env, marks=marks)


PROXIES = (shoal, shoal_with_all, nginx, haproxy, envoy, vllm_router, sglang_router)
WHOLE = (shoal_with_all, ray_serve, ray_serve_haproxy)
"""With the same ASGI program behind, because Ray Serve has no proxy without replicas of its own."""
