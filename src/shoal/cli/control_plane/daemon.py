"""Start the control plane of this home in the background and wait until it answers; stop it.

`request_restore` records the operator's decision that a copied home becomes a home of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shoal import home_identity
from shoal.cli.control_plane.home import (
    SQLITE,
    adopt_first_token,
    ask_for_token,
    load_remembered,
    prepare_home,
    refuse_unsafe_files,
    remember,
    settings_for,
)
from shoal.cli.output import at_work, note
from shoal.client.credentials import read_server_file, write_private
from shoal.errors import ServerUnreachable, ShoalError, SpecError, StateError
from shoal.home import pid_holding
from shoal.settings import Settings, load_settings

START_S = 60.0
STOP_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class RunningServer:
    """A control plane that answers. `first_token` is set at a home's first start, and after a loss."""

    url: str
    pid: int
    was_running: bool
    first_token: str | None = None
    taken_port: int | None = None
    """The usual port, if this start found it taken."""
    role: str = "leader"
    """`leader`, or `standby` while another control plane leads."""
    leader: str | None = None
    """For a standby: where the leader listens, if that is known."""
    taken_serve_port: int | None = None
    """The usual port of services, if this start found it taken."""


class StartFailed(ShoalError):
    """The server process ended before it listened. The message has its own errors."""

    code = "server.start_failed"
    exit_code = 6


def start(flags: dict[str, str | None] | None = None) -> RunningServer:
    """Start the control plane of this home unless it runs, and return when it answers.

    Raise `StateError` if it runs with other options than `flags`.
    """
    settings, options = settings_for(flags or {})
    prepare_home(settings.home)
    refuse_unsafe_files(settings)
    refuse_copy(settings)
    pid = pid_holding(settings.home)
    if pid is not None:
        _refuse_other_options(settings.home, pid, flags or {})
    else:
        adopt(settings, options)
    with at_work("starting the control plane ..."):
        child = _spawn(settings, options) if pid is None else None
        return _wait_for(settings, child)


def adopt(settings: Settings, options: dict[str, str]) -> None:
    """Remember the options of this start.

    Raise `SpecError` for a policy that no server could start with: remembering it would also block the next
    `shoal up`.
    """
    if settings.policy is not None:
        from shoal.control.commands.policy import read_policy

        read_policy(settings.policy)
    remember(settings.home, options)
    if ask_for_token(settings):
        note("note: no token for this home is saved; another one is made (`shoal token list` shows all)")


def _refuse_other_options(home: Path, pid: int, flags: dict[str, str | None]) -> None:
    """Refuse flags that would change a running control plane: its options cannot be changed while it runs."""
    there = load_remembered(home)
    requested = {name: text for name, text in flags.items() if text is not None}
    if load_settings({**there, **requested}) == load_settings(there):
        return
    other = [
        f"`--{name.removesuffix('_url').replace('_', '-')} {text}` (there: {there.get(name, 'not given')})"
        for name, text in requested.items()
        if there.get(name) != text
    ]
    raise StateError(
        f"a control plane is already running (process {pid}), but not with {', '.join(other)}",
        hint="`shoal down` first, then the same command again; jobs keep running meanwhile",
    )


def stop(home: Path) -> int | None:
    """Ask the control plane to end and wait until it has. Return its pid, or None if none was running."""
    pid = pid_holding(home)
    if not pid:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while pid_holding(home) == pid:
        if time.monotonic() > deadline:
            raise StateError(f"process {pid} still runs after {STOP_S:g} s", hint=f"`kill -9 {pid}` is safe")
        time.sleep(POLL_S)
    return pid


def server_environment(options: dict[str, str], home: Path) -> dict[str, str]:
    """Return the server's environment: it gets its options as variables, none in its argument list."""
    variables = {f"SHOAL_{name.upper()}": text for name, text in options.items()}
    kept = {k: v for k, v in os.environ.items() if k not in ("SHOAL_TOKEN", "SHOAL_URL")}
    return {**kept, **variables, "SHOAL_HOME": str(home)}


