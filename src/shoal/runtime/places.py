"""Where on a node's own disk the shares of one user lie: below a directory that nobody else can change."""

from __future__ import annotations

import contextlib
import os
import stat

from shoal.wire import Fetch

ROOT = 0


def roots_of(spool_root: str) -> list[str]:
    """Directories that may hold shares of this user, the usual one first. Nothing is made.

    Where everybody may add names, as in /tmp, that is one of this user's own, and another where somebody had
    taken its name.
    """
    base = spool_root or "/tmp"  # noqa: S108 - owner and mode of what is used below it are looked at
    if spool_root and not _is_for_all(base):
        return [base]
    name = f"shoal-{os.getuid()}"
    others = sorted(f"{base}/{found}" for found in os.listdir(base) if found.startswith(f"{name}-"))
    return [f"{base}/{name}", *filter(is_own, others)]


def make_root(spool_root: str) -> str:
    """The one to use. `OSError`: there is none, or it is somebody else's."""
    usual, *others = roots_of(spool_root)
    with contextlib.suppress(FileExistsError):  # a file, or a link that leads nowhere
        os.makedirs(usual, mode=0o700, exist_ok=True)
    root = usual if is_own(usual) else next(iter(others), "")
    if not root and usual == spool_root:
        raise PermissionError(f"{usual} is not a directory that only user {os.getuid()} can change")
    if not root:
        root = f"{usual}-{os.urandom(8).hex()}"
        os.mkdir(root, 0o700)
    os.makedirs(f"{root}/spool/live", mode=0o700, exist_ok=True)
    return root


def place_of(root: str, asked: Fetch) -> str:
    """The share's directory below one of `roots_of`."""
    # Incarnations of one node do not meet: what is left of one must not be taken for the other.
    name = f"{asked.node}.{asked.incarnation}" if asked.incarnation else asked.node
    return f"{root}/spool/live/{asked.attempt_id}/{name}"


def is_own(root: str) -> bool:
    """Whether it is a directory that nobody but this user can change."""
    try:
        facts = os.lstat(root)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _is_for_all(path: str) -> bool:
    """Whether everybody may add names and nobody take another's away, but root, and we."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return False
    return bool(
        facts.st_mode & stat.S_ISVTX and facts.st_mode & stat.S_IWOTH and facts.st_uid in (ROOT, os.getuid())
    )
