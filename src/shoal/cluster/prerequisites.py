"""What `shoal cluster` cannot set up itself: the firewall between the machines, and a shared directory.

It prints firewall commands, and checks that a directory is the same on every machine: the controller writes a
mark there, and the others must see it. Nothing is mounted, and no directory is made. Pure text for `sh`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.cluster.facts import Facts
from shoal.cluster.inventory import HostRole, Inventory, InventoryHost
from shoal.cluster.render import CONTROLLER_PORT, DATABASE_PORT, SRUN_PORTS, WORKER_PORT
from shoal.cluster.shell import append_record


def firewall_advice(inventory: Inventory, facts: Mapping[str, Facts]) -> list[str]:
    """Return the ports to open, then what to type on each machine with a firewall: inside the cluster
    only.
    """
    lines = [
        (
            f"between the machines, open tcp {CONTROLLER_PORT} to {inventory.controller.label} (slurmctld),"
            f" {DATABASE_PORT} to {inventory.database.label} (slurmdbd), {WORKER_PORT} to every worker"
            f" (slurmd), {SRUN_PORTS} everywhere (srun)"
        ),
        "to no other machine: all of that is signed with munge, none of it is encrypted",
    ]
    peers = [host.hardware.address for host in inventory.hosts if host.hardware]
    for host in inventory.hosts:
        fact = facts.get(host.address)
        for tool in fact.firewalls if fact else ():
            lines += [f"on {host.label}: {line}" for line in _commands(tool, host, peers)]
    return lines


def _ports(host: InventoryHost) -> list[str]:
    ports = [SRUN_PORTS]
    if host.has(HostRole.CONTROLLER):
        ports.append(str(CONTROLLER_PORT))
    if host.has(HostRole.DATABASE):
        ports.append(str(DATABASE_PORT))
    if host.has(HostRole.WORKER):
        ports.append(str(WORKER_PORT))
    return ports


def _rich_rules(host: InventoryHost, peer: str) -> str:
    """Return rules that open these ports to this peer: a zone that trusts the peer would open every port."""
    source = f'rule family="ipv{6 if ":" in peer else 4}" source address="{peer}"'
    return " ".join(
        f'--add-rich-rule=\'{source} port port="{port}" protocol="tcp" accept\'' for port in _ports(host)
    )


def _commands(tool: str, host: InventoryHost, peers: list[str]) -> list[str]:
    others = [peer for peer in peers if host.hardware is None or peer != host.hardware.address]
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


SHARED_MARK = ".shoal-cluster"
MARK_ATTEMPTS = 20
"""How often to look for a mark, twice a second: a new file may show late over NFS."""
_AS_LOGIN = 'as=; [ -z "${SUDO_UID:-}" ] || as="setpriv --reuid $SUDO_UID --regid $SUDO_GID --init-groups"'
"""The user that logs in must be able to work there, because root may be `nobody` on an NFS mount."""


def directory_exists(folder: str) -> str:
    return f"{_AS_LOGIN}\n$as test -d {folder}"


def has_shared_mark(folder: str, mark: str) -> str:
    return f"""\
{_AS_LOGIN}
[ "$($as cat {folder}/{SHARED_MARK} 2>/dev/null)" = '{mark}' ]"""


def write_shared_mark(folder: str, mark: str) -> str:
    """Write the mark. Others may write to the folder, so a file of that name is replaced, never written
    to.
    """
    return f"""\
{_AS_LOGIN}
[ -d {folder} ] || {{ echo 'there is no directory {folder}; make or mount it on every machine' >&2; exit 1; }}
{append_record("made", f"mark {folder}/{SHARED_MARK}")}
$as sh -c 'set -eC
new=$(mktemp -u {folder}/{SHARED_MARK}.XXXXXXXXXX)
echo "{mark}" >"$new"
mv -fT "$new" {folder}/{SHARED_MARK} || {{ rm -f "$new"; exit 1; }}'"""


def remove_shared_mark(path: str) -> str:
    return f"{_AS_LOGIN}\n$as rm -f {path}"


def explain_missing_mark(folder: str, mark: str, controller: str) -> str:
    """Change nothing: say what is wrong, unless a slow file system shows the mark meanwhile."""
    return f"""\
for i in $(seq {MARK_ATTEMPTS}); do ({has_shared_mark(folder, mark)}) && exit 0; sleep 0.5; done
{_AS_LOGIN}
[ -d {folder} ] || {{ echo 'there is no directory {folder}; mount it as on {controller}' >&2; exit 1; }}
seen=$($as head -n 1 {folder}/{SHARED_MARK} 2>/dev/null | head -c 100)
if [ -z "$seen" ]; then echo '{folder} is a directory of this machine alone; mount it as on {controller}' >&2
else printf "%s has the mark '%s', not '{mark}': mount it as on {controller}\\n" {folder} "$seen" >&2; fi
exit 1"""
