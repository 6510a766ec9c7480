"""Keep the data plane of services beside the server: a process of its own, begun with the first service.

It lives on when the server ends, however it ends, and is found again by the next one: requests to services
do not notice. Only a data plane that is told of another server, or that died, is begun anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from shoal.client.credentials import write_private
from shoal.control import ControlPlane
from shoal.identity import data_plane_token
from shoal.runtime.spool import start_ticks
from shoal.settings import Settings

LOOK_EVERY_S = 0.5
START_S = 20.0
AGAIN_S = 5.0
"""After one that would not start."""
WAIT_S = 3
"""How long a table's answer may wait for a newer one: less than a data plane waits for an answer."""
FACTS = "serving.json"

log = structlog.get_logger()


async def keep(settings: Settings, plane: ControlPlane) -> None:
    """Until cancelled; what runs then runs on."""
    book = plane.core.services
    child: subprocess.Popen[bytes] | None = None
    while True:
        if child is not None:
            child.poll()  # one that has ended is there until somebody asks
        found = running(settings.home)
        book.url = str(found["url"]) if found else None
        if found is not None and (found["server"], found.get("kind", "embedded")) != (
            settings.url,
            settings.data_plane,
        ):
            stop(settings.home)
            await anyio.to_thread.run_sync(_until_free, str(found["url"]))
        elif found is None and book.table.services:
            token = data_plane_token(plane.core.key)
            child = await anyio.to_thread.run_sync(_start, settings, token)
            if child is None:
                await anyio.sleep(AGAIN_S)
        await anyio.sleep(LOOK_EVERY_S)


def running(home: Path) -> dict[str, Any] | None:
    """The data plane of this home; None if there is none, or another process has its number by now."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts: dict[str, Any] = json.loads((home / FACTS).read_text(encoding="utf-8"))
        if start_ticks(int(facts["pid"])) == facts["ticks"]:
            return facts
    return None


def stop(home: Path) -> int | None:
    """Have it finish what it has and end; None if there is none."""
    found = running(home)
    (home / FACTS).unlink(missing_ok=True)
    if found is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(found["pid"]), signal.SIGTERM)
    return int(found["pid"])


def _until_free(url: str) -> None:
    """The next one is to have the same port: wait until this one has given it up. Blocks."""
    parts = urllib.parse.urlsplit(url)
    deadline = time.monotonic() + START_S
    with contextlib.suppress(OSError):  # refused: nobody listens
        while time.monotonic() < deadline:
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1.0).close()
            time.sleep(0.05)


def _start(settings: Settings, token: str) -> subprocess.Popen[bytes] | None:
    """Begin one and wait until it listens: where it should, or where it can. Blocks."""
    home = settings.home
    secret = home / "keys" / "data-plane.token"
    write_private(secret, token + "\n")
    for port in dict.fromkeys((settings.serve_port, 0)):
        child = _spawn(settings, secret, port)
        address = _address(child)
        if address is None:
            continue
        scheme = "https" if settings.tls_cert else "http"
        facts = {"pid": child.pid, "ticks": start_ticks(child.pid), "server": settings.url}
        facts["kind"] = settings.data_plane
        write_private(home / FACTS, json.dumps({**facts, "url": f"{scheme}://{address}"}) + "\n")
        log.info("data_plane.started", pid=child.pid, address=address)
        return child
    log.warning("data_plane.not_started", log=str(home / "logs" / "serving.log"))
    return None


def _spawn(settings: Settings, secret: Path, port: int) -> subprocess.Popen[bytes]:
    host = f"[{settings.serve_host}]" if ":" in settings.serve_host else settings.serve_host
    told = ["--listen", f"{host}:{port}", "--token-file", str(secret)]
    told += ["--table", f"{settings.url}/v1/serving/table?wait_s={WAIT_S}"]
    told += ["--report", f"{settings.url}/v1/serving/reports"]
    told += ["--cache", str(settings.home / "serving-table.json")]
    if settings.data_plane == "haproxy":
        told.append("--haproxy")
    if settings.tls_cert and settings.tls_key:
        told += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    with (settings.home / "logs" / "serving.log").open("ab") as words:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.serving", *told],
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
