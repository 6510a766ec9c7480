"""The files that ranks see, as bubblewrap's arguments, and the PATH of the ranks. Starts nothing.

The view is the machine's files read-only, with a /tmp and /dev of its own, and with nothing of SHOAL_HOME but
the work directory.

The job's user may not be able to enter directories with programs. For example, root's Python often lies in
root's own, closed home. The view shows whole Python environments to the job. It also shows Shoal's own
source, which programs import as `shoal.runtime` and which a clone keeps outside of its environment, and
packages below /tmp that an environment has installed as editable, which the job's own /tmp would hide. Any
other directory behind a closed one is removed from the job's PATH.
"""

from __future__ import annotations

import contextlib
import glob
import os
import stat
import sys
import urllib.parse
from collections.abc import Iterator

import msgspec

from shoal.errors import SpecError

OWN = frozenset({"dev", "proc", "run", "tmp"})
"""Top-level directories of which the sandbox has its own instances."""
SYSTEM = (
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/usr",
    "/etc",
    "/proc",
    "/sys",
    "/dev",
    "/run",
)
PRIVATE = ("/tmp", "/var/tmp")  # noqa: S108 - a directory of the task takes their place
MAX_SIBLINGS = 512


class BindMount(msgspec.Struct, frozen=True, kw_only=True):
    """A mount whose source is open as `fd` and has the real path `source`.

    bubblewrap mounts by path, so the caller must check after the mount that it is still the same directory.
    """

    fd: int
    source: str
    target: str
    is_read_only: bool


def view_arguments(
    *,
    uid: int | None,
    home: str,
    work: str,
    scratch: str,
    stand_ins: str,
    keep: tuple[str, ...],
    gpu_devices: tuple[str, ...],
    mounts: tuple[BindMount, ...],
    work_source: str | None = None,
    stand_ins_source: str | None = None,
) -> list[str]:
    """Return the mounts, outermost first.

    `keep`: directories that must stay readable although their parents are not, which are the interpreter and
    the programs on the node's own PATH. `work_source`, `stand_ins_source`: the current paths of the
    directories that ranks see at `work` and `stand_ins`.
    """
    arguments = _system()
    for path in PRIVATE:
        if os.path.isdir(path):
            arguments += ["--bind", scratch, path]
    hidden = hidden_directories(uid, home, keep)
    for path in hidden:
        arguments += ["--tmpfs", path]
    empty = (*hidden, *PRIVATE, "/run")
    for path in keep:
        if any(is_within(path, above) for above in empty):
            arguments += [*_way_to(path, empty), "--ro-bind", path, path]
    for mount in mounts:
        how = "--ro-bind" if mount.is_read_only else "--bind"
        arguments += [*_room_for(mount.target, empty), how, mount.source, mount.target]
    arguments += [*_way_to(work, empty), "--bind", work_source or work, work]
    arguments += ["--bind", stand_ins_source or stand_ins, stand_ins]
    arguments += ["--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108
    for device in gpu_devices:
        arguments += ["--dev-bind", device, device]
    return [*arguments, "--proc", "/proc", "--remount-ro", "/"]


def _system() -> list[str]:
    arguments: list[str] = []
    for name in sorted(os.listdir("/")):
        if name not in OWN:
            arguments += _same("/" + name)
    arguments += ["--tmpfs", "/run"]
    if os.path.isdir("/run/systemd/resolve"):  # /etc/resolv.conf often points there
        arguments += ["--ro-bind", "/run/systemd/resolve", "/run/systemd/resolve"]
    return arguments


def _same(path: str) -> list[str]:
    """Mount the path read-only. Plain files at the top level are useless to a rank but harmless."""
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path]


def _way_to(path: str, empty: tuple[str, ...]) -> list[str]:
    """Make the directories that lead to `path` through an emptied one. bubblewrap would make them private."""
    above = os.path.dirname(path)
    steps: list[str] = []
    while any(is_within(above, top) and above != top for top in empty):
        steps.append(above)
        above = os.path.dirname(above)
    return _open_directories(steps)


def _open_directories(steps: list[str]) -> list[str]:
    return [word for step in reversed(steps) for word in ("--perms", "0755", "--dir", step)]


def hidden_directories(uid: int | None, home: str, keep: tuple[str, ...]) -> list[str]:
    """Return the directories to cover: `home`, and those above `keep` that the job's user may not enter."""
    wanted = {home, *(above for path in keep for above in [first_closed(path, uid)] if above is not None)}
    tops = [path for path in wanted if not any(is_within(path, other) for other in wanted if other != path)]
    # Everything below /tmp and /run is already hidden by the sandbox's own.
    return sorted(path for path in tops if not any(is_within(path, kept) for kept in (*PRIVATE, "/run")))


