"""Check that only root and this user can change what a path leads to, as ssh does for its files.

Checks every directory from `/` down and every link on the way. Changes nothing.
"""

# Names are strings here, because `Path` would remove the `..` and links that have to be checked.
# ruff: noqa: PTH100, PTH115, PTH118, PTH120

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shlex
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from shoal.errors import SpecError

ROOT = 0
MAX_LINKS = 40
SHOWN = 5
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafePath(SpecError):
    """A user other than this one and root can change a file that Shoal trusts."""

    code = "home.unsafe"


class Secrecy(Enum):
    """Which users besides the owner may not read the end of a path."""

    NONE = 0
    GROUP = stat.S_IRWXO
    OWNER = stat.S_IRWXO | stat.S_IRWXG


class Problem(NamedTuple):
    path: str
    description: str
    fix_command: str


def refuse_unsafe(problems: Iterable[Problem]) -> None:
    """Raise `UnsafePath` with all problems and the commands that fix them, if there are any."""
    distinct = list(dict.fromkeys(problems))
    if not distinct:
        return
    shown, more = distinct[:SHOWN], len(distinct) - SHOWN
    message = "; ".join(problem.description for problem in shown) + (f"; and {more} more" if more > 0 else "")
    mend = " && ".join(problem.fix_command for problem in shown)
    raise UnsafePath(message, hint=f"if what lies there is yours, `{mend}`")


def problems_on_path(path: str | os.PathLike[str], secrecy: Secrecy = Secrecy.NONE) -> Iterator[Problem]:
    """Yield the problems of the path, its links and the directories above. A missing path has none."""
    try:
        steps = list(_steps(os.path.abspath(path)))
    except FileNotFoundError:
        return
    for place, (name, facts) in enumerate(steps):
        is_last = place == len(steps) - 1
        if problem := _problem(name, facts, secrecy if is_last else Secrecy.NONE, is_passed=not is_last):
            yield problem


def problems_inside(directory: str | os.PathLike[str], secrecy: Secrecy = Secrecy.NONE) -> Iterator[Problem]:
    """Yield the problems of the directory's entries, not of what is below them. Links are followed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_symlink():
                    yield from problems_on_path(entry.path, secrecy)
                elif problem := _problem(entry.path, entry.stat(), secrecy, is_passed=False):
                    yield problem


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each name on the way to the path with its `lstat`, including links and their targets."""
    waiting, above, links = deque(part for part in path.split("/") if part), "/", 0
    yield above, os.lstat(above)
    while waiting:
        part = waiting.popleft()
        if part in (".", ".."):
            above = os.path.dirname(above) if part == ".." else above
            continue
        name = os.path.join(above, part)
        facts = os.lstat(name)
        yield name, facts
        if not stat.S_ISLNK(facts.st_mode):
            above = name
            continue
        links += 1
        if links > MAX_LINKS:
            raise UnsafePath(f"{path} leads through more than {MAX_LINKS} links", hint=f"namei -l {path}")
        target = os.readlink(name)
        above = "/" if target.startswith("/") else above
        waiting.extendleft(reversed([part for part in target.split("/") if part]))


def _problem(name: str, facts: os.stat_result, secrecy: Secrecy, *, is_passed: bool) -> Problem | None:
    """Return the problem of one name. `is_passed`: the path goes on below it, so a sticky bit protects."""
    mode, quoted = stat.S_IMODE(facts.st_mode), shlex.quote(name)
    described = f"{name} belongs to {_user(facts.st_uid)} and has mode {mode:04o}"
    if facts.st_uid not in (ROOT, os.geteuid()):
        return Problem(name, f"{described}, so that user can change it", f"chown -h {os.geteuid()} {quoted}")
    if stat.S_ISLNK(facts.st_mode):
        return None
    is_sticky = is_passed and stat.S_ISDIR(facts.st_mode) and bool(facts.st_mode & stat.S_ISVTX)
    if mode & OTHERS_WRITE and not is_sticky and not _is_private(name, facts):
        change = "go-w" if secrecy is Secrecy.NONE else "go="
        return Problem(name, f"{described}, so others can change it", f"chmod {change} {quoted}")
    if mode & secrecy.value:
        change = "go=" if secrecy is Secrecy.OWNER else "o="
        return Problem(name, f"{described}, so others can read it", f"chmod {change} {quoted}")
    return None


def _is_private(name: str, facts: os.stat_result) -> bool:
    """Whether only the owner and the owner's private group, of which no other account is a member, may write.

    Root's group is never private: containers have it under any uid, and `operator` on Red Hat. Accounts that
    the system does not list, as in a large directory, count only if the group names them as members.
    """
    if facts.st_mode & stat.S_IWOTH or facts.st_gid == ROOT:
        return False
    try:
        if "system.posix_acl_access" in os.listxattr(name):
            return False  # the bits of the group are those of the list's mask
        user, group = pwd.getpwuid(facts.st_uid), grp.getgrgid(facts.st_gid)
    except (OSError, KeyError):
        return False
    if user.pw_gid != group.gr_gid or user.pw_name != group.gr_name:
        return False
    others = (one.pw_name for one in pwd.getpwall() if one.pw_gid == group.gr_gid)
    return {*group.gr_mem, *others} <= {user.pw_name}


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    return f"uid {uid}"
