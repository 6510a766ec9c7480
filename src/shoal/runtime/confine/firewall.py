"""The wall between projects within one machine: a project's processes connect to no TCP server of another's.

Every project has a user of its own, and the kernel knows whose process sends a packet. A connection between
two projects is found when the server's kernel side answers it: the user that answers is then compared with
the one that asked last from that port, because a process may take a port that another one has just let go.
Connections of other users (people, root, the data plane) are left alone, but only Shoal's own user reaches
a replica, and only processes of the replica's project answer at its port: until the server listens, the port
is free to whoever binds it. At a port that a service named, people's servers answer as well: they may have
been meant to have it. At Shoal's own ports no project's process answers, to callers on other
machines neither. Nothing is tracked for longer than a handshake takes.

Not covered: UDP, sockets in the abstract Unix namespace, connections that arrive from other machines.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator

from shoal.errors import ShoalError
from shoal.loopback import FIRST_PROJECT_UID

TABLE = "inet shoal"
OPEN = 1 << 31
"""Added to a project's uid, it makes a group that is no project's own: uids of projects are smaller."""
NFT_PLACES = ("/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft")
APPLY_S = 10.0
HANDSHAKE_S = 2
"""A server's kernel answers within the machine at once; a client that asks again is noted again."""
REFUSED_S = 10
"""For so long a client that asks again is refused at once instead of being left to wait."""
RATE = 5000
BURST = 20_000
"""New connections of one project in a second: what it floods is its own, and never the notes of others."""
MOST_NOTED = 65_536
"""Handshakes of one project at once; more than `RATE` and `BURST` let through in `HANDSHAKE_S`."""
MOST_IN_ALL = 1 << 20
PORT_S = 600
"""A replica's port is protected for so long after its supervisor last said so."""
LINGER_S = 60
"""For so long after its server has ended nobody else answers there: data planes hear of that end later."""
OWN_S = 7 * 86_400
"""The control plane and the data plane may be away for so long, and their ports stay closed to projects."""
OWN = "own_ports"
ASKERS, SERVED, NAMED, SERVERS = "replica_ports", "served_ports", "named_ports", "servers"
"""Ports whose replica answers Shoal's own user alone; ports at which one user alone may answer; those at
which users who are no project's may, too; which one."""


class FirewallFailed(ShoalError):
    """The kernel did not take the rules; nothing has changed."""

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
"""The key of who asked last. Ports alone: nft 1.0 writes no longer key into a map from a rule."""


def open_gid(uid: int) -> int:
    """The group of this project's processes that said `network: open`: every project may connect to them.

    Each project has its own, because a group opens files as well.
    """
    return uid + OPEN


def find_nft() -> str | None:
    """The program, from system directories alone: it runs as root."""
    return next((path for path in NFT_PLACES if os.access(path, os.X_OK)), None)


def works() -> bool:
    """Whether this kernel takes such rules here. Changes nothing."""
    if os.geteuid() != 0 or find_nft() is None:
        return False
    try:
        _apply(rules(FIRST_PROJECT_UID), is_trial=True)
    except FirewallFailed:
        return False
    return True


def closed_uids() -> set[int]:
    """Users whose network is closed now: somebody else may have flushed the rules."""
    program = find_nft()
    if program is None:
        return set()
    command = [program, "-j", "list", "map", *TABLE.split(), "answering"]
    done = subprocess.run(command, capture_output=True, timeout=APPLY_S, check=False, env={})
    found = json.loads(done.stdout)["nftables"] if done.returncode == 0 else []
    return {uid for one in found for uid, _ in one.get("map", {}).get("elem", ())}


def close(uid: int) -> None:
    """Close the network between this project's user and those of other projects. May be repeated.

    `FirewallFailed`: it is open, and the job must not start.
    """
    _apply(rules(uid))


def protect(port: int, server_uid: int, *, is_open: bool = False, is_named: bool = False) -> None:
    """For `PORT_S` from now only this user may answer at the port, and it answers Shoal's own user alone
    unless it `is_open`. May be repeated. `is_named`: a service asked for this number, so people may have it.

    The rules need not be there: where projects have no users of their own, as on a node of Slurm, `close` is
    never called, and an administrator may have flushed them since.
    """
    claims = list(_claims(port, server_uid, is_named=is_named))[int(is_open) :]
    renewed = (line for claim in claims for line in _renewed(claim, PORT_S))
    _apply("\n".join([*_shared(), *renewed]) + "\n")


def release(port: int, server_uid: int, *, is_named: bool = False) -> None:
    """The server has ended: the port is nobody's in `LINGER_S`. May be repeated."""
    askers, *answer = _claims(port, server_uid, is_named=is_named)
    lines = [_added(askers), f"delete {askers} }}"]
    for claim in answer:
        lines += _renewed(claim, LINGER_S)
    _apply("\n".join(lines) + "\n")


def hold(ports: Iterable[int]) -> None:
    """For `OWN_S` from now no project's process answers at these ports, whoever asks. May be repeated."""
    elements = (f"element {TABLE} {OWN} {{ {port}" for port in ports)
    renewed = (line for one in elements for line in _renewed(one, OWN_S))
    _apply("\n".join([*_shared(), *renewed]) + "\n")


def _claims(port: int, server_uid: int, *, is_named: bool) -> Iterator[str]:
    """Elements of the three sets, not ended yet."""
    yield f"element {TABLE} {ASKERS} {{ {port}"
    yield f"element {TABLE} {NAMED if is_named else SERVED} {{ {port}"
    yield f"element {TABLE} {SERVERS} {{ {server_uid} . {port}"


