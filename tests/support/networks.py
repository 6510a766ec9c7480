"""Nodes on this machine that have a network each: a bridge, and a network namespace for every node.

As root. A node can be cut off from this machine, from its peers, or from both, and healed; everything that
runs in its network can be killed at once. They share processes, disk and memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Networks:
    """Blocking. `make_network` once, `remove_network` at the end. Labs of another `kind` are apart."""

    def __init__(self, names: tuple[str, ...], kind: int = 0) -> None:
        self.names = names
        number = os.getpid() % 250
        self._tag = f"s{'hr'[kind]}{os.getpid() % 100000}"
        self._net = f"10.{200 + 10 * kind + number // 50}.{number}"
        self.address = f"{self._net}.1"
        """Of this machine, as the nodes see it."""

    def address_of(self, name: str) -> str:
        return f"{self._net}.{10 + self.names.index(name)}"

    def space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def entering(self, name: str) -> list[str]:
        """Words before a command that is to run in the node's network."""
        # Not `ip netns exec`, which hides /sys/fs/cgroup.
        return ["nsenter", f"--net=/run/netns/{self.space(name)}"]

    def make_network(self) -> None:
        bridge = f"{self._tag}b"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.address}/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names):
            space, outside = self.space(name), f"{self._tag}v{number}"
            self._ip("netns", "add", space)
            self._ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", outside, "master", bridge, "up")
            self._ip("-n", space, "addr", "add", f"{self.address_of(name)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")
            # Leads nowhere, but programs ask it which address is theirs.
            self._ip("-n", space, "route", "add", "default", "via", self.address)

    def remove_network(self) -> None:
        """May be repeated, and comes after anything that failed."""
        for name in self.names:
            self._ip("netns", "del", self.space(name), check=False)
        self._ip("link", "del", f"{self._tag}b", check=False)

    def pids_on(self, name: str) -> list[int]:
        told = self._ip("netns", "pids", self.space(name), check=False)
        return [int(word) for word in told.split()]

    def kill_all_on(self, name: str) -> None:
        """Everything in the node's network at once, as by a power cut."""
        for _ in range(3):  # one may fork while the others are read
            for pid in self.pids_on(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, name: str, peers: tuple[str, ...] = (), *, from_control: bool = True) -> None:
        """No packet of the node reaches this machine (`from_control`) or these `peers` any more."""
        for address in self._addresses(peers, from_control=from_control):
            self._ip("-n", self.space(name), "route", "replace", "blackhole", f"{address}/32")

    def heal(self, name: str) -> None:
        others = tuple(one for one in self.names if one != name)
        for address in self._addresses(others, from_control=True):
            self._ip("-n", self.space(name), "route", "del", "blackhole", f"{address}/32", check=False)

    def _addresses(self, peers: tuple[str, ...], *, from_control: bool) -> list[str]:
        return [*([self.address] if from_control else []), *map(self.address_of, peers)]

    def _ip(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(["ip", *words], env={"PATH": PATH}, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, (words, done.stderr)
        return done.stdout


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has taken away."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_dead(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))
