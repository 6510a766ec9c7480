"""Nodes on this machine that have a network each: a bridge, and a network namespace for every node.

As root. A node can be cut off from this machine, from its peers, or from both, and healed; everything that
runs in its network can be killed at once. They share processes, disk and memory.
A cut loses packets: nobody is told, and who connects waits. Both ends send to a station that is not there.

What laboratories have in common: a real cluster on this machine, each node in a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.host.lab_locks import take_number
from tests.support.host.processes import ip, pause_s

CONTROL = ""
"""This machine, where the control plane is, among the names of nodes."""
NO_STATION = "02:00:00:00:00:fe"
"""A station that no bridge has."""


def name_servers() -> set[str]:
    """Of this machine, in IPv4, but for those on loopback, which nodes do not reach anyway."""
    told = re.findall(r"^nameserver\s+([\d.]+)\s*$", Path("/etc/resolv.conf").read_text(), re.MULTILINE)
    return {server for server in told if not server.startswith("127.")}


class NodeNetworks:
    """Blocking. `make_network` once, `remove_network` at the end. Labs of another `kind` are apart."""

    def __init__(self, names: tuple[str, ...], kind: int = 0) -> None:
        self.names = names
        self._lab_lock = take_number(str(kind), lambda number: _net(kind, number))
        self.number, self._tag = self._lab_lock.number, self._lab_lock.tag
        """Nobody else's on this machine until the network is removed."""
        self.mark = self._lab_lock.mark
        """For the environment of what is started outside of the nodes' networks."""
        self._net = _net(kind, self.number)
        self.address = f"{self._net}.1"
        """Of this machine, as the nodes see it."""
        self._drops: dict[str, set[tuple[str, str]]] = {}
        """By node that is cut off: from where to where nothing comes through."""

    @property
    def _bridge(self) -> str:
        return f"{self._tag}b"

    def address_of(self, name: str) -> str:
        return f"{self._net}.{10 + self.names.index(name)}"

    def netns_of(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def netns_command(self, name: str) -> list[str]:
        """Words before a command that is to run in the node's network."""
        # Not `ip netns exec`, which hides /sys/fs/cgroup.
        return ["nsenter", f"--net=/run/netns/{self.netns_of(name)}"]

    def make_network(self) -> None:
        bridge = self._bridge
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names):
            space, outside = self.netns_of(name), f"{self._tag}v{number}"
            ip("netns", "add", space)
            ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{self.address_of(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            # Leads nowhere, but programs ask it which address is theirs.
            ip("-n", space, "route", "add", "default", "via", self.address)
            # Whoever looks a name up is told so at once: torch does, and would wait for ten seconds.
            for server in name_servers():
                ip("-n", space, "route", "add", "unreachable", server)

    def remove_network(self) -> None:
        """May be repeated, and comes after anything that failed."""
        for number, name in enumerate(self.names):
            # With its namespace it would go later, and be in the way of the next laboratory.
            ip("link", "del", f"{self._tag}v{number}", check=False)
            ip("netns", "del", self.netns_of(name), check=False)
        ip("link", "del", self._bridge, check=False)
        self._lab_lock.release()

    def pids_on(self, name: str) -> list[int]:
        told = ip("netns", "pids", self.netns_of(name), check=False)
        return [int(word) for word in told.split()]

    def kill_all_on(self, name: str) -> None:
        """Everything in the node's network at once, as by a power cut."""
        for _ in range(3):  # one may fork while the others are read
            for pid in self.pids_on(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(
        self, name: str, peers: tuple[str, ...] = (), *, from_control: bool = True, is_one_way: bool = False
    ) -> None:
        """Nothing comes through between the node and this machine (`from_control`), or these `peers`.

        `is_one_way`: what they send to the node does.
        """
        others = [*peers, *([CONTROL] if from_control else [])]
        drops = {(name, other) for other in others}
        self._set_drops(name, drops if is_one_way else drops | {(other, name) for other in others})

    def heal(self, name: str) -> None:
        """End the node's own cut; that of a peer from it stays."""
        self._set_drops(name, set())

    def is_cut(self, name: str) -> bool:
        return bool(self._drops.get(name))

    def others(self, name: str) -> tuple[str, ...]:
        return tuple(one for one in self.names if one != name)

    def _set_drops(self, name: str, drops: set[tuple[str, str]]) -> None:
        before = set[tuple[str, str]]().union(*self._drops.values())
        self._drops[name] = drops
        after = set[tuple[str, str]]().union(*self._drops.values())
        for source, target in sorted(after - before):
            self._neighbour(source, target, "replace", "lladdr", NO_STATION, "nud", "permanent")
        for source, target in sorted(before - after):
            self._neighbour(source, target, "del")

    def _neighbour(self, source: str, target: str, verb: str, *more: str) -> None:
        space = ("-n", self.netns_of(source)) if source != CONTROL else ()
        device = "eth0" if source != CONTROL else self._bridge
        address = self.address_of(target) if target != CONTROL else self.address
        ip(*space, "neigh", verb, address, *more, "dev", device)


def _net(kind: int, number: int) -> str:
    return f"10.{200 + 10 * kind + number // 50}.{number}"


POLL_S = 0.05


class ClusterLab(NodeNetworks, ABC):
    """Blocking. `up` once, `down` at the end, whatever happened in between."""

    engine: str
    """As `shoal connect` calls it."""
    start_s = 60.0
    """How long a daemon may take to begin."""
    variables: dict[str, str]
    """With which its commands find it."""

    @property
    def nodes_python(self) -> str:
        """The Python with Shoal in it, as nodes see it."""
        return sys.executable

    @abstractmethod
    def up(self) -> None: ...

    @abstractmethod
    def down(self) -> None:
        """End everything. May be repeated, and comes after anything that failed."""

    @abstractmethod
    def connect_options(self) -> tuple[str, ...]:
        """How `shoal connect` is told of this very cluster."""

    @abstractmethod
    def start_node(self, name: str) -> None:
        """Its daemon, whatever became of the one before."""

    @abstractmethod
    def kill_daemon(self, name: str) -> None:
        """The daemon alone: what it started may run on."""

    @abstractmethod
    def crash_node(self, name: str) -> None:
        """Everything in the node's network at once, as by a power cut."""

    @abstractmethod
    def report_crash(self, name: str) -> None:
        """The cluster is told, if it has to be, that the node has crashed."""

    @abstractmethod
    def is_cluster_process(self, pid: int) -> bool:
        """Whether the process is the cluster's, and not Shoal's or a job's."""

    @abstractmethod
    def last_logs(self) -> str:
        """The last words of everybody."""

    def restart_daemons(self) -> None:
        """What the site's service manager does for daemons that have ended."""
        return

    @contextlib.contextmanager
    def restarting_daemons(self) -> Iterator[None]:
        """Mended again and again meanwhile, by somebody else."""
        is_over = threading.Event()

        def mind() -> None:
            while not is_over.wait(1.0):
                try:
                    self.restart_daemons()
                except AssertionError as error:  # it was cut off again before it had begun
                    print(f"  not mended: {str(error).splitlines()[0]}", flush=True)

        minder = threading.Thread(target=mind)
        minder.start()
        try:
            yield
        finally:
            is_over.set()
            minder.join()

    def until(self, is_so: Callable[[], bool], description: str, within_s: float | None = None) -> None:
        within_s = within_s or self.start_s
        since = time.monotonic()
        while not is_so():
            assert time.monotonic() < since + within_s, (
                f"not within {within_s:g} s: {description}\n{self.last_logs()}"
            )
            time.sleep(pause_s(since))
