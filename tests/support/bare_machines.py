"""Machines of a cluster on paper, and one that answers scripts as it is told: for tests of planning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.cluster.facts import Facts, read_facts
from shoal.cluster.inventory import Host, Inventory, Role
from shoal.cluster.machine import Answer
from shoal.cluster.render import Secrets
from shoal.cluster.run import Crew
from shoal.errors import EngineRefused, EngineUnreachable

NOW = 1_800_000_000
SECRETS = Secrets(munge_key=b"\x00\x01key" * 200, database_password="a1" * 24)
PART = b"an archive"
ID = "5a" * 16
"""Of a cluster."""
EVERYTHING = (Role.CONTROLLER, Role.DATABASE, Role.WORKER)


def told(hostname: str = "a", address: str = "10.0.0.1", *more: str, without: str = "") -> str:
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
        *more,
        "end",
    ]
    return "".join(f"{line}\n" for line in lines if not without or not line.startswith(without))


def host(name: str, number: int, **fields: object) -> Host:
    return Host.model_validate({"address": f"10.0.0.{number}", "name": name, "user": "root", **fields})


def facts_of(hosts: Iterable[Host], more: dict[str, tuple[str, ...]] | None = None) -> dict[str, Facts]:
    """Facts by address; `more` lines by name."""
    lines = more or {}
    return {
        item.address: read_facts(told(item.label, item.address, *lines.get(item.label, ())), item)
        for item in hosts
    }


def three(**fields: object) -> Inventory:
    hosts = (host("a", 1, roles=EVERYTHING), host("b", 2), host("c", 3))
    return Inventory.model_validate(
        {"cluster": "lab", "hosts": [item.model_dump() for item in hosts], **fields}
    )


def parts_of(hosts: Iterable[Host]) -> dict[str, bytes]:
    return {item.address: PART for item in hosts}


def found(inventory: Inventory, facts: dict[str, Facts]) -> Inventory:
    return inventory.with_found({address: fact.found for address, fact in facts.items()})


@dataclass
class PaperMachine:
    """Remembers every script. `judge` says how one ends; without, everything is so already."""

    facts: str
    judge: Callable[[str], int] = lambda _: 0
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    is_lost: bool = False
    holder: str = ""
    typed: str = "ssh -i /keys/one -J bastion ana@machine"
    as_root: str = "ssh -i /keys/one -J bastion ana@machine sudo"

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> Answer:
        if self.is_lost:
            raise EngineUnreachable("the connection was lost", hint="ssh")
        if script.startswith("export LC_ALL=C"):
            return Answer(0, self.facts, "")
        self.seen.append((script, stdin))
        if "&& echo yes || echo no" in script:
            checks = script.split(") >/dev/null 2>&1 && echo yes || echo no")[:-1]
            return Answer(0, "".join("yes\n" if self.judge(check) == 0 else "no\n" for check in checks), "")
        code = self.judge(script)
        return Answer(code, "", "it broke" if code else "")

    async def hold(self) -> str:
        return self.holder

    async def close(self) -> None:
        return None


def never(_: str) -> int:
    """Nothing is so already, and every change works."""
    return 0 if _.startswith(("set -eu", "refuse() {")) or "exit 0; sleep 1" in _ or "sacctmgr -i" in _ else 1


class Paper:
    """A drawer of machines; those not in it do not answer."""

    def __init__(self, inventory: Inventory, judge: Callable[[str], int] = lambda _: 0) -> None:
        self.shut: set[str] = set()
        self.machines = {
            item.address: PaperMachine(told(item.label, item.address), judge) for item in inventory.hosts
        }

    async def connect(self, item: Host) -> PaperMachine:
        if item.address in self.shut:
            raise EngineRefused(f"{item.address} takes none of our keys", hint="ssh-copy-id")
        if item.address not in self.machines:
            raise EngineUnreachable(f"{item.address} cannot be reached", hint="ssh")
        return self.machines[item.address]

    def crew(self, *, is_dry: bool = False) -> Crew:
        return Crew(self.connect, lambda _: None, lambda: NOW, lambda _, __: PART, is_dry=is_dry)


def wrong(crew: Crew) -> dict[str, str]:
    return {outcome.label: outcome.title for outcome in crew.failed.values()}
