"""Keep the data plane of services running beside the server. It starts with the first service.

The data plane is a process of its own and outlives the server, so requests to services continue. The next
server finds it by the home. A data plane is replaced only if it died, if its arguments changed, or if it
listens elsewhere while its own port is free again.

`hold_ports` keeps projects' jobs from answering at the ports of the control plane and the data plane. A job
may bind a port as soon as its daemon ends, and callers would send it their tokens. If root has nftables, a
rule drops what the job answers. The rule outlasts both daemons and is written again in case a restart of the
machine's firewall has removed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog

from shoal.cli.control_plane.home import (
    DATA_PLANE_FILE,
    home_identity,
    running_data_plane,
    terminate_data_plane,
)
from shoal.client.credentials import write_private
from shoal.control.services.state import ServiceState
from shoal.errors import StateError
from shoal.identity import data_plane_token
from shoal.runtime.confine import firewall
from shoal.runtime.files.spool import start_ticks
from shoal.settings import Settings

LOOK_EVERY_S = 0.5
START_S = 20.0
AGAIN_S = 5.0
"""Pause after a data plane that failed to start."""
LEAVING_S = 3.0
"""How long a data plane that `shoal down --jobs` has just stopped may take to release its port."""

log = structlog.get_logger()

MAX_LOG_BYTES = 16 << 20
"""The size of `serving.log`; one older part of the same size is kept beside it."""


async def supervise(settings: Settings, services: ServiceState, key: bytes) -> None:
    """Supervise until cancelled; a running data plane then keeps running.

    If the disk or the machine does not allow a turn, a later turn makes up for it. The control plane works
    without the data plane.
    """
    child: subprocess.Popen[bytes] | None = None
    problem = ""
    while True:
        if child is not None:
            child.poll()  # reaps it if it has ended
        try:
            child = await _supervise_once(settings, services, key, child)
            problem = ""
        except OSError as error:
            if str(error) != problem:
                log.warning("data_plane.not_kept", error=str(error))
            problem = str(error)
        await anyio.sleep(AGAIN_S if problem else LOOK_EVERY_S)


async def _supervise_once(
    settings: Settings, services: ServiceState, key: bytes, child: subprocess.Popen[bytes] | None
) -> subprocess.Popen[bytes] | None:
    """Run one turn. Return the data plane that this process started last."""
    await anyio.to_thread.run_sync(bound_log, settings.home / "logs" / "serving.log")
    record = running_data_plane(settings.home)
    services.url = str(record["url"]) if record else None
    services.wanted_port = _missed_port(settings, record)
    is_unchanged = record is not None and record.get("arguments") == _arguments(settings)
    returns = is_unchanged and services.wanted_port is not None and await _is_free(settings)
    if not services.table.services or (is_unchanged and not returns):
        return child
    token = data_plane_token(key)
    # If the port is taken meanwhile, a data plane that would return to it stays where it is.
    ports = (settings.serve_port,) if returns else (settings.serve_port, 0)
    child = await anyio.to_thread.run_sync(_start, settings, token, record, ports)
    if child is None:
        await anyio.sleep(AGAIN_S)
    elif record is not None:
        terminate_data_plane(record)  # its successor accepts connections already
    return child


async def _is_free(settings: Settings) -> bool:
    """Whether the usual port of services stays free, and not only while its holder restarts: two homes on a
    machine may want one port.
    """
    if _bind_error(settings) is not None:
        return False
    await anyio.sleep(AGAIN_S)
    return _bind_error(settings) is None


def bound_log(path: Path) -> None:
    """Keep the data plane's log below `MAX_LOG_BYTES` by moving the older part to a second file.

    The data plane appends to the open file, so the file is emptied and not replaced. Lines written between
    the copy and that are lost. Raises nothing: if the disk has no room for the copy, the log is emptied
    without it, and if the log cannot be emptied, the data plane keeps running.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MAX_LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


def taken_port(settings: Settings, *, is_fixed: bool) -> int | None:
    """Return the usual port of services if another program listens on it. Blocks for a moment.

    `is_fixed`: a user named the port, so raise `StateError` if it cannot be had. This is checked before the
    first service exists, so that the user learns of it at once.
    """
    record = running_data_plane(settings.home)
    port = settings.serve_port
    if not port or (record is not None and _missed_port(settings, record) is None):
        return None
    deadline = time.monotonic() + LEAVING_S
    while (why := _bind_error(settings)) is not None:
        if not is_fixed or time.monotonic() > deadline:
            break
        time.sleep(LOOK_EVERY_S / 10)
    if why is not None and is_fixed:
        raise StateError(
            f"services cannot be called at {settings.serve_host}:{port}: {why}",
            hint="end what listens there, or let it choose a port: `shoal up --serve-on 127.0.0.1:0`",
        )
    return None if why is None else port


