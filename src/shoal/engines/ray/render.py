"""The tasks of agents, the environment of Ray's processes and the command of our own head. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.engines.ray.config import RayConfig
from shoal.wire import LaunchRequest, TaskIdentity

AGENT_PORTS = (
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
)
"""Ports that we choose for Ray, which otherwise ends itself if its agents do not report theirs within 15
s."""
HEAD_PORTS = (*AGENT_PORTS, "ray-client-server-port")
"""The last cannot be switched off, and its default 10001 may belong to another process."""
PASSED_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
)
"""The control plane's variables that Ray gets: others may be secrets, and Ray passes its own to its
workers."""
RECONNECT_S = 3600
"""How long raylets wait for a lost head. After Ray's own 60 s they would be killed before a person looks."""


def key_of(attempt_id: str, node: str, replacement: int) -> str:
    """Return the key of the node agent of one task. With the node, as several may be one machine in a
    test.
    """
    return f"{attempt_id}.{node}.{replacement}"


def agent_task(config: RayConfig, launch_request: LaunchRequest, identity: TaskIdentity) -> dict[str, Any]:
    """Return what an agent starts for this task.

    The launch request goes to standard input, because it holds a bootstrap token.
    """
    python = [config.python, "-P", "-s", "-m"]
    task = [config.spool, identity.attempt_id, identity.node, str(identity.replacement)]
    return {
        "command": [*python, "shoal.runtime.agent.bootstrap", identity.node],
        "reap": [*python, "shoal.runtime.agent.reaping", *task],
        "env": {"PYTHONPATH": config.python_path} if config.python_path else {},
        "launch_request": msgspec.json.encode(launch_request).decode(),
    }


def ray_environment(environ: Mapping[str, str], token_file: Path, *, is_own: bool) -> dict[str, str]:
    """Return the environment of a process that talks to Ray.

    It has nothing that selects another Ray and none of the control plane's own variables. The token is in a
    file.
    """
    passed = {name: environ[name] for name in PASSED_VARIABLES if name in environ}
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }
    if is_own:
        # The only way to make Ray listen on loopback: Ray then assumes a laptop's system.
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return passed | settings


def tls_environment(config: RayConfig) -> dict[str, str]:
    """Return the environment of a process in a Ray that uses TLS. It shows one certificate to servers and
    clients.
    """
    if not config.tls_cert:
        return {}
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": config.tls_cert,
        "RAY_TLS_SERVER_KEY": config.tls_key,
        "RAY_TLS_CA_CERT": config.tls_ca,
    }


def head_environment(environ: Mapping[str, str], token_file: Path, storage: Path) -> dict[str, str]:
    return ray_environment(environ, token_file, is_own=True) | {
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(storage),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
    }


def head_command(ray_python: str, node: str, port: int, ports: tuple[int, ...], temp: Path) -> list[str]:
    """Return the head's command. It stays in the foreground, so that the starter knows whether it lives."""
    others = [f"--{name}={number}" for name, number in zip(HEAD_PORTS, ports, strict=True)]
    return [
        ray_python,
        "-P",
        "-s",
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--node-name={node}",
        f"--port={port}",
        *others,
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        f"--temp-dir={temp}",
    ]
