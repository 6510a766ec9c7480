"""Where Shoal keeps its things on this machine, and who runs there: what every command needs."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

LOCK = "server.lock"
"""A control plane holds it for its whole life; the kernel lets go of it however that process dies."""

PORT = "port"


def home_from_env(env: Mapping[str, str] = os.environ) -> Path:
    """`SHOAL_HOME`, else `~/.shoal`."""
    given = env.get("SHOAL_HOME")
    return Path(given).absolute() if given else Path.home() / ".shoal"


def holds_keys(folder: Path) -> bool:
    """Whether the folder is a home of Shoal, this user's or another, or the directory that two homes share.

    It holds keys and tokens, which are never copied into a job.
    """
    marks = (folder / "home-id", folder / "keys")
    return all(map(os.path.lexists, marks)) or folder == _real(home_from_env())


@lru_cache(maxsize=1)
def _real(home: Path) -> Path:
    return Path(os.path.realpath(home))


def account_name() -> str:
    """The name of this process's user; `uid-N` for a number without an account, as containers have them."""
    # KeyError up to Python 3.12, OSError from 3.13 on.
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return f"uid-{os.getuid()}"


def holder(home: Path) -> int | None:
    """The process that holds the home now; None if nobody does."""
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
    """The port the control plane of this home listened on last; None before the first time."""
    with contextlib.suppress(OSError, ValueError):
        return int((home / PORT).read_text(encoding="ascii"))
    return None
