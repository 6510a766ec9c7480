"""Machines of a cluster on paper, and one that answers scripts as it is told: for tests of planning.

The program that slurmd runs every minute on a node, beside processes on paper.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.cluster import render
from shoal.cluster.facts import Facts, read_facts
from shoal.cluster.inventory import HostRole, Inventory, InventoryHost
from shoal.cluster.machine import ScriptResult
from shoal.cluster.render import ClusterSecrets
from shoal.cluster.session import ClusterSession
from shoal.errors import EngineRefused, EngineUnreachable

NOW = 1_800_000_000
SECRETS = ClusterSecrets(munge_key=b"\x00\x01key" * 200, database_password="a1" * 24)
ARCHIVE = b"an archive"
CLUSTER_ID = "5a" * 16
"""Of a cluster."""
EVERYTHING = (HostRole.CONTROLLER, HostRole.DATABASE, HostRole.WORKER)


def facts_text(hostname: str = "a", address: str = "10.0.0.1", *extra_lines: str, without: str = "") -> str:
    """What the script prints on a machine of 2 sockets, 4 cores, 8 threads and 64 GiB, and `more` lines."""
    cpus = [f"cpu {core},{core // 2}" for core in range(4) for _ in range(2)]
    lines = [
        "uid 0",
        "login root 0",
        "slurm_uid 64030",
        "python 3.11",
        f"hostname {hostname}",
        "os debian 12 none",
        "arch x86_64",
        f"now {NOW}",
        "init systemd",
        "cgroup v2",
        "cpus 8",
        *cpus,
        "memory_kib 67108864",
        f"connection 10.0.0.99 50000 {address} 22",
        f"address {address}",
        *extra_lines,
        "end",
    ]
    return "".join(f"{line}\n" for line in lines if not without or not line.startswith(without))


def host(name: str, number: int, **fields: object) -> InventoryHost:
    return InventoryHost.model_validate(
        {"address": f"10.0.0.{number}", "name": name, "user": "root", **fields}
    )


def facts_of(
    hosts: Iterable[InventoryHost], more: dict[str, tuple[str, ...]] | None = None
) -> dict[str, Facts]:
    """Facts by address; `more` lines by name."""
    lines = more or {}
    return {
        item.address: read_facts(facts_text(item.label, item.address, *lines.get(item.label, ())), item)
        for item in hosts
    }


def three_hosts(**fields: object) -> Inventory:
    hosts = (host("a", 1, roles=EVERYTHING), host("b", 2), host("c", 3))
    return Inventory.model_validate(
        {"cluster": "lab", "hosts": [item.model_dump() for item in hosts], **fields}
    )


def archives_of(hosts: Iterable[InventoryHost]) -> dict[str, bytes]:
    return {item.address: ARCHIVE for item in hosts}


def with_hardware(inventory: Inventory, facts: dict[str, Facts]) -> Inventory:
    return inventory.with_hardware({address: fact.hardware for address, fact in facts.items()})


@dataclass
class FakeMachine:
    """Remembers every script. `judge` says how one ends; without, everything is so already."""

    facts: str
    exit_code_of: Callable[[str], int] = lambda _: 0
    scripts: list[tuple[str, bytes]] = field(default_factory=list)
    is_lost: bool = False
    holder: str = ""
    typed: str = "ssh -i /keys/one -J bastion ana@machine"
    as_root: str = "ssh -i /keys/one -J bastion ana@machine sudo"

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> ScriptResult:
        if self.is_lost:
            raise EngineUnreachable("the connection was lost", hint="ssh")
        if script.startswith("export LC_ALL=C"):
            return ScriptResult(0, self.facts, "")
        self.scripts.append((script, stdin))
        if "&& echo yes || echo no" in script:
            checks = script.split(") >/dev/null 2>&1 && echo yes || echo no")[:-1]
            return ScriptResult(
                0, "".join("yes\n" if self.exit_code_of(check) == 0 else "no\n" for check in checks), ""
            )
        code = self.exit_code_of(script)
        return ScriptResult(code, "", "it broke" if code else "")

    async def hold(self) -> str:
        return self.holder

    async def close(self) -> None:
        return None


def only_changes_work(_: str) -> int:
    """Nothing is so already, and every change works."""
    return 0 if _.startswith(("set -eu", "refuse() {")) or "exit 0; sleep 1" in _ or "sacctmgr -i" in _ else 1


class FakeMachines:
    """A drawer of machines; those not in it do not answer."""

    def __init__(self, inventory: Inventory, exit_code_of: Callable[[str], int] = lambda _: 0) -> None:
        self.refusing: set[str] = set()
        self.machines = {
            item.address: FakeMachine(facts_text(item.label, item.address), exit_code_of)
            for item in inventory.hosts
        }

    async def connect(self, item: InventoryHost) -> FakeMachine:
        if item.address in self.refusing:
            raise EngineRefused(f"{item.address} takes none of our keys", hint="ssh-copy-id")
        if item.address not in self.machines:
            raise EngineUnreachable(f"{item.address} cannot be reached", hint="ssh")
        return self.machines[item.address]

    def session(self, *, is_dry: bool = False) -> ClusterSession:
        return ClusterSession(self.connect, lambda _: None, lambda: NOW, lambda _, __: ARCHIVE, is_dry=is_dry)


def failed_titles(session: ClusterSession) -> dict[str, str]:
    return {outcome.label: outcome.title for outcome in session.failed.values()}


class NodeHealth:
    """Of one node. Slurm's own commands are those of the environment it runs in."""

    def __init__(self, folder: Path, node: str) -> None:
        self.folder = folder
        inventory = three_hosts()
        host = with_hardware(inventory, facts_of(inventory.hosts)).hosts[0].model_copy(update={"name": node})
        assert host.hardware is not None
        text = render.health_check(host, host.hardware).content.decode()
        text = text.replace("/ /tmp /var/spool/slurmd", str(folder)).replace("/proc", f"{folder}/proc")
        self.write_program("health", text)
        for name in ("munge", "unmunge"):
            self.write_program(name, "#!/bin/sh\n")
        self.add_thread(1, 1, "/init.scope")
        self.set_disk_full(False)

    def write_program(self, name: str, text: str) -> None:
        """A program of this name that it finds before any other."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def set_disk_full(self, is_full: bool) -> None:
        self.write_program("df", f"#!/bin/sh\necho head; echo disk 9 9 9 {99 if is_full else 5}% /\n")

    def add_thread(self, pid: int, tid: int, group: str) -> None:
        for place in (f"{pid}/task/{tid}", *([f"{pid}"] if pid == tid else [])):
            (self.folder / "proc" / place).mkdir(parents=True, exist_ok=True)
            (self.folder / "proc" / place / "cgroup").write_text(f"4:memory:{group}\n0::{group}\n")

    def run(self, environment: Mapping[str, str]) -> None:
        env = {**environment, "PATH": f"{self.folder}:{environment['PATH']}"}
        subprocess.run([str(self.folder / "health")], env=env, check=False, capture_output=True)
