"""The proxies: each with two upstreams behind it, one worker, keep-alive both sides, no access log."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

TOKEN = "shoal_bench_0123456789abcdef0123456789abcdef"
UNDER = "/bench/echo"
"""Where Shoal serves it; the others take any path."""

NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000;
  upstream back {{ random two least_conn; {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://back; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""
HAPROXY = """
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
  option http-no-delay
frontend front
  bind 127.0.0.1:{port} backlog 2048
  default_backend back
backend back
  balance random(2)
{servers}
"""
ENVOY_ROUTER = {
    "name": "envoy.filters.http.router",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
}


@dataclass(frozen=True)
class Contestant:
    name: str
    command: list[str]
    path: str = "/"
    """In front of what is asked for."""
    headers: tuple[str, ...] = ()
    """That a caller sends."""


def nginx(folder: Path, port: int, behind: list[int]) -> Contestant | None:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if program is None:
        return None
    servers = " ".join(f"server 127.0.0.1:{one};" for one in behind)
    path = folder / "nginx.conf"
    path.write_text(NGINX.format(folder=folder, port=port, servers=servers))
    return Contestant("nginx", [program, "-c", str(path), "-p", str(folder)])


def haproxy(folder: Path, port: int, behind: list[int]) -> Contestant | None:
    program = shutil.which("haproxy", path="/usr/sbin:/usr/bin")
    if program is None:
        return None
    servers = "\n".join(f"  server s{one} 127.0.0.1:{one}" for one in behind)
    path = folder / "haproxy.cfg"
    path.write_text(HAPROXY.format(port=port, servers=servers))
    return Contestant("HAProxy", [program, "-db", "-f", str(path)])


def shoal(folder: Path, port: int, behind: list[int]) -> Contestant:
    return _shoal("Shoal", folder / "plain.json", port, behind, {"is_public": True})


def shoal_with_all(folder: Path, port: int, behind: list[int]) -> Contestant:
    """Tokens, limits that are never reached, counts and histograms."""
    caller = {"digest": hashlib.sha256(TOKEN.encode()).hexdigest(), "name": "ana", "project": "bench"}
    limits = {"rps": 1e6, "concurrency": 4096, "per": "token"}
    every: dict[str, object] = {"callers": [caller], "limits": limits}
    return _shoal("Shoal, all on", folder / "all.json", port, behind, every, f"authorization: Bearer {TOKEN}")


def _shoal(
    name: str, path: Path, port: int, behind: list[int], more: dict[str, object], *headers: str
) -> Contestant:
    replicas = [{"replica_id": f"r{one}", "address": f"127.0.0.1:{one}", "release": 1} for one in behind]
    service = {"project": "bench", "name": "echo", "cap": 1024, "replicas": replicas, **more}
    path.write_text(json.dumps({"version": 1, "services": [service]}))
    command = [sys.executable, "-m", "shoal.serving", "--listen", f"127.0.0.1:{port}", "--table", str(path)]
    return Contestant(name, command, f"{UNDER}/", headers)


def envoy(folder: Path, port: int, behind: list[int]) -> Contestant | None:
    program = shutil.which("envoy", path=str(Path(sys.executable).parent))
    if program is None:
        return None

    def address(one: int) -> dict[str, object]:
        return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": one}}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "front",
        "http_filters": [ENVOY_ROUTER],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "back", "timeout": "0s"}}],
                }
            ]
        },
    }
    listener = {
        "name": "front",
        **address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    ends = [{"endpoint": address(one)} for one in behind]
    cluster = {
        "name": "back",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "back", "endpoints": [{"lb_endpoints": ends}]},
    }
    path = folder / "envoy.json"
    path.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    return Contestant("Envoy", [program, "-c", str(path), "--concurrency", "1", "-l", "off"])


def vllm_router(folder: Path, port: int, behind: list[int]) -> Contestant | None:
    return _router("vllm-router", "vLLM's router", port, behind)


def sglang_router(folder: Path, port: int, behind: list[int]) -> Contestant | None:
    return _router("smg", "SGLang's router", port, behind)


def _router(command: str, name: str, port: int, behind: list[int]) -> Contestant | None:
    program = shutil.which(command, path=str(Path(sys.executable).parent))
    if program is None:
        return None
    workers = [f"http://127.0.0.1:{one}" for one in behind]
    words = [program, "--host", "127.0.0.1", "--port", str(port), "--policy", "power_of_two"]
    return Contestant(name, [*words, "--worker-urls", *workers], "/v1/chat/completions")


EVERYBODY = (shoal, shoal_with_all, nginx, haproxy, envoy, vllm_router, sglang_router)
