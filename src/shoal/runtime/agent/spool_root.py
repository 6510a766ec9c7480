"""Find the directory on a node's own disk for one user's tasks. No other user can change it.

Readers trust what lies there, for example a claim that names a process to kill. So they skip everything that
belongs to another user. The agent of Ray's nodes follows the same rules, and travels without the rest of
Shoal.
"""

from __future__ import annotations

import contextlib
import os
import stat

from shoal.wire import TaskSpecRequest

ROOT = 0
MAX_OTHERS = 100


def existing_roots(spool_root: str) -> list[str]:
    """Return the directories that may hold tasks of this user, the usual one first. Makes none.

    In a directory where every user may add names, such as /tmp, there can be two: the usual one, and one with
    a random suffix for when another user had taken the usual name. Directories of other users are left out
    whatever their name is. Others may have got write access to one of this user's since: see
    `first_foreign_path`.
    """
    base, usual = _base_and_usual_root(spool_root)
    if usual == base:
        return [base]
    prefix = f"{os.path.basename(usual)}-"
    with os.scandir(base) as entries:  # any user may add names there: keep at most `MAX_OTHERS`
        others = sorted(entry.path for entry in entries if entry.name.startswith(prefix))[:MAX_OTHERS]
    return [path for path in (usual, *others) if _is_own_directory(path)]


def find_or_make_root(spool_root: str = "") -> str:
    """Return the root to use, and make it if there is none.

    `OSError`: there is none, or it belongs to another user.
    """
    base, usual = _base_and_usual_root(spool_root)
    # A root in use stays in use, even if the usual name has become free.
    root = next(filter(is_private_directory, existing_roots(spool_root)), "")
    if not root:
        with contextlib.suppress(FileExistsError):  # a file, or a link that leads nowhere
            os.makedirs(usual, mode=0o700, exist_ok=True)
        root = usual if is_private_directory(usual) else ""
    if not root and usual == base:
        raise PermissionError(f"{usual} is not a directory that only user {os.getuid()} can change")
    if not root:
        root = f"{usual}-{os.urandom(4).hex()}"  # short: Ray's sockets are below it
        os.mkdir(root, 0o700)
    return root


def prepare_root(spool_root: str) -> str:
    """Return the root to use, with its directories for tasks. `OSError` as `find_or_make_root`."""
    root = find_or_make_root(spool_root)
    for path in (f"{root}/spool", f"{root}/spool/live"):
        make_private_directory(path)
    return root


def make_private_directory(path: str) -> None:
    """Make a directory that no other user can change, or take write access away from others.

    An existing directory may have been made under a more permissive umask. Call this only below a directory
    of one's own. `PermissionError`: the directory belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if _is_own_directory(path) and not is_private_directory(path):
        os.chmod(path, 0o700)
    if not is_private_directory(path):
        raise PermissionError(f"{path} is not a directory that only user {os.getuid()} can change")


def task_directory(root: str, request: TaskSpecRequest) -> str:
    """Return the task's directory below one of the roots."""
    # Replacements of one node do not meet: what is left of one must not be taken for the other.
    name = f"{request.node}.{request.replacement}" if request.replacement else request.node
    return f"{root}/spool/live/{request.attempt_id}/{name}"


def first_foreign_path(root: str, directory: str) -> str:
    """Return the first path from the root down to the directory that is a link or that others could change.

    Empty: there is none, and only this user can have written what lies there.
    """
    path = root
    names = os.path.relpath(directory, root).split("/")
    for name in ("", *names):
        path = f"{path}/{name}" if name else path
        if not is_private_directory(path):
            return path
    return ""


def is_private_directory(root: str) -> bool:
    """Whether it is a directory that only this user can change."""
    return _is_own_directory(root, others_may=0)


def _is_own_directory(path: str, others_may: int = 0o022) -> bool:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    return is_ours and not facts.st_mode & 0o022 & ~others_may


def _base_and_usual_root(spool_root: str) -> tuple[str, str]:
    """Return the named directory and the usual root.

    They are the same unless every user may write to the named directory. Then the root is below it.
    """
    base = spool_root or "/tmp"  # noqa: S108 - owner and mode of what is used below it are looked at
    if spool_root and not _is_shared_by_all(base):
        return base, base
    return base, f"{base}/shoal-{os.getuid()}"


def _is_shared_by_all(path: str) -> bool:
    """Whether every user may add names there, and only root or this user may take away those of others."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return False
    return bool(
        facts.st_mode & stat.S_ISVTX and facts.st_mode & stat.S_IWOTH and facts.st_uid in (ROOT, os.getuid())
    )
