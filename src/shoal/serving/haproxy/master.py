"""HAProxy's master process by its socket: the only file here that talks to it. Every call blocks, briefly."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import msgspec

ANSWER_S = 10.0
RELOAD_S = 30.0
AGAIN_S = 0.02
_MASTER = re.compile(r"^\d+\s+master\s+\d+ \[failed: (\d+)\]", re.MULTILINE)
_WORKER = re.compile(r"^(\d+)\s+worker\s", re.MULTILINE)


class Processes(msgspec.Struct, frozen=True):
    """`current` serves; `old` ones finish what they have."""

    current: tuple[int, ...]
    old: tuple[int, ...]
    failures: int
    """Reloads since the last one that came to something."""

    @property
    def all(self) -> tuple[int, ...]:
        return self.current + self.old


def parse_processes(told: str) -> Processes:
    """Of `show proc`."""
    master = _MASTER.search(told)
    new, _, old = told.partition("# old workers")
    return Processes(
        tuple(int(pid) for pid in _WORKER.findall(new)),
        tuple(int(pid) for pid in _WORKER.findall(old)),
        int(master[1]) if master else 0,
    )


class Master:
    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        """`OSError`: nobody is there to ask."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(ANSWER_S)
            link.connect(str(self._path))
            link.sendall(command.encode() + b"\n")
            link.shutdown(socket.SHUT_WR)
            pieces = []
            while piece := link.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces).decode("latin-1").strip()

    def tell(self, pid: int, command: str) -> str:
        """To one of its workers."""
        return self.ask(f"@!{pid} {command}")

    def processes(self) -> Processes:
        return parse_processes(self.ask("show proc"))

    def is_serving(self, but: tuple[int, ...] = ()) -> bool:
        """Whether another worker than those serves, and those take nothing new."""
        try:
            seen = self.processes()
            return bool(set(seen.current) - set(but)) and self._have_stopped(seen.old)
        except OSError:
            return False  # not there yet, or the master executes itself anew, and its socket with it

    def has_stopped(self) -> bool:
        """Whether none of its workers takes anything new."""
        try:
            return self._have_stopped(self.processes().all)
        except OSError:
            return True

    def reload(self) -> bool:
        """Have it read its configuration again, and wait until that is served. False: it would not."""
        before = self.processes()
        self.ask("reload")
        deadline = time.monotonic() + RELOAD_S
        while not self.is_serving(before.current):
            if self._has_failed() or time.monotonic() > deadline:
                return False
            time.sleep(AGAIN_S)
        return True

    def _has_failed(self) -> bool:
        try:
            return self.processes().failures > 0
        except OSError:
            return False

    def _have_stopped(self, pids: tuple[int, ...]) -> bool:
        answers = [self.tell(pid, "show info") for pid in pids]
        return all("Stopping: 0" not in answer for answer in answers)