def _renewed(claim: str, timeout_s: int) -> tuple[str, ...]:
    """Adding what is there leaves its time as it is."""
    return _added(claim), f"delete {claim} }}", _added(claim, timeout_s)


def _added(claim: str, timeout_s: int = PORT_S) -> str:
    return f"add {claim} timeout {timeout_s}s }}"


def rules(uid: int) -> str:
    """What the kernel is told for a project's user, the part that all projects share included. Pure.

    One transaction: whoever says the same at the same time leaves the same rules.
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
    for name, asked, _ in FAMILIES:
        noted = f"typeof {asked}; flags dynamic,timeout; size {MOST_IN_ALL}"
        yield f"add set {TABLE} refused{name} {{ {noted}; timeout {REFUSED_S}s; }}"
        yield f"add set {TABLE} asked{name} {{ {noted}; timeout {HANDSHAKE_S}s; }}"
    for chain in ("out { type filter hook output priority filter; policy accept; }", "asks", "answers"):
        yield f"add chain {TABLE} {chain}"
    for chain in ("out", "asks", "answers"):
        yield f"flush chain {TABLE} {chain}"
    answer = f"add rule {TABLE} out tcp flags & (syn | ack) == (syn | ack)"
    yield f"{answer} meta skuid >= {FIRST_PROJECT_UID} tcp sport @{OWN} drop"
    # Whatever is sent to an address of this machine goes out by `lo`.
    yield f'add rule {TABLE} out oifname != "lo" accept'
    yield f"add rule {TABLE} out tcp flags & (syn | ack) == syn jump asks"
    # Shoal's own user may answer. It has every secret, and its daemons may get a port that was a replica's.
    stranger = f"meta skuid != {os.geteuid()}"
    not_its = f"meta skuid . tcp sport != @{SERVERS}"
    yield f"{answer} {stranger} tcp sport @{SERVED} {not_its} drop"
    yield f"{answer} meta skuid >= {FIRST_PROJECT_UID} tcp sport @{NAMED} {not_its} drop"
    # The replica answers who asked as Shoal's own user. Who asks a stranger's server at its port is let pass.
    for name, asked, answered in FAMILIES:
        at_replica = f"add rule {TABLE} asks {{}} tcp dport @{ASKERS}"
        yield f"{at_replica.format(f'meta skuid {os.geteuid()}')} update @asked{name} {{ {asked} }}"
        yield f"{at_replica.format(stranger)} delete @asked{name} {{ {asked} }}"
        yield f"{at_replica.format(stranger)} {asked} @refused{name} reject with tcp reset"
        replica = f"{answer} tcp sport @{ASKERS} meta skuid . tcp sport @{SERVERS} {answered} != @asked{name}"
        yield f"{replica} update @refused{name} {{ {answered} }} reject with tcp reset"
    yield f"{answer} meta skuid vmap @answering"
    yield f"add rule {TABLE} asks meta skuid vmap @asking"
    yield f"add rule {TABLE} asks delete @last {{ {LAST_ASKED} : 0 }}"


def _of_project(uid: int) -> Iterator[str]:
    asks, answers = f"asks_{uid}", f"answers_{uid}"
    for name, asked, _ in FAMILIES:
        yield (
            f"add set {TABLE} noted{name}_{uid} {{ typeof {asked}; flags dynamic,timeout; "
            f"size {MOST_NOTED}; timeout {HANDSHAKE_S}s; }}"
        )
    for chain in (asks, answers):
        yield f"add chain {TABLE} {chain}"
        yield f"flush chain {TABLE} {chain}"
    for name, asked, _ in FAMILIES:
        # Only who asks again: another project may have been refused with the same port.
        again = f"{asked} @refused{name} {asked} @noted{name}_{uid}"
        yield f"add rule {TABLE} {asks} {again} reject with tcp reset"
    yield f"add rule {TABLE} {asks} limit rate over {RATE}/second burst {BURST} packets drop"
    # An update of what is there changes its time alone.
    last = f"delete @last {{ {LAST_ASKED} : {uid} }} update @last {{ {LAST_ASKED} : {uid} }}"
    for name, asked, _ in FAMILIES:
        noted = f"delete @refused{name} {{ {asked} }} update @noted{name}_{uid} {{ {asked} }}"
        yield f"add rule {TABLE} {asks} {noted} {last} accept"
    yield f"add rule {TABLE} {asks} drop"  # what cannot be noted could not be refused
    yield f"add rule {TABLE} {answers} meta skgid {open_gid(uid)} accept"
    # A rule can compare what a map holds by way of the mark, which is 0 again before anybody else sees it.
    yield f"add rule {TABLE} {answers} meta mark set 0"
    yield f"add rule {TABLE} {answers} meta mark set {LAST_ANSWERED} map @last"
    yield f"add rule {TABLE} {answers} meta mark 0 accept"
    for name, _, answered in FAMILIES:
        own = f"meta mark {uid} {answered} @noted{name}_{uid} meta mark set 0 accept"
        yield f"add rule {TABLE} {answers} {own}"
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
            command, input=text.encode(), capture_output=True, timeout=APPLY_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FirewallFailed(f"nft: {error}", hint="shoal doctor") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise FirewallFailed(f"nft: {said[0] if said else done.returncode}", hint="shoal doctor")