def _spawn(settings: Settings, options: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the server in a session of its own, so that it outlives this command and its terminal."""
    error_log = settings.home / "logs" / "control.err"
    descriptor = os.open(error_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cli.control_plane.server"],
            env=server_environment(options, settings.home),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _wait_for(settings: Settings, child: subprocess.Popen[bytes] | None) -> RunningServer:
    """Wait until the home's server has written its address. `child` None: another command started it."""
    home = settings.home
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        server = read_server_file(home)
        pid = child.pid if child else pid_holding(home)
        if server and pid and server.get("pid") == pid:
            taken, moved = (
                server.get(which) if child else None for which in ("taken_port", "taken_serve_port")
            )
            role = str(server.get("role", "leader"))
            token = adopt_first_token(settings) if role == "leader" else None
            leader = server.get("leader")
            return RunningServer(server["url"], pid, child is None, token, taken, role, leader, moved)
        if child is not None and child.poll() is not None:
            if child.returncode == StateError.exit_code and pid_holding(home) is not None:
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
    """Return the server's own last errors as one error."""
    error_log = home / "logs" / "control.err"
    lines = error_log.read_text(encoding="utf-8", errors="replace").splitlines() if error_log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    why = "; ".join(errors) or (lines[-1] if lines else "it printed nothing")
    return StartFailed(
        f"the control plane ended at once (exit code {code}): {why}",
        hint=hints[-1] if hints else f"read {error_log}, or run `shoal doctor`",
    )


INHERITED = ("database_url", "shared")
"""Options of a copied home that may name what its original uses."""


def refuse_copy(settings: Settings) -> None:
    """Raise `CopiedHome` if the home's records name another directory and the operator has not decided."""
    if settings.state_dir.is_dir():
        home_identity.refuse_copy(settings.state_dir, is_bound_to_machine=settings.is_bound_to_machine)


def request_restore(flags: dict[str, str | None], *, is_restored: bool, runs_again: bool) -> None:
    """Record a restore for the next start. Raise `StateError` if a control plane runs or there is no home."""
    if runs_again and not is_restored:
        raise SpecError("`--rerun` needs `--restored`", hint="shoal up --restored --rerun")
    if not is_restored:
        return
    settings, _ = settings_for(flags)
    _refuse_inherited(settings, flags)
    home = settings.state_dir
    if (pid := pid_holding(settings.home)) is not None:
        raise StateError(f"a control plane is already running here (process {pid})", hint="shoal status")
    if not home.is_dir():
        raise StateError(f"there is no {home}, so there is nothing to restore", hint="shoal up")
    # First: a start after a kill here must not restore into the original's database.
    inherited = {name: text for name in INHERITED if (text := flags.get(name)) is not None}
    if inherited:
        remember(settings.home, load_remembered(settings.home) | inherited)
    earlier = home_identity.read_request(home)  # it may have been carried out in part
    site_id = os.urandom(16).hex() if earlier is None else earlier.site_id
    word = home_identity.RestoreRequest(
        runs_again=runs_again, directory=home_identity.identify(home), site_id=site_id
    )
    write_private(home / home_identity.REQUEST, home_identity.encode_record(word).decode() + "\n")


def _refuse_inherited(settings: Settings, flags: dict[str, str | None]) -> None:
    """Raise `SpecError` if the copy could settle jobs in its original's database.

    The options of a copied home, or a variable, may name what the original uses. `shoal restore` drops them:
    it leaves a home without a `site.json`, whose database was named for it.
    """
    is_unpacked = settings.shared is None and home_identity.read_identity(settings.home) is None
    is_elsewhere = not _is_in_home(settings.home, settings.store_url)
    missing: list[str] = []
    if is_elsewhere and not is_unpacked and flags.get("database_url") is None:
        missing.append(f"the database {_database_label(settings.store_url)}")
    if settings.shared is not None and flags.get("shared") is None:
        missing.append(f"the shared directory {settings.shared}")
    if missing:
        raise SpecError(
            f"{settings.home} would be restored with {' and '.join(missing)}, which may be its original's: "
            "every open job there would end",
            hint="name what the copy is to use: `shoal up --restored --database URL` with a copy of the "
            "database, or with the same one if the original is gone for good; and `--shared DIR`, or "
            "`--shared none`",
        )


def _is_in_home(home: Path, url: str) -> bool:
    """Whether the database is a file of this home."""
    file = Path(os.path.realpath(url.removeprefix(SQLITE)))
    return url.startswith(SQLITE) and file.is_relative_to(home.resolve())


def _database_label(url: str) -> str:
    """Return the host and the database's name, or the file. The rest of the URL may hold a password."""
    if url.startswith(SQLITE):
        return url.removeprefix(SQLITE)
    parts = urlsplit(url)
    return f"{parts.hostname or ''}{parts.path}"


def restore_note(*, runs_again: bool) -> str:
    """Say what happens to the copy's open jobs."""
    if runs_again:
        return "the copy becomes a home of its own; jobs that ran when it was made start again here"
    return (
        "the copy becomes a home of its own; its open jobs end here (`shoal queue --all`, "
        "`shoal retry JOB`), its services have no replicas (`shoal scale`), and the original is not touched"
    )