def _missed_port(settings: Settings, record: dict[str, Any] | None) -> int | None:
    """Return the usual port of services if the running data plane has another, else None."""
    port = settings.serve_port
    if record is None or port in (0, urllib.parse.urlsplit(str(record["url"])).port):
        return None
    return port


def _bind_error(settings: Settings) -> str | None:
    """Return why the services' address cannot be bound, or None if it can."""
    host = settings.serve_host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, settings.serve_port))
            tried.listen()
        except OSError as error:
            return error.strerror or str(error)
    return None


def _start(
    settings: Settings, token: str, before: dict[str, Any] | None, ports: Iterable[int]
) -> subprocess.Popen[bytes] | None:
    """Start a data plane and wait until it listens at the first of these ports that it can have. Blocks.

    `before`: the data plane that it replaces. It shares that port until the other ends, and no other port.
    """
    home = settings.home
    shared = urllib.parse.urlsplit(str(before["url"])).port if before is not None else None
    write_private(home / "keys" / "data-plane.token", token + "\n")
    for port in dict.fromkeys(ports):
        child = _spawn(settings, port, ["--replaces"] if port == shared else [])
        address = _address(child)
        if address is None:
            continue
        scheme = "https" if settings.tls_cert else "http"
        facts: dict[str, Any] = {
            "pid": child.pid,
            "ticks": start_ticks(child.pid),
            "arguments": _arguments(settings),
        }
        facts |= {"url": f"{scheme}://{address}", "home": home_identity(home)}
        try:
            write_private(home / DATA_PLANE_FILE, json.dumps(facts) + "\n")
        except OSError:
            child.kill()  # no later server would find it
            child.wait()
            raise
        log.info("data_plane.started", pid=child.pid, address=address)
        return child
    log.warning("data_plane.not_started", log=str(home / "logs" / "serving.log"))
    return None


def _arguments(settings: Settings, port: int | None = None) -> list[str]:
    """Return the arguments. `port` replaces the one in the settings."""
    host = f"[{settings.serve_host}]" if ":" in settings.serve_host else settings.serve_host
    arguments = ["--listen", f"{host}:{settings.serve_port if port is None else port}"]
    arguments += ["--home", str(settings.home), "--processes", str(settings.serve_processes)]
    if settings.shared is not None:
        arguments += ["--leader", str(settings.leader_file)]
    if settings.data_plane == "haproxy":
        arguments.append("--haproxy")
    if settings.tls_cert and settings.tls_key:
        arguments += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    return arguments


def _spawn(settings: Settings, port: int, more: list[str]) -> subprocess.Popen[bytes]:
    with (settings.home / "logs" / "serving.log").open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.serving", *_arguments(settings, port), *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_file,
            cwd="/",
            start_new_session=True,
        )


def _address(child: subprocess.Popen[bytes]) -> str | None:
    """Return where it listens, from its first line; None if it ended or printed something else."""
    assert child.stdout is not None
    late = threading.Timer(START_S, child.kill)
    late.start()
    line = child.stdout.readline().decode("ascii", "replace")
    late.cancel()
    child.stdout.close()
    if not line.startswith("listening on "):
        child.kill()
        child.wait()
        return None
    return line.removeprefix("listening on ").strip()


HOLD_AGAIN_S = 120.0

ports_log = structlog.get_logger()


def hold_ports(settings: Settings, listens_at: int) -> None:
    """Hold the ports from a thread as long as this process lives. `settings`: as the user set them."""
    if os.geteuid() == 0 and firewall.find_nft() is not None:
        threading.Thread(
            target=_hold_loop, args=(settings, listens_at), name="held-ports", daemon=True
        ).start()


def _hold_loop(settings: Settings, listens_at: int) -> None:
    problem = ""
    while True:
        try:
            firewall.hold(ports_to_hold(settings, listens_at))
            problem = ""
        except firewall.FirewallFailed as error:
            if error.message != problem:
                ports_log.warning("ports.not_held", error=error.message)
            problem = error.message
        time.sleep(HOLD_AGAIN_S)


def ports_to_hold(settings: Settings, listens_at: int) -> set[int]:
    """Return the ports that callers know: the usual ones, those that were named, and where the data plane
    listens instead. Leave out a port that the kernel chose (`:0`): it may give a job that number, too.
    """
    held = {settings.serve_port, settings.port if settings.port == listens_at else 0}
    record = running_data_plane(settings.home)
    if settings.serve_port and record is not None:
        held.add(urlsplit(str(record["url"])).port or 0)
    return held - {0}
