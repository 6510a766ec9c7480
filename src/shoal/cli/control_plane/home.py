"""The directory a control plane lives in: its lock, its options, its files, and its data plane's record.

One process at a time holds `server.lock` for its whole life. The kernel releases the lock when that process
dies, however it dies, so whether a control plane runs here has one answer.

`data_plane.py` supervises the data plane; this module only reads its record, because `down` needs no server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shoal.client.credentials import LOCAL, Credentials, write_private
from shoal.errors import SpecError, StateError
from shoal.home import LOCK, PORT, pid_holding
from shoal.ownership import Problem, Secrecy, problems_inside, problems_on_path, refuse_unsafe
from shoal.runtime.files.spool import start_ticks
from shoal.settings import Settings, load_settings, merge_options

REMEMBERED = "options.json"
OWN_PORT = "own-port"
SECRET_FILES = ("credentials.json", "options.json")
SQLITE = "sqlite:///"


def prepare_home(home: Path) -> None:
    """Make the directory, for its owner alone. Raise `SpecError` if it cannot be used, or `UnsafePath` if
    others can change it or a name on the way to it, because they may have planted a key or a claim.
    """
    try:
        _make_above(home)
        home.mkdir(mode=0o700, exist_ok=True)
        refuse_unsafe_home(home)
        (home / "logs").mkdir(mode=0o700, exist_ok=True)
        facts = home.stat()
        if facts.st_uid == os.getuid():
            # Others may pass through but not list it: without bubblewrap, jobs reach their files this way.
            home.chmod(0o700 | facts.st_mode & stat.S_IXOTH)
    except OSError as error:
        raise SpecError(
            f"cannot use {home}: {error.strerror}", hint="name another with `export SHOAL_HOME=DIR`"
        ) from error


def refuse_unsafe_home(home: Path) -> None:
    """Raise `UnsafePath` if others can change the home or a name on the way to it, or read its secrets."""
    refuse_unsafe(_unsafe(home))


def _make_above(home: Path) -> None:
    """Make the parents. Others may pass: without bubblewrap, jobs reach their files this way."""
    for above in reversed(home.parents):
        if not above.exists():
            above.mkdir()
            above.chmod(0o755)


def _unsafe(home: Path) -> Iterator[Problem]:
    yield from problems_on_path(home)
    yield from problems_inside(home)
    for name in SECRET_FILES:
        yield from problems_on_path(home / name, Secrecy.OWNER)
    yield from problems_inside(home / "keys", Secrecy.OWNER)
    for name in ("spool", "mailbox"):
        yield from problems_inside(home / name)
        yield from problems_inside(home / name / "live")
        # A claim there names a process that Shoal kills.
        live = home / name / "live"
        for attempt in sorted(live.iterdir()) if live.is_dir() else ():
            yield from problems_inside(attempt)
    yield from problems_inside(home / "clusters")


def refuse_unsafe_files(settings: Settings) -> None:
    """Raise `UnsafePath` if others can change a file outside the home that the server trusts."""
    problem_lists = [
        problems_on_path(file) for file in (settings.tls_cert, settings.policy) if file is not None
    ]
    if settings.tls_key is not None:
        problem_lists.append(problems_on_path(settings.tls_key, Secrecy.GROUP))
    if settings.store_url.startswith(SQLITE):
        database = settings.store_url.removeprefix(SQLITE)
        problem_lists += [problems_on_path(f"{database}{end}") for end in ("", "-wal", ".lock")]
        problem_lists.append(problems_on_path(Path(database).absolute().parent))
    refuse_unsafe(problem for problems in problem_lists for problem in problems)


def hold(home: Path) -> IO[str]:
    """Lock the home for this process; closing the file releases it. Raise `StateError` if another has it."""
    # Mode 0600: a process that can open the file can lock it and keep a control plane from starting.
    file = os.fdopen(
        os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+", encoding="ascii"
    )
    # `pid_holding` takes the lock for an instant, so wait briefly to tell that from a running control plane.
    for pause in (0.05, 0.1, 0.2, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if pause is None:
                file.close()
                raise StateError(
                    f"a control plane is already running in {home}", hint="see it with `shoal status`"
                ) from error
            time.sleep(pause)
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def load_remembered(home: Path) -> dict[str, str]:
    """Return the options of the last `shoal up`: a start without flags brings the same cluster back."""
    try:
        options = json.loads((home / REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in options.items()} if isinstance(options, dict) else {}


def settings_for(flags: dict[str, str | None]) -> tuple[Settings, dict[str, str]]:
    """Return checked settings and their options: flags, variables, else those of the last start."""
    home = load_settings({}, {k: v for k, v in os.environ.items() if k in ("SHOAL_HOME", "HOME")}).home
    options = merge_options(flags, os.environ, load_remembered(home))
    return load_settings(options), options


def remember(home: Path, options: dict[str, str]) -> None:
    write_private(home / REMEMBERED, json.dumps(options, indent=2) + "\n")


def write_server_file(home: Path, facts: dict[str, Any]) -> None:
    """Tell clients and supervisors where the control plane listens. Writes the file whole or not at all."""
    write_private(home / "server.json", json.dumps(facts) + "\n")


def certificates_in(pem: str) -> str:
    """Return the certificates of a PEM file, without the key that may stand beside them."""
    blocks = re.findall(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", pem, re.DOTALL)
    return "".join(f"{block}\n" for block in blocks)


def write_leader_file(path: Path, facts: dict[str, Any]) -> None:
    """Tell supervisors where the leader listens. The file is written whole or not at all."""
    write_private(path, json.dumps(facts) + "\n")


def remember_port(home: Path, port: int) -> None:
    """Save the current port for clients. The first port ever stays the home's own."""
    write_private(home / PORT, f"{port}\n")
    if own_port(home) is None:
        write_private(home / OWN_PORT, f"{port}\n")


