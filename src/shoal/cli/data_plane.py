"""Keep the data plane of services beside the server: a process of its own, begun with the first service.

It lives on when the server ends, however it ends, and is found again by the next one, which it finds by the
home: requests to services do not notice. Only one that died, was told other things, or listens elsewhere
while its own port is free again, is begun anew.
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

import anyio
import anyio.to_thread
import structlog

from shoal.cli.data_plane_facts import FACTS, directory_of, running, terminate
from shoal.client.credentials import write_private
from shoal.control import ControlPlane
from shoal.errors import StateError
from shoal.identity import data_plane_token
from shoal.runtime.spool import start_ticks
from shoal.settings import Settings

LOOK_EVERY_S = 0.5
START_S = 20.0
AGAIN_S = 5.0
"""After one that would not start."""
LEAVING_S = 3.0
"""For one that `shoal down --jobs` has just told to end: it lets go of its port first."""

log = structlog.get_logger()

MAX_LOG_BYTES = 16 << 20
"""Of `serving.log`; as much again is kept beside it."""


async def keep(settings: Settings, plane: ControlPlane) -> None:
    """Until cancelled; what runs then runs on.

    Where the disk or the machine does not allow a turn, a later one does what is left: the control plane goes
    on without it.
    """
    child: subprocess.Popen[bytes] | None = None
    problem = ""
    while True:
        if child is not None:
            child.poll()  # one that has ended is there until somebody asks
        try:
            child = await _keep_once(settings, plane, child)
            problem = ""
        except OSError as error:
            if str(error) != problem:
                log.warning("data_plane.not_kept", error=str(error))
            problem = str(error)
        await anyio.sleep(AGAIN_S if problem else LOOK_EVERY_S)


async def _keep_once(
    settings: Settings, plane: ControlPlane, child: subprocess.Popen[bytes] | None
) -> subprocess.Popen[bytes] | None:
    """One turn. Returns the data plane that this process began last."""
    await anyio.to_thread.run_sync(bound_log, settings.home / "logs" / "serving.log")
    book, found = plane.core.services, running(settings.home)
    book.url = str(found["url"]) if found else None
    book.taken_port = _missed_port(settings, found)
    is_as_told = found is not None and found.get("told") == _told(settings)
    returns = is_as_told and book.taken_port is not None and await _is_free(settings)
    if not book.table.services or (is_as_told and not returns):
        return child
    token = data_plane_token(plane.core.key)
    # One that would return stays where it is if the port is taken meanwhile.
    ports = (settings.serve_port,) if returns else (settings.serve_port, 0)
    child = await anyio.to_thread.run_sync(_start, settings, token, found, ports)
    if child is None:
        await anyio.sleep(AGAIN_S)
    elif found is not None:
        terminate(found)  # who takes its place accepts connections already
    return child


async def _is_free(settings: Settings) -> bool:
    """Whether services can have their port, and not only while its holder is begun anew: two homes on a
    machine may want one port.
    """
    if _refusal(settings) is not None:
        return False
    await anyio.sleep(AGAIN_S)
    return _refusal(settings) is None


def bound_log(path: Path) -> None:
    """Keep the data plane's log below `MAX_LOG_BYTES`: the older part goes to a second file.

    The data plane appends to the file for as long as it lives, so the file is emptied and not replaced. Lines
    written between the copy and that are lost. Raises nothing: a disk that does not take the copy gets the
    room of the log back, and a log that cannot be emptied is no reason to keep no data plane.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MAX_LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)


def taken_port(settings: Settings, *, is_fixed: bool) -> int | None:
    """The port that services should have, where somebody else listens on it. Blocks for a moment.

    `is_fixed`: it was asked for, and `StateError` where it cannot be had. Asked before the first service is
    there: who named a port should not learn with that one that it is another.
    """
    found = running(settings.home)
    port = settings.serve_port
    if not port or (found is not None and _missed_port(settings, found) is None):
        return None
    deadline = time.monotonic() + LEAVING_S
    while (why := _refusal(settings)) is not None:
        if not is_fixed or time.monotonic() > deadline:
            break
        time.sleep(LOOK_EVERY_S / 10)
    if why is not None and is_fixed:
        raise StateError(
            f"services cannot be called at {settings.serve_host}:{port}: {why}",
            hint="end what listens there, or let it choose a port: `shoal up --serve-on 127.0.0.1:0`",
        )
    return None if why is None else port


def _missed_port(settings: Settings, found: dict[str, Any] | None) -> int | None:
    """The port that services should have, if the data plane found has another; None: it has none to miss."""
    port = settings.serve_port
    if found is None or port in (0, urllib.parse.urlsplit(str(found["url"])).port):
        return None
    return port


def _refusal(settings: Settings) -> str | None:
    """Why nobody can listen where services should be called; None where one can."""
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
    """Begin one and wait until it listens at the first of these ports that it can have. Blocks.

    `before`: the one whose place it takes. Its port is shared until it ends; nobody else's is.
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
        facts: dict[str, Any] = {"pid": child.pid, "ticks": start_ticks(child.pid), "told": _told(settings)}
        facts |= {"url": f"{scheme}://{address}", "home": directory_of(home)}
        try:
            write_private(home / FACTS, json.dumps(facts) + "\n")
        except OSError:
            child.kill()  # nobody would find it again
            child.wait()
            raise
        log.info("data_plane.started", pid=child.pid, address=address)
        return child
    log.warning("data_plane.not_started", log=str(home / "logs" / "serving.log"))
    return None


def _told(settings: Settings, port: int | None = None) -> list[str]:
    """`port`: where the one in the settings cannot be had."""
    host = f"[{settings.serve_host}]" if ":" in settings.serve_host else settings.serve_host
    told = ["--listen", f"{host}:{settings.serve_port if port is None else port}"]
    told += ["--home", str(settings.home), "--processes", str(settings.serve_processes)]
    if settings.shared is not None:
        told += ["--leader", str(settings.leader_file)]
    if settings.data_plane == "haproxy":
        told.append("--haproxy")
    if settings.tls_cert and settings.tls_key:
        told += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    return told


def _spawn(settings: Settings, port: int, more: list[str]) -> subprocess.Popen[bytes]:
    with (settings.home / "logs" / "serving.log").open("ab") as words:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.serving", *_told(settings, port), *more],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=words,
            cwd="/",
            start_new_session=True,
        )


def _address(child: subprocess.Popen[bytes]) -> str | None:
    """Where it listens, as its first line says; None if it ended, or would not say."""
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
