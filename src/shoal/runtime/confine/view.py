"""What the ranks see of the machine's files, as bubblewrap's arguments.

Everything read-only, its own /tmp and /dev, nothing of SHOAL_HOME but the work directory. Starts nothing.
"""

from __future__ import annotations

import os
import stat

import msgspec

from shoal.errors import SpecError

OWN = frozenset({"dev", "proc", "run", "tmp"})
"""Top-level names the sandbox has instances of its own of."""
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
PRIVATE = ("/tmp", "/var/tmp")  # noqa: S108 - a directory of the share takes their place
MAX_SIBLINGS = 512


class BindMount(msgspec.Struct, frozen=True, kw_only=True):
    """A mount whose source is open as `fd` and was found at the path `source`, links followed.

    bubblewrap goes by path: whoever mounts must look afterwards whether it is still the same directory.
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
    """The mounts, outermost first. `keep` are directories that must stay readable though their parents
    are not: the interpreter and the programs on the node's own PATH. `work_source`, `stand_ins_source`: where
    the directories lie that ranks find at `work` and `stand_ins`, if that is not where they lie yet.
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
    if os.path.isdir("/run/systemd/resolve"):  # where /etc/resolv.conf often points
        arguments += ["--ro-bind", "/run/systemd/resolve", "/run/systemd/resolve"]
    return arguments


def _same(path: str) -> list[str]:
    """The path as it is outside, read-only; plain files at the top are of no use to a rank but harmless."""
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path]


def _way_to(path: str, empty: tuple[str, ...]) -> list[str]:
    """Directories that lead to `path` through an emptied one; bubblewrap's own would be closed to others."""
    above = os.path.dirname(path)
    steps: list[str] = []
    while any(is_within(above, top) and above != top for top in empty):
        steps.append(above)
        above = os.path.dirname(above)
    return _open_directories(steps)


def _open_directories(steps: list[str]) -> list[str]:
    return [word for step in reversed(steps) for word in ("--perms", "0755", "--dir", step)]


def hidden_directories(uid: int | None, home: str, keep: tuple[str, ...]) -> list[str]:
    """Directories covered by an empty one: `home`, and those the job's user may not enter above `keep`."""
    wanted = {home, *(above for path in keep for above in [first_closed(path, uid)] if above is not None)}
    tops = [path for path in wanted if not any(is_within(path, other) for other in wanted if other != path)]
    # What lies below /tmp or /run is hidden already, by the sandbox's own.
    return sorted(path for path in tops if not any(is_within(path, own) for own in (*PRIVATE, "/run")))


def first_closed(path: str, uid: int | None) -> str | None:
    """The outermost directory above `path` that this user may not pass through."""
    parts = path.strip("/").split("/")
    for count in range(1, len(parts)):
        above = "/" + "/".join(parts[:count])
        if not may_enter(above, uid):
            return above
    return None


def may_enter(directory: str, uid: int | None) -> bool:
    """Whether this user (with the group of the same number) may pass through the directory."""
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
    """Arguments that let a mount point be made below a read-only directory: cover that directory with an
    empty one and put everything in it back.
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
    """Whether only root and we can change what is found under this path, which leads through no link."""
    while True:
        status = os.lstat(directory)
        is_ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISDIR(status.st_mode) or not is_ours:
            return False
        if directory == "/":
            return True
        directory = os.path.dirname(directory)


def check_target(target: str, *own: str) -> None:
    """`SpecError` unless a job may put a directory there. `own`: where Shoal's state and programs are."""
    if not target.startswith("/") or os.path.normpath(target) != target or target == "/":
        raise SpecError(f"mount target `{target}` must be an absolute path without `..`", hint="use `/data`")
    for path in (*SYSTEM, *own):
        if is_within(target, path) or is_within(path, target):
            raise SpecError(f"mount target `{target}` would cover `{path}`", hint="use `/data`")


def check_source(source: str, real: str, home: str) -> None:
    """`SpecError` unless a job may see this directory. `real`: where it was found to be."""
    for path in ("/proc", "/sys", "/dev", "/run"):
        if is_within(real, path):
            raise SpecError(f"mount source `{source}` lies in `{path}`", hint="mount a directory with data")
    if is_within(real, home) or is_within(home, real):
        raise SpecError(
            f"mount source `{source}` holds Shoal's own state", hint="mount a directory with data"
        )


def is_within(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or below it; both normal and absolute."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
