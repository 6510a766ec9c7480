"""Find SHOAL_HOME on this machine and the control plane that holds it. Every command needs this."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

LOCK = "server.lock"
"""A control plane holds this lock for its whole life. The kernel releases it however the process dies."""

PORT = "port"


def home_from_env(env: Mapping[str, str] = os.environ) -> Path:
    """Return `SHOAL_HOME`, else `~/.shoal`."""
    path = env.get("SHOAL_HOME")
    return Path(path).absolute() if path else Path.home() / ".shoal"


def holds_keys(folder: Path) -> bool:
    """Whether the folder is any user's SHOAL_HOME, or the directory that two homes share.

    Such a folder holds keys and tokens, which are never copied into a job.
    """
    marks = (folder / "home-id", folder / "keys")
    return all(map(os.path.lexists, marks)) or folder == _real(home_from_env())


@lru_cache(maxsize=1)
def _real(home: Path) -> Path:
    return Path(os.path.realpath(home))


def account_name() -> str:
    """Return the name of this process's user, or `uid-N` if the uid has no account, as in containers."""
    # KeyError up to Python 3.12, OSError from 3.13 on.
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return f"uid-{os.getuid()}"


def pid_holding(home: Path) -> int | None:
    """Return the pid of the control plane that holds the home now, or None."""
    try:
        with (home / LOCK).open("r", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                text = file.read().strip()
                return int(text) if text.isdigit() else 0
    except OSError:
        return None
    return None


def last_port(home: Path) -> int | None:
    """Return the last port on which the control plane of this home listened. None: it has never run."""
    with contextlib.suppress(OSError, ValueError):
        return int((home / PORT).read_text(encoding="ascii"))
    return None
