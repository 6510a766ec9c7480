"""The firewall between projects on one machine: no process can connect to a TCP server of another project.

Every project has a user of its own, and the kernel knows which user's process sends a packet. The rules
detect a connection between two projects when the server's side answers it. They compare the user that answers
with the last user that connected from that port, because a process may take a port that another one has just
released.

- Connections of other users (people, root, the data plane) are allowed.
- Only Shoal's own user reaches a replica, and only processes of the replica's project answer at its port.
  Until the server listens, any process could bind the port.
- At a port that a service has named, people's servers may answer as well, because the port may be theirs.
- At Shoal's own ports no project's process answers, not even to clients on other machines.

The rules track nothing for longer than a handshake takes.

Not covered: UDP, sockets in the abstract Unix namespace, connections that arrive from other machines.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator

from shoal.errors import ShoalError
from shoal.local_sockets import FIRST_PROJECT_UID

TABLE = "inet shoal"
OPEN = 1 << 31
"""Added to a project's uid, it makes a group that no project owns, because uids of projects are smaller."""
NFT_PLACES = ("/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft")
NFT_TIMEOUT_S = 10.0
HANDSHAKE_S = 2
"""How long a connection request is remembered. Within one machine the kernel answers at once, and a client
that retries is remembered again."""
REFUSED_S = 10
"""For this long a refused client that retries is rejected at once instead of being left to wait."""
RATE = 5000
BURST = 20_000
"""New connections of one project in a second, so that a flood displaces only the project's own entries."""
MOST_NOTED = 65_536
"""Concurrent handshakes of one project. `RATE` and `BURST` allow fewer than this in `HANDSHAKE_S`."""
MOST_IN_ALL = 1 << 20
PORT_S = 600
"""A replica's port stays protected for this long after its supervisor last renewed that."""
LINGER_S = 60
"""For this long after a server has ended no other process answers at its port, because data planes learn
of the end later."""
OWN_S = 7 * 86_400
"""The ports of the control plane and the data plane stay closed to projects for this long while they are
down."""
OWN = "own_ports"
ASKERS, SERVED, NAMED, SERVERS = "replica_ports", "served_ports", "named_ports", "servers"
"""Sets and maps in the kernel: ports whose replica answers only Shoal's own user, ports at which only one
user may answer, ports at which users that belong to no project may answer, too, and the user of each port."""


class FirewallFailed(ShoalError):
    """The kernel did not accept the rules. Nothing has changed."""

    code = "runtime.firewall"


FAMILIES = (
    # name, asked by (source . port . destination . port), the same as the answer has it
    (
        "4",
        "ip saddr . tcp sport . ip daddr . tcp dport",
        "ip daddr . tcp dport . ip saddr . tcp sport",
    ),
    (
        "6",
        "ip6 saddr . tcp sport . ip6 daddr . tcp dport",
        "ip6 daddr . tcp dport . ip6 saddr . tcp sport",
    ),
)
LAST_ASKED, LAST_ANSWERED = "tcp sport . tcp dport", "tcp dport . tcp sport"
"""The key under which the last client is remembered. Ports only, because nft 1.0 cannot write a longer key
into a map from a rule."""


def open_gid(uid: int) -> int:
    """Return the group of this project's processes with `network: open`, to which every project may connect.

    Each project has its own group, because a group also gives access to files.
    """
    return uid + OPEN


def find_nft() -> str | None:
    """Return the path of `nft`, only from system directories, because it runs as root."""
    return next((path for path in NFT_PLACES if os.access(path, os.X_OK)), None)


def works() -> bool:
    """Whether the kernel accepts such rules here. Changes nothing."""
    if os.geteuid() != 0 or find_nft() is None:
        return False
    try:
        _apply(rules(FIRST_PROJECT_UID), is_trial=True)
    except FirewallFailed:
        return False
    return True


def closed_uids() -> set[int]:
    """Return the users whose network is closed now. An administrator may have flushed the rules."""
    program = find_nft()
    if program is None:
        return set()
    command = [program, "-j", "list", "map", *TABLE.split(), "answering"]
    done = subprocess.run(command, capture_output=True, timeout=NFT_TIMEOUT_S, check=False, env={})
    entries = json.loads(done.stdout)["nftables"] if done.returncode == 0 else []
    return {uid for one in entries for uid, _ in one.get("map", {}).get("elem", ())}


