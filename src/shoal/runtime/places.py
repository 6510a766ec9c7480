"""Where on a node's own disk the shares of one user lie: below a directory that nobody else can change.

What lies there is believed: a claim there names a process to kill. So whoever reads there passes over what is
somebody else's. The agent of Ray's nodes, which travels without the rest of Shoal, goes by the same rules.
"""

from __future__ import annotations

import contextlib
import os
import stat

from shoal.wire import Fetch

ROOT = 0
MAX_OTHERS = 100


def roots_of(spool_root: str) -> list[str]:
    """Directories that may hold shares of this user, the usual one first. Nothing is made.

    Where everybody may add names, as in /tmp, that is one of this user's own, and another where somebody had
    taken its name. What somebody else has there is no root, whatever its name; of one that is this user's,
    others may have been let into it since: see `foreign_in`.
    """
    base, usual = _names(spool_root)
    if usual == base:
        return [base]
    prefix = f"{os.path.basename(usual)}-"
    with os.scandir(base) as entries:  # where everybody may add names, millions are never held at once
        others = sorted(entry.path for entry in entries if entry.name.startswith(prefix))[:MAX_OTHERS]
    return [one for one in (usual, *others) if _is_directory_of_ours(one)]


def own_root(spool_root: str = "") -> str:
    """The one to use, made where there is none. `OSError`: there is none, or it is somebody else's."""
    base, usual = _names(spool_root)
    # One that is in use stays in use, also when the usual name has become free.
    root = next(filter(is_own, roots_of(spool_root)), "")
    if not root:
        with contextlib.suppress(FileExistsError):  # a file, or a link that leads nowhere
            os.makedirs(usual, mode=0o700, exist_ok=True)
        root = usual if is_own(usual) else ""
    if not root and usual == base:
        raise PermissionError(f"{usual} is not a directory that only user {os.getuid()} can change")
    if not root:
        root = f"{usual}-{os.urandom(4).hex()}"  # short: Ray's sockets are below it
        os.mkdir(root, 0o700)
    return root


def make_root(spool_root: str) -> str:
    """The one to use, with room for shares. `OSError` as `own_root`."""
    root = own_root(spool_root)
    for path in (f"{root}/spool", f"{root}/spool/live"):
        make_own(path)
    return root


def make_own(path: str) -> None:
    """See that there is such a directory, and that nobody else can change it: also one that was made where
    others were allowed to, by the umask of the time. Call it below one's own. `PermissionError`: it cannot.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if _is_directory_of_ours(path) and not is_own(path):
        os.chmod(path, 0o700)
    if not is_own(path):
        raise PermissionError(f"{path} is not a directory that only user {os.getuid()} can change")


def place_of(root: str, asked: Fetch) -> str:
    """The share's directory below one of `roots_of`."""
    # Incarnations of one node do not meet: what is left of one must not be taken for the other.
    name = f"{asked.node}.{asked.incarnation}" if asked.incarnation else asked.node
    return f"{root}/spool/live/{asked.attempt_id}/{name}"


def foreign_in(root: str, place: str) -> str:
    """The first on the way from the root to the place, with both, that others could change, or have laid
    there, or that is a link; empty: none is, and what lies in the place is this user's word.
    """
    path = root
    names = os.path.relpath(place, root).split("/")
    for name in ("", *names):
        path = f"{path}/{name}" if name else path
        if not is_own(path):
            return path
    return ""


def is_own(root: str) -> bool:
    """Whether it is a directory that nobody but this user can change."""
    return _is_directory_of_ours(root, others_may=0)


def _is_directory_of_ours(path: str, others_may: int = 0o022) -> bool:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    return is_ours and not facts.st_mode & 0o022 & ~others_may


def _names(spool_root: str) -> tuple[str, str]:
    """The directory that was named, and the usual root: itself, or one below it where it is for everybody."""
    base = spool_root or "/tmp"  # noqa: S108 - owner and mode of what is used below it are looked at
    if spool_root and not _is_for_all(base):
        return base, base
    return base, f"{base}/shoal-{os.getuid()}"


def _is_for_all(path: str) -> bool:
    """Whether everybody may add names and nobody take another's away, but root, and we."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return False
    return bool(
        facts.st_mode & stat.S_ISVTX and facts.st_mode & stat.S_IWOTH and facts.st_uid in (ROOT, os.getuid())
    )
