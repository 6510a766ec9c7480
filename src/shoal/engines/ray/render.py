"""What agents and Ray are told: the keeper to start, the environment it gets, the head of our own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.engines.ray.config import RayConfig
from shoal.wire import Order, Summons

AGENT_PORTS = (
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
)
"""Given to Ray, which otherwise ends itself when its agents do not say theirs within 15 s."""
HEAD_PORTS = (*AGENT_PORTS, "ray-client-server-port")
"""The last cannot be switched off, and would be 10001, which another may have."""
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
"""Of the control plane's variables: it may have been given secrets, and Ray hands its own to its workers."""
RECONNECT_S = 3600
"""How long raylets wait for a head that is gone. Ray's own 60 s kill them before anybody has looked."""


def key_of(attempt_id: str, node: str, incarnation: int) -> str:
    """The keeper of one share. With the node, as several may be one machine in a test."""
    return f"{attempt_id}.{node}.{incarnation}"


def keeper_task(config: RayConfig, summons: Summons, order: Order) -> dict[str, Any]:
    """What an agent starts for an order. The summons goes to its standard input: it holds a ticket."""
    python = [config.python, "-P", "-s", "-m"]
    share = [config.spool, order.attempt_id, order.node, str(order.incarnation)]
    return {
        "command": [*python, "shoal.runtime.keep", order.node],
        "bury": [*python, "shoal.runtime.burial", *share],
        "env": {"PYTHONPATH": config.python_path} if config.python_path else {},
        "summons": msgspec.json.encode(summons).decode(),
    }


def ray_environment(environ: Mapping[str, str], token_file: Path, *, is_own: bool) -> dict[str, str]:
    """For a process that speaks to Ray: nothing of a Ray that somebody else chose, nor of what the control
    plane was given; the token by its file.
    """
    kept = {name: environ[name] for name in KEPT if name in environ}
    told = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }
    if is_own:
        # The only way to have Ray listen on loopback: it takes itself for one on a laptop's system.
        told["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return kept | told


def tls_environment(config: RayConfig) -> dict[str, str]:
    """For a process in a Ray that speaks TLS. Each shows the same certificate to who asks it and to whom it
    asks.
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
    """In the foreground: who started it knows whether it lives."""
    others = [f"--{name}={given}" for name, given in zip(HEAD_PORTS, ports, strict=True)]
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
