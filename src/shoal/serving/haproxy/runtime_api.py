"""HAProxy's runtime API: its master socket, and the commands from one configuration to the next.

Only this module talks to the socket. Every call blocks briefly. The functions that compare two
configurations say which changes a running HAProxy can take and which need a reload; they are pure.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from shoal.serving.haproxy.backends import ServerLine
from shoal.serving.haproxy.render import CALLERS, HaproxyConfig

ANSWER_S = 10.0
RELOAD_S = 30.0
AGAIN_S = 0.02
_MASTER = re.compile(r"^\d+\s+master\s+\d+ \[failed: (\d+)\]", re.MULTILINE)
_WORKER = re.compile(r"^(\d+)\s+worker\s", re.MULTILINE)


class HaproxyWorkers(msgspec.Struct, frozen=True):
    """`current` workers serve; `old` ones finish what they have."""

    current: tuple[int, ...]
    old: tuple[int, ...]
    failures: int
    """Reloads that failed since the last one that succeeded."""

    @property
    def all(self) -> tuple[int, ...]:
        return self.current + self.old


def parse_processes(text: str) -> HaproxyWorkers:
    """Parse the output of `show proc`."""
    master = _MASTER.search(text)
    new, _, old = text.partition("# old workers")
    return HaproxyWorkers(
        tuple(int(pid) for pid in _WORKER.findall(new)),
        tuple(int(pid) for pid in _WORKER.findall(old)),
        int(master[1]) if master else 0,
    )


class HaproxyMaster:
    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        """Send a command to the master. `OSError`: no master answers."""
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(ANSWER_S)
            link.connect(str(self._path))
            link.sendall(command.encode() + b"\n")
            link.shutdown(socket.SHUT_WR)
            pieces = []
            while piece := link.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces).decode("latin-1").strip()

    def send_to_worker(self, pid: int, command: str) -> str:
        """Send a command to one of its workers."""
        return self.ask(f"@!{pid} {command}")

    def processes(self) -> HaproxyWorkers:
        return parse_processes(self.ask("show proc"))

    def is_serving(self, but: tuple[int, ...] = ()) -> bool:
        """Return whether a worker other than `but` serves, and the old ones accept nothing new."""
        try:
            workers = self.processes()
            return bool(set(workers.current) - set(but)) and self._have_stopped(workers.old)
        except OSError:
            return False  # the socket is not there yet, or the master is re-executing itself

    def has_stopped(self) -> bool:
        """Return whether no worker accepts anything new."""
        try:
            return self._have_stopped(self.processes().all)
        except OSError:
            return True

    def reload(self) -> bool:
        """Have HAProxy read its configuration again, and wait until it serves it. False: it refused."""
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
        answers = [self.send_to_worker(pid, "show info") for pid in pids]
        return all("Stopping: 0" not in answer for answer in answers)


ServerLines = Mapping[str, ServerLine]


def needs_reload(before: HaproxyConfig, after: HaproxyConfig, leaving: Collection[str]) -> bool:
    """Return whether anything differs besides callers, weights and the list of servers.

    `leaving`: servers, as `backend/name`, that have been taken out and are not deleted yet.
    """
    if before.frame != after.frame:
        return True
    old, new = servers_by_name(before), servers_by_name(after)
    return any(
        name in leaving
        if name not in old
        else (old[name].address, old[name].options) != (server.address, server.options)
        for name, server in new.items()
    )


def servers_by_name(rendering: HaproxyConfig) -> dict[str, ServerLine]:
    """Return the servers by the name that HAProxy's commands take."""
    return {
        f"{backend}/{server.name}": server
        for backend, servers in rendering.servers.items()
        for server in servers
    }


def add_commands(before: HaproxyConfig, after: HaproxyConfig) -> Iterator[str]:
    """Yield commands for new servers. They start disabled, and are checked from the beginning."""
    old = servers_by_name(before)
    for name, server in servers_by_name(after).items():
        if name not in old:
            yield f"add server {name} {server.address} {server.options} weight {server.weight}"
            yield f"enable health {name}"
            yield f"enable server {name}"


def weight_commands(before: HaproxyConfig, after: HaproxyConfig) -> Iterator[str]:
    """Yield commands for servers whose weight changed; weight 0 means no new requests."""
    old = servers_by_name(before)
    for name, server in servers_by_name(after).items():
        if name in old and old[name].weight != server.weight:
            yield f"set server {name} weight {server.weight}"


def removed_servers(before: HaproxyConfig, after: HaproxyConfig) -> list[str]:
    """Return servers that get no new requests, and are deleted once they are finished."""
    return sorted(servers_by_name(before).keys() - servers_by_name(after).keys())


def caller_commands(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield commands for the map of callers, removals first."""
    for key in before.keys() - after.keys():
        yield f"del map {CALLERS} {key}"
    for key, value in after.items():
        if key not in before:
            yield f"add map {CALLERS} {key} {escaped(value)}"
        elif before[key] != value:
            yield f"set map {CALLERS} {key} {escaped(value)}"


def escaped(value: str) -> str:
    """Escape an argument of a command, which would end at a space; a semicolon would begin another."""
    return "".join(char if char.isalnum() or char in "_.-@" else f"\\{char}" for char in value)
