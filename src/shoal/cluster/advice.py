"""What a firewall between the machines must let through, and the commands for those that run one."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.cluster.facts import Facts
from shoal.cluster.inventory import Host, Inventory, Role
from shoal.cluster.render import CONTROLLER_PORT, DATABASE_PORT, SRUN_PORTS, WORKER_PORT


def firewall(inventory: Inventory, facts: Mapping[str, Facts]) -> list[str]:
    """The openings, then what to type on each machine that has a firewall: inside the cluster only."""
    told = [
        (
            f"between the machines, open tcp {CONTROLLER_PORT} to {inventory.controller.label} (slurmctld),"
            f" {DATABASE_PORT} to {inventory.database.label} (slurmdbd), {WORKER_PORT} to every worker"
            f" (slurmd), {SRUN_PORTS} everywhere (srun)"
        ),
        "to nobody else: all of that is signed with munge, none of it is encrypted",
    ]
    peers = [host.found.address for host in inventory.hosts if host.found]
    for host in inventory.hosts:
        fact = facts.get(host.address)
        for tool in fact.firewalls if fact else ():
            told += [f"on {host.label}: {line}" for line in _commands(tool, host, peers)]
    return told


def _ports(host: Host) -> list[str]:
    ports = [SRUN_PORTS]
    if host.has(Role.CONTROLLER):
        ports.append(str(CONTROLLER_PORT))
    if host.has(Role.DATABASE):
        ports.append(str(DATABASE_PORT))
    if host.has(Role.WORKER):
        ports.append(str(WORKER_PORT))
    return ports


def _rich_rules(host: Host, peer: str) -> str:
    """These ports to this peer: a zone that trusts the peer would open every other one as well."""
    source = f'rule family="ipv{6 if ":" in peer else 4}" source address="{peer}"'
    return " ".join(
        f'--add-rich-rule=\'{source} port port="{port}" protocol="tcp" accept\'' for port in _ports(host)
    )


def _commands(tool: str, host: Host, peers: list[str]) -> list[str]:
    others = [peer for peer in peers if host.found is None or peer != host.found.address]
    if tool == "ufw":
        ports = ",".join(port.replace("-", ":") for port in _ports(host))
        return [f"ufw allow proto tcp from {peer} to any port {ports}" for peer in others]
    if tool == "firewalld":
        rules = [f"firewall-cmd --permanent {_rich_rules(host, peer)}" for peer in others]
        return [*rules, "firewall-cmd --reload"] if rules else []
    ports = ", ".join(_ports(host))
    sources = ", ".join(others)
    return (
        [f"nft add rule inet filter input ip saddr {{ {sources} }} tcp dport {{ {ports} }} accept"]
        if others
        else []
    )