def close(uid: int) -> None:
    """Close the network between this project's user and those of other projects. May be repeated.

    `FirewallFailed`: the network is open, and the job must not start.
    """
    _apply(rules(uid))


def protect(port: int, server_uid: int, *, is_open: bool = False, is_named: bool = False) -> None:
    """Allow only this user to answer at the port for `PORT_S`, and only to Shoal's own user unless `is_open`.

    May be repeated. `is_named`: a service has named this port, so people's servers may use it, too.

    This also creates the rules. Where projects have no users of their own, as on a Slurm node, `close` is
    never called, and an administrator may have flushed the rules.
    """
    claims = list(_claims(port, server_uid, is_named=is_named))[int(is_open) :]
    renewed = (line for claim in claims for line in _renewed(claim, PORT_S))
    _apply("\n".join([*_shared(), *renewed]) + "\n")


def release(port: int, server_uid: int, *, is_named: bool = False) -> None:
    """Release the port of a server that has ended, after `LINGER_S`. May be repeated."""
    askers, *answer = _claims(port, server_uid, is_named=is_named)
    lines = [_added(askers), f"delete {askers} }}"]
    for claim in answer:
        lines += _renewed(claim, LINGER_S)
    _apply("\n".join(lines) + "\n")


def hold(ports: Iterable[int]) -> None:
    """Allow no project's process to answer at these ports for `OWN_S`. May be repeated."""
    elements = (f"element {TABLE} {OWN} {{ {port}" for port in ports)
    renewed = (line for one in elements for line in _renewed(one, OWN_S))
    _apply("\n".join([*_shared(), *renewed]) + "\n")


def _claims(port: int, server_uid: int, *, is_named: bool) -> Iterator[str]:
    """Yield the elements of the three sets, as unfinished commands."""
    yield f"element {TABLE} {ASKERS} {{ {port}"
    yield f"element {TABLE} {NAMED if is_named else SERVED} {{ {port}"
    yield f"element {TABLE} {SERVERS} {{ {server_uid} . {port}"


def _renewed(claim: str, timeout_s: int) -> tuple[str, ...]:
    """Delete and add the element, because adding an existing one does not renew its timeout."""
    return _added(claim), f"delete {claim} }}", _added(claim, timeout_s)


def _added(claim: str, timeout_s: int = PORT_S) -> str:
    return f"add {claim} timeout {timeout_s}s }}"


def rules(uid: int) -> str:
    """Return the nft commands for a project's user, including the part that all projects share. Pure.

    They are one transaction, so two processes that apply them at the same time leave the same rules.
    """
    return "\n".join([*_shared(), *_of_project(uid)]) + "\n"


def _shared() -> Iterator[str]:
    yield f"add table {TABLE}"
    yield f"add map {TABLE} asking {{ type uid : verdict; }}"
    yield f"add map {TABLE} answering {{ type uid : verdict; }}"
    for name in (ASKERS, SERVED, NAMED, OWN):
        yield f"add set {TABLE} {name} {{ type inet_service; flags timeout; }}"
    yield f"add set {TABLE} {SERVERS} {{ typeof meta skuid . tcp sport; flags timeout; }}"
    last = f"typeof {LAST_ASKED} : meta mark; flags dynamic,timeout; size {MOST_IN_ALL}"
    yield f"add map {TABLE} last {{ {last}; timeout {HANDSHAKE_S}s; }}"
    for name, question, _ in FAMILIES:
        noted = f"typeof {question}; flags dynamic,timeout; size {MOST_IN_ALL}"
        yield f"add set {TABLE} refused{name} {{ {noted}; timeout {REFUSED_S}s; }}"
        yield f"add set {TABLE} asked{name} {{ {noted}; timeout {HANDSHAKE_S}s; }}"
    for chain in ("out { type filter hook output priority filter; policy accept; }", "asks", "answers"):
        yield f"add chain {TABLE} {chain}"
    for chain in ("out", "asks", "answers"):
        yield f"flush chain {TABLE} {chain}"
    answer = f"add rule {TABLE} out tcp flags & (syn | ack) == (syn | ack)"
    yield f"{answer} meta skuid >= {FIRST_PROJECT_UID} tcp sport @{OWN} drop"
    # Packets to an address of this machine leave through `lo`.
    yield f'add rule {TABLE} out oifname != "lo" accept'
    yield f"add rule {TABLE} out tcp flags & (syn | ack) == syn jump asks"
    # Shoal's own user may answer: it has every secret, and its daemons may get a port that was a replica's.
    stranger = f"meta skuid != {os.geteuid()}"
    not_its = f"meta skuid . tcp sport != @{SERVERS}"
    yield f"{answer} {stranger} tcp sport @{SERVED} {not_its} drop"
    yield f"{answer} meta skuid >= {FIRST_PROJECT_UID} tcp sport @{NAMED} {not_its} drop"
    # A replica answers clients that run as Shoal's own user. A client of another server at that port may
    # pass.
    for name, question, answered in FAMILIES:
        at_replica = f"add rule {TABLE} asks {{}} tcp dport @{ASKERS}"
        yield f"{at_replica.format(f'meta skuid {os.geteuid()}')} update @asked{name} {{ {question} }}"
        yield f"{at_replica.format(stranger)} delete @asked{name} {{ {question} }}"
        yield f"{at_replica.format(stranger)} {question} @refused{name} reject with tcp reset"
        replica = f"{answer} tcp sport @{ASKERS} meta skuid . tcp sport @{SERVERS} {answered} != @asked{name}"
        yield f"{replica} update @refused{name} {{ {answered} }} reject with tcp reset"
    yield f"{answer} meta skuid vmap @answering"
    yield f"add rule {TABLE} asks meta skuid vmap @asking"
    yield f"add rule {TABLE} asks delete @last {{ {LAST_ASKED} : 0 }}"