def own_port(home: Path) -> int | None:
    """Return the port that this home's control plane prefers; None before its first start."""
    with contextlib.suppress(OSError, ValueError):
        return int((home / OWN_PORT).read_text(encoding="ascii"))
    return None


def remove_server_file(home: Path, pid: int) -> None:
    """On a clean end, remove what this process wrote, but not what another process wrote since."""
    path = home / "server.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")).get("pid") == pid:
            path.unlink()


def token_of_others(home: Path) -> str:
    """Say how to get a token for a home that shares a directory with others; "" if it can make its own."""
    if load_remembered(home).get("shared", "none") == "none":
        return ""
    return (
        "`shoal login local` with a token that `shoal token create` made where another control plane of this "
        "cluster is; if none has a token any more, `shoal down` and `shoal up --admin-token`"
    )


def ask_for_admin_token(flags: dict[str, str | None]) -> None:
    """Request an admin token from the next start, whatever tokens there are. Raise `StateError` if a control
    plane runs. A user who can write here and read the signing key could make a token anyway.
    """
    settings, _ = settings_for(flags)
    prepare_home(settings.home)
    if (pid := pid_holding(settings.home)) is not None:
        raise StateError(
            f"a control plane is already running here (process {pid})", hint="`shoal down` first"
        )
    write_private(settings.home / "keys" / "asked-token", "")


def ask_for_token(settings: Settings) -> bool:
    """Request a token from the next start if this home is not new and has none.

    Homes that share a directory with other control planes do not: the other homes have tokens.
    """
    keys = settings.home / "keys"
    is_new = not (keys / "signing.key").exists() or (keys / "first-token").exists()
    if is_new or settings.shared is not None or os.environ.get("SHOAL_TOKEN"):
        return False
    if Credentials(settings.home).token(LOCAL) is not None:
        return False
    write_private(keys / "asked-token", "")
    return True


def adopt_first_token(settings: Settings) -> str | None:
    """Return the admin token of the very first start, save it for this user, and delete it from the home.

    Return None at later starts. The server that commands talk to stays as it was chosen.
    """
    waiting = settings.state_dir / "keys" / "first-token"
    try:
        token = waiting.read_text(encoding="ascii").strip()
        Credentials(settings.home).save(LOCAL, token)
        waiting.unlink()
    except FileNotFoundError:
        return None  # two processes read it, and the other removed it
    return token


DATA_PLANE_FILE = "serving.json"


def running_data_plane(home: Path) -> dict[str, Any] | None:
    """Return the record of this home's data plane; None if there is none, if another process has its pid by
    now, or if the file was copied from another home.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts: dict[str, Any] = json.loads((home / DATA_PLANE_FILE).read_text(encoding="utf-8"))
        if facts["home"] != home_identity(home):
            return None
        if start_ticks(int(facts["pid"])) == facts["ticks"] and not _is_dead(int(facts["pid"])):
            return facts
    return None


def home_identity(home: Path) -> list[int]:
    """Return what distinguishes the home from a copy of it."""
    facts = home.stat()
    return [facts.st_dev, facts.st_ino]


def stop_data_plane(home: Path) -> int | None:
    """Have the data plane finish its requests and end; None if there is none."""
    record = running_data_plane(home)
    (home / DATA_PLANE_FILE).unlink(missing_ok=True)
    return terminate_data_plane(record) if record is not None else None


def terminate_data_plane(record: dict[str, Any]) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(record["pid"]), signal.SIGTERM)
    return int(record["pid"])


def _is_dead(pid: int) -> bool:
    """Whether the process has ended. Reaps it if it is our child: its parent may have become this program."""
    state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    return state in (b"Z", b"X")
