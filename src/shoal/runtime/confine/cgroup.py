"""Where this process may make cgroups: reads the kernel's tables, creates nothing."""

from __future__ import annotations

import os

import msgspec

NEEDED = frozenset({"cpu", "memory", "pids"})


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """One mounted cgroup hierarchy: its controllers (none named for version 2) and our place in it."""

    is_unified: bool
    controllers: frozenset[str]
    mount: str
    own: str
    """The directory of the cgroup this process is in, or the mount itself where that is not visible."""


def hierarchies(mountinfo: str, own: str) -> list[Hierarchy]:
    """What `/proc/self/mountinfo` and `/proc/self/cgroup` say, put together. Pure but for `isdir`."""
    places = _places(own)
    found: list[Hierarchy] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        root, mount = fields[3], fields[4]
        controllers = frozenset() if kinds[0] == "cgroup2" else frozenset(kinds[2].split(",")) & set(places)
        place = places.get(min(controllers) if controllers else "", "/")
        inside = os.path.relpath(place, root) if root != "/" else place.lstrip("/")
        directory = os.path.normpath(os.path.join(mount, inside))
        is_inside = directory == mount or directory.startswith(mount + "/")
        found.append(
            Hierarchy(
                is_unified=kinds[0] == "cgroup2",
                controllers=controllers,
                mount=mount,
                own=directory if is_inside and os.path.isdir(directory) else mount,
            )
        )
    return found


def here() -> list[Hierarchy]:
    """The hierarchies of this machine as this process sees them; empty where /proc does not say."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            own = file.read()
    except OSError:
        return []
    return hierarchies(mountinfo, own)


def oom_kills(found: list[Hierarchy]) -> int:
    """How often the kernel killed for memory in the cgroups that this process is in itself; 0 where it does
    not count.
    """
    counted = [f"{one.own}/memory.events" for one in found if one.is_unified]
    counted += [f"{one.own}/memory.oom_control" for one in found if "memory" in one.controllers]
    return sum(read_number(path, "oom_kill") or 0 for path in counted)


def _places(own: str) -> dict[str, str]:
    """Controller (empty for version 2) to the path of our cgroup."""
    places: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            places[controller] = path
    return places


def write(path: str, value: str) -> None:
    """One write, as cgroup files want it. `OSError`: the kernel's own reason."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def read_number(path: str, key: str | None = None) -> int | None:
    """The number in a cgroup file, or behind `key` in one of `key number` lines; None where there is none."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        if key is None:
            return int(text)
        return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key), None)
    except (OSError, ValueError, IndexError):
        return None


def read_sum(path: str, keys: tuple[str, ...]) -> int | None:
    """The numbers behind these keys together, as many as the kernel tells; None where it tells none."""
    found = [number for key in keys if (number := read_number(path, key)) is not None]
    return sum(found) if found else None