def _of_project(uid: int) -> Iterator[str]:
    asks, answers = f"asks_{uid}", f"answers_{uid}"
    for name, question, _ in FAMILIES:
        yield (
            f"add set {TABLE} noted{name}_{uid} {{ typeof {question}; flags dynamic,timeout; "
            f"size {MOST_NOTED}; timeout {HANDSHAKE_S}s; }}"
        )
    for chain in (asks, answers):
        yield f"add chain {TABLE} {chain}"
        yield f"flush chain {TABLE} {chain}"
    for name, question, _ in FAMILIES:
        # Reject only retries, because another project may have been refused with the same port.
        again = f"{question} @refused{name} {question} @noted{name}_{uid}"
        yield f"add rule {TABLE} {asks} {again} reject with tcp reset"
    yield f"add rule {TABLE} {asks} limit rate over {RATE}/second burst {BURST} packets drop"
    # Updating an existing element changes only its timeout.
    last = f"delete @last {{ {LAST_ASKED} : {uid} }} update @last {{ {LAST_ASKED} : {uid} }}"
    for name, question, _ in FAMILIES:
        noted = f"delete @refused{name} {{ {question} }} update @noted{name}_{uid} {{ {question} }}"
        yield f"add rule {TABLE} {asks} {noted} {last} accept"
    yield f"add rule {TABLE} {asks} drop"  # a connection that cannot be remembered could not be refused
    yield f"add rule {TABLE} {answers} meta skgid {open_gid(uid)} accept"
    # A rule can compare a map's value only through the mark, which is set to 0 again before other rules see
    # it.
    yield f"add rule {TABLE} {answers} meta mark set 0"
    yield f"add rule {TABLE} {answers} meta mark set {LAST_ANSWERED} map @last"
    yield f"add rule {TABLE} {answers} meta mark 0 accept"
    for name, _, answered in FAMILIES:
        own_packets = f"meta mark {uid} {answered} @noted{name}_{uid} meta mark set 0 accept"
        yield f"add rule {TABLE} {answers} {own_packets}"
    for name, _, answered in FAMILIES:
        yield f"add rule {TABLE} {answers} update @refused{name} {{ {answered} }} reject with tcp reset"
    yield f"add rule {TABLE} {answers} drop"
    yield f"add element {TABLE} asking {{ {uid} : jump {asks} }}"
    yield f"add element {TABLE} answering {{ {uid} : jump {answers} }}"


def _apply(text: str, *, is_trial: bool = False) -> None:
    program = find_nft()
    if program is None:
        raise FirewallFailed("there is no program nft", hint="apt-get install nftables")
    command = [program, "-c", "-f", "-"] if is_trial else [program, "-f", "-"]
    try:
        done = subprocess.run(
            command, input=text.encode(), capture_output=True, timeout=NFT_TIMEOUT_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FirewallFailed(f"nft: {error}", hint="shoal doctor") from error
    if done.returncode:
        error_lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise FirewallFailed(
            f"nft: {error_lines[0] if error_lines else done.returncode}", hint="shoal doctor"
        )
