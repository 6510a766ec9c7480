"""This machine, which all tests share: its programs, its networks, and who lives on it.

How long to sleep between two looks at what a test waits for: the longer it waits, the longer.

A look may be a request to a control plane, or a command of Slurm's: made twenty times a second by each test
that waits, they keep two cores busy with nothing else.

Which TCP ports processes listen at, in whatever network they are: read from /proc, as root.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], env={"PATH": PATH}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, (arguments, done.stderr)
    return done.stdout


def process_identity(pid: int) -> str:
    """The process, and when it was started: another one may have its number some day. Empty: it is dead."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid} {rest[18]}" if state != "Z" else ""
    return ""


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has taken away."""
    return bool(process_identity(pid))


def until_dead(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


SHORTEST_S, LONGEST_S = 0.02, 0.3


def pause_s(since: float) -> float:
    """So long, for one who waits since then (monotonic): a tenth of the time that it took so far."""
    return min(LONGEST_S, max(SHORTEST_S, (time.monotonic() - since) / 10))


LISTENS = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Listener(NamedTuple):
    host: str
    port: int
    pid: int
    command_line: str
    """The process's own, for people."""


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Each address that one of these processes listens at, once; the first of those that share it."""
    found: dict[tuple[str, int, str], Listener] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # gone
            own = set(_sockets(pid))
            space = str(Path(f"/proc/{pid}/ns/net").readlink())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            for inode, host, port in _listening(pid):
                if inode in own:
                    found.setdefault((host, port, space), Listener(host, port, pid, words.strip()))
    return sorted(found.values())


def descendants(pid: int) -> list[int]:
    """The process and all that it started, and they."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _sockets(pid: int) -> Iterator[str]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if match := _SOCKET.fullmatch(os.readlink(entry.path)):  # noqa: PTH115
                yield match[1]


def _listening(pid: int) -> Iterator[tuple[str, str, int]]:
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == LISTENS:
                host, _, port = words[1].rpartition(":")
                yield words[9], _address(host), int(port, 16)


def _address(text: str) -> str:
    """As Linux prints it: words of 32 bits in the machine's own order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(packed))
