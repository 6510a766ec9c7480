"""The directory a control plane lives in: who holds it, what it was last started with.

One process at a time holds `server.lock` for its whole life; the kernel lets go of it when that process
dies, however it dies. So `is somebody running here` has one answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shoal.client.credentials import LOCAL, Credentials, write_private
from shoal.errors import SpecError, StateError
from shoal.home import LOCK, PORT, holder
from shoal.ownership import Problem, Secrecy, problems_inside, problems_on_the_way, refuse_unsafe
from shoal.settings import Settings, load_settings, merge_options

REMEMBERED = "options.json"
OWN_PORT = "own-port"
SECRET_FILES = ("credentials.json", "options.json")
SQLITE = "sqlite:///"


def prepare_home(home: Path) -> None:
    """Make the directory, for its owner alone. Raises `SpecError` if it cannot be used: `UnsafePath` where
    others can change it, or a name on the way to it, since they may have laid down a key or a claim.
    """
    try:
        _make_above(home)
        home.mkdir(mode=0o700, exist_ok=True)
        refuse_unsafe_home(home)
        (home / "logs").mkdir(mode=0o700, exist_ok=True)
        facts = home.stat()
        if facts.st_uid == os.getuid():
            # Others may pass through, never look: without bubblewrap, jobs come this way to their files.
            home.chmod(0o700 | facts.st_mode & stat.S_IXOTH)
    except OSError as error:
        raise SpecError(
            f"cannot use {home}: {error.strerror}", hint="name another with `export SHOAL_HOME=DIR`"
        ) from error


def refuse_unsafe_home(home: Path) -> None:
    """`UnsafePath` where others can change the home or a name on the way to it, or read its secrets."""
    refuse_unsafe(_unsafe(home))


def _make_above(home: Path) -> None:
    """Others may pass: jobs without bubblewrap come this way to their files."""
    for above in reversed(home.parents):
        if not above.exists():
            above.mkdir()
            above.chmod(0o755)


def _unsafe(home: Path) -> Iterator[Problem]:
    yield from problems_on_the_way(home)
    yield from problems_inside(home)
    for name in SECRET_FILES:
        yield from problems_on_the_way(home / name, Secrecy.OWNER)
    yield from problems_inside(home / "keys", Secrecy.OWNER)
    for name in ("spool", "desk"):
        yield from problems_inside(home / name)
        yield from problems_inside(home / name / "live")
        # A claim there names a process to kill.
        live = home / name / "live"
        for attempt in sorted(live.iterdir()) if live.is_dir() else ():
            yield from problems_inside(attempt)
    yield from problems_inside(home / "clusters")


def refuse_unsafe_files(settings: Settings) -> None:
    """`UnsafePath` where others can change a file beside the home that the server believes."""
    found = [problems_on_the_way(file) for file in (settings.tls_cert, settings.policy) if file is not None]
    if settings.tls_key is not None:
        found.append(problems_on_the_way(settings.tls_key, Secrecy.GROUP))
    if settings.store_url.startswith(SQLITE):
        database = settings.store_url.removeprefix(SQLITE)
        found += [problems_on_the_way(f"{database}{end}") for end in ("", "-wal", ".lock")]
        found.append(problems_on_the_way(Path(database).absolute().parent))
    refuse_unsafe(problem for problems in found for problem in problems)


def hold(home: Path) -> IO[str]:
    """Take the home for this process; let go by closing. `StateError` if another process has it."""
    # For its owner alone: whoever can open it can hold it, and keep a control plane from starting.
    file = os.fdopen(
        os.open(home / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+", encoding="ascii"
    )
    # `holder` takes the lock for an instant to look: a short wait tells a look from a life.
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
    """The options of the last `shoal up`: a restart without flags brings the same cluster back."""
    try:
        told = json.loads((home / REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in told.items()} if isinstance(told, dict) else {}


def settings_for(flags: dict[str, str | None]) -> tuple[Settings, dict[str, str]]:
    """Checked settings and the options behind them: flags, variables, else those of the last start."""
    home = load_settings({}, {k: v for k, v in os.environ.items() if k in ("SHOAL_HOME", "HOME")}).home
    options = merge_options(flags, os.environ, load_remembered(home))
    return load_settings(options), options


def remember(home: Path, options: dict[str, str]) -> None:
    write_private(home / REMEMBERED, json.dumps(options, indent=2) + "\n")


def write_server_file(home: Path, facts: dict[str, Any]) -> None:
    """Tell clients and supervisors where the control plane listens. Whole or not at all."""
    write_private(home / "server.json", json.dumps(facts) + "\n")


def certificates_in(pem: str) -> str:
    """Return the certificates of a PEM file, without the key that may stand beside them."""
    blocks = re.findall(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", pem, re.DOTALL)
    return "".join(f"{block}\n" for block in blocks)


def write_leader_file(path: Path, facts: dict[str, Any]) -> None:
    """Tell supervisors where the control plane that leads listens. Whole or not at all."""
    write_private(path, json.dumps(facts) + "\n")


def remember_port(home: Path, port: int) -> None:
    """For clients: the port it listens on now. The first one ever stays the home's own."""
    write_private(home / PORT, f"{port}\n")
    if own_port(home) is None:
        write_private(home / OWN_PORT, f"{port}\n")


def own_port(home: Path) -> int | None:
    """The port that this home's control plane listens on whenever it is free; None before the first time."""
    with contextlib.suppress(OSError, ValueError):
        return int((home / OWN_PORT).read_text(encoding="ascii"))
    return None


def remove_server_file(home: Path, pid: int) -> None:
    """On a clean end, take back what this process wrote; never what another one wrote since."""
    path = home / "server.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")).get("pid") == pid:
            path.unlink()


def token_of_others(home: Path) -> str:
    """What gets a token for a home that shares a directory with others; empty: it makes its own."""
    if load_remembered(home).get("shared", "none") == "none":
        return ""
    return (
        "`shoal login local` with a token that `shoal token create` made where another control plane of this "
        "cluster is; if none has a token any more, `shoal down` and `shoal up --admin-token`"
    )


def ask_for_admin_token(flags: dict[str, str | None]) -> None:
    """Leave word for the start that follows, whatever tokens there are. `StateError`: a control plane runs.

    Whoever may write here, and reads the key that signs, could make one anyway.
    """
    settings, _ = settings_for(flags)
    prepare_home(settings.home)
    if (pid := holder(settings.home)) is not None:
        raise StateError(
            f"a control plane is already running here (process {pid})", hint="`shoal down` first"
        )
    write_private(settings.home / "keys" / "asked-token", "")


def ask_for_token(settings: Settings) -> bool:
    """Leave word for the start that follows where this home has a past and no token: it makes another.

    Not where several control planes share a directory: the other homes have theirs.
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
    """The admin token of the very first start, saved for this user and handed out this once.

    None at every later start. Which server commands talk to stays as it was chosen.
    """
    waiting = settings.state_dir / "keys" / "first-token"
    try:
        token = waiting.read_text(encoding="ascii").strip()
        Credentials(settings.home).save(LOCAL, token)
        waiting.unlink()
    except FileNotFoundError:
        return None  # of two that read it, one removes it
    return token