def first_closed(path: str, uid: int | None) -> str | None:
    """Return the outermost directory above `path` that this user may not enter."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts)):
        above = "/" + "/".join(parts[:count])
        if not may_enter(above, uid):
            return above
    return None


def may_enter(directory: str, uid: int | None) -> bool:
    """Whether this user (with the group of the same number) may enter the directory."""
    if uid is None or uid == 0:
        return os.access(directory, os.X_OK)
    try:
        status = os.stat(directory)
    except OSError:
        return False
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == uid else stat.S_IXOTH))


def _room_for(target: str, empty: tuple[str, ...]) -> list[str]:
    """Make room for a mount point below a read-only directory: cover the directory with an empty one, and
    mount all of its entries again.
    """
    if any(is_within(target, top) for top in empty):
        return _way_to(target, empty)
    above, steps = target, []
    while not os.path.lexists(above):
        above = os.path.dirname(above)
        steps.append(above)
    if not steps or above == "/":
        return _open_directories(steps[:-1])
    if not is_settled(above):
        raise SpecError(
            f"mount target `{target}` does not exist on this node, and others than its administrator can "
            f"change `{above}`",
            hint=f"choose a target directly below `/`, such as `/{os.path.basename(target)}`",
        )
    names = sorted(os.listdir(above))
    if len(names) > MAX_SIBLINGS:
        raise SpecError(
            f"mount target `{target}` does not exist on this node, and `{above}` holds {len(names)} entries",
            hint=f"choose a target directly below `/`, such as `/{os.path.basename(target)}`",
        )
    arguments = ["--tmpfs", above]
    for name in names:
        arguments += _same(f"{above}/{name}")
    return arguments + _open_directories(steps[:-1])


def is_settled(directory: str) -> bool:
    """Whether only root and this user can change the directory's path, and the path contains no link."""
    while True:
        status = os.lstat(directory)
        is_ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISDIR(status.st_mode) or not is_ours:
            return False
        if directory == "/":
            return True
        directory = os.path.dirname(directory)


def check_target(target: str, *protected: str) -> None:
    """Raise `SpecError` unless a job may mount there. `protected`: Shoal's state and programs."""
    if not target.startswith("/") or os.path.normpath(target) != target or target == "/":
        raise SpecError(f"mount target `{target}` must be an absolute path without `..`", hint="use `/data`")
    for path in (*SYSTEM, *protected):
        if is_within(target, path) or is_within(path, target):
            raise SpecError(f"mount target `{target}` would cover `{path}`", hint="use `/data`")


def check_source(source: str, real: str, home: str) -> None:
    """Raise `SpecError` unless a job may see this directory. `real`: its real path."""
    for path in ("/proc", "/sys", "/dev", "/run"):
        if is_within(real, path):
            raise SpecError(f"mount source `{source}` lies in `{path}`", hint="mount a directory with data")
    if is_within(real, home) or is_within(home, real):
        raise SpecError(
            f"mount source `{source}` holds Shoal's own state", hint="mount a directory with data"
        )


def is_within(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or below it. Both must be normal and absolute."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
MAX_RECORD_BYTES = 1 << 16
OWN_SOURCE = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
"""The directory that holds the package `shoal`: `site-packages`, or `src` of a clone."""


class DirInfo(msgspec.Struct):
    editable: bool = False


class Origin(msgspec.Struct):
    """The record of an installer about a package that is not from an index (PEP 610)."""

    url: str
    dir_info: DirInfo = msgspec.field(default_factory=DirInfo)


_read_origin = msgspec.json.Decoder(Origin).decode


def job_path(node_path: str, uid: int | None) -> str:
    """Return the PATH of the ranks. Unreachable entries are replaced by the Python that runs Shoal."""
    entries: list[str] = []
    for entry in node_path.split(":"):
        if first_closed(entry, uid) is None or environment_of(entry) is not None:
            entries.append(entry)
        else:
            entries += [os.path.join(prefix, "bin") for prefix in (sys.prefix, sys.base_prefix)]
    return ":".join(dict.fromkeys(entries))


def readable_directories(path: str, uid: int | None, home: str) -> tuple[str, ...]:
    """Return directories that must stay readable although the job's user cannot reach them by itself."""
    environments = [environment_of(entry) for entry in path.split(":")]
    entries = [environment or entry for environment, entry in zip(environments, path.split(":"), strict=True)]
    wanted = [sys.prefix, sys.base_prefix, *entries]
    real = {os.path.realpath(one) for one in wanted if one.startswith("/") and os.path.isdir(one)}
    for prefix in dict.fromkeys([sys.prefix, *filter(None, environments)]):
        real |= {place for place in editable_sources(prefix) if _may_be_shown(place, uid, home)}
    if not any(is_within(OWN_SOURCE, place) for place in real) and not _overlaps(OWN_SOURCE, home):
        real.add(OWN_SOURCE)
    return tuple(sorted(real - {"/"}))


def editable_sources(prefix: str) -> Iterator[str]:
    """Yield the directories of packages that the environment has by `pip install -e`, from their records."""
    for record in glob.glob(f"{glob.escape(prefix)}/lib/python3*/site-packages/*.dist-info/direct_url.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(record, "rb") as file:
            origin = _read_origin(file.read(MAX_RECORD_BYTES))
            if origin.dir_info.editable and origin.url.startswith("file:///"):
                yield os.path.realpath(urllib.parse.unquote(origin.url.removeprefix("file://")))


def _may_be_shown(place: str, uid: int | None, home: str) -> bool:
    """Whether only the job's own /tmp hides it: the user may read it outside, and no other user made it.

    A directory that contains SHOAL_HOME stays hidden.
    """
    top = next((top for top in PRIVATE if is_within(place, top) and place != top), None)
    if top is None or _overlaps(place, home) or not os.path.isdir(place):
        return False
    above = place
    while above != top:
        if os.lstat(above).st_uid not in {0, os.geteuid()} or not may_enter(above, uid):
            return False
        above = os.path.dirname(above)
    return True


def _overlaps(place: str, home: str) -> bool:
    return is_within(home, place) or is_within(place, home)


def environment_of(entry: str) -> str | None:
    """Return the Python environment whose `bin` this is, or None."""
    above = os.path.dirname(entry.rstrip("/"))
    is_environment = any(os.path.exists(os.path.join(above, mark)) for mark in ENVIRONMENT_MARKS)
    return above if is_environment or above in (sys.prefix, sys.base_prefix) else None
