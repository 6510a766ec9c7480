"""Start the control plane of this home in the background and wait until it answers; stop it again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.cli import restore
from shoal.cli.home import (
    adopt_first_token,
    ask_for_token,
    load_remembered,
    prepare_home,
    refuse_unsafe_files,
    remember,
    settings_for,
)
from shoal.cli.show import at_work, note
from shoal.client.credentials import read_server_file
from shoal.errors import ServerUnreachable, ShoalError, StateError
from shoal.home import holder
from shoal.settings import Settings, load_settings

START_S = 60.0
STOP_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class Running:
    """A control plane that answers. `first_token` is set at a home's first start, and after a loss."""

    url: str
    pid: int
    was_running: bool
    first_token: str | None = None
    taken_port: int | None = None
    """The port it would have had, where this start found it taken."""
    role: str = "leader"
    """Or `standby`: another one leads."""
    leader: str | None = None
    """Where that one listens, if it is known."""
    taken_serve_port: int | None = None
    """The port services would have had, where this start found it taken."""


class StartFailed(ShoalError):
    """The server process ended before it listened; its own words were printed."""

    code = "server.start_failed"
    exit_code = 6


def start(flags: dict[str, str | None] | None = None) -> Running:
    """The control plane of this home, started if it is not running. Returns when it answers.

    `StateError` where one runs with other options than `flags` ask for.
    """
    settings, options = settings_for(flags or {})
    prepare_home(settings.home)
    refuse_unsafe_files(settings)
    restore.refuse_copy(settings)
    pid = holder(settings.home)
    if pid is not None:
        _refuse_other_options(settings.home, pid, flags or {})
    else:
        adopt(settings, options)
    with at_work("starting the control plane ..."):
        child = _spawn(settings, options) if pid is None else None
        return _wait_for(settings, child)


def adopt(settings: Settings, options: dict[str, str]) -> None:
    """Remember what this start is made with.

    `SpecError` for a policy that no server could start with: it would hold up the next `shoal up` as well.
    """
    if settings.policy is not None:
        from shoal.control.policy_file import read_policy

        read_policy(settings.policy)
    remember(settings.home, options)
    if ask_for_token(settings):
        note("note: no token for this home is saved; another one is made (`shoal token list` shows all)")


def _refuse_other_options(home: Path, pid: int, flags: dict[str, str | None]) -> None:
    """What a running control plane was started with cannot be changed under it."""
    there = load_remembered(home)
    asked = {name: text for name, text in flags.items() if text is not None}
    if load_settings({**there, **asked}) == load_settings(there):
        return
    other = [
        f"`--{name.removesuffix('_url').replace('_', '-')} {text}` (there: {there.get(name, 'not given')})"
        for name, text in asked.items()
        if there.get(name) != text
    ]
    raise StateError(
        f"a control plane is already running (process {pid}), but not with {', '.join(other)}",
        hint="`shoal down` first, then the same again; running jobs run on meanwhile",
    )


def stop(home: Path) -> int | None:
    """Ask the control plane to end and wait until it has. None if none was running."""
    pid = holder(home)
    if not pid:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while holder(home) == pid:
        if time.monotonic() > deadline:
            raise StateError(f"process {pid} still runs after {STOP_S:g} s", hint=f"`kill -9 {pid}` is safe")
        time.sleep(POLL_S)
    return pid


def environment(options: dict[str, str], home: Path) -> dict[str, str]:
    """What the server process is told: the options as variables, none of them in its argument list."""
    told = {f"SHOAL_{name.upper()}": text for name, text in options.items()}
    kept = {k: v for k, v in os.environ.items() if k not in ("SHOAL_TOKEN", "SHOAL_URL")}
    return {**kept, **told, "SHOAL_HOME": str(home)}


def _spawn(settings: Settings, options: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process of its own session: it outlives this command and its terminal."""
    words = settings.home / "logs" / "control.err"
    descriptor = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.serve"],
            env=environment(options, settings.home),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _wait_for(settings: Settings, child: subprocess.Popen[bytes] | None) -> Running:
    """Until the holder of the home has said where it listens. `child` None: somebody else started it."""
    home = settings.home
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        server = read_server_file(home)
        pid = child.pid if child else holder(home)
        if server and pid and server.get("pid") == pid:
            taken, moved = (
                server.get(which) if child else None for which in ("taken_port", "taken_serve_port")
            )
            role = str(server.get("role", "leader"))
            token = adopt_first_token(settings) if role == "leader" else None
            leader = server.get("leader")
            return Running(server["url"], pid, child is None, token, taken, role, leader, moved)
        if child is not None and child.poll() is not None:
            if child.returncode == StateError.exit_code and holder(home) is not None:
                child = None  # another `shoal up` was faster: wait for that one
                continue
            raise _failure(home, child.returncode)
        if child is None and pid is None:
            raise _failure(home, None)
        time.sleep(POLL_S)
    raise ServerUnreachable(
        f"the control plane did not answer within {START_S:g} s", hint=f"read {home / 'logs' / 'control.log'}"
    )


def _failure(home: Path, code: int | None) -> StartFailed:
    """The server's own last words, as one error."""
    words = home / "logs" / "control.err"
    lines = words.read_text(encoding="utf-8", errors="replace").splitlines() if words.exists() else []
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    why = "; ".join(told) or (lines[-1] if lines else "it said nothing")
    return StartFailed(
        f"the control plane ended at once (exit code {code}): {why}",
        hint=hints[-1] if hints else f"read {words}, or ask `shoal doctor`",
    )
