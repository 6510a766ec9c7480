"""Why a machine must not be made part of a cluster as it is, in words that end with what to do. Pure.

`objections` is asked before anything is changed, `misfits` once the packages are there, `remarks` in the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from shoal.cluster import render, shell
from shoal.cluster.facts import (
    DATABASE,
    MUNGE_KEY,
    MYSQL,
    SLURM_CONF,
    SLURM_DIR,
    SLURMDBD_CONF,
    STATE_DIR,
    Facts,
)
from shoal.cluster.inventory import Host, Inventory, Role

MAX_SKEW_S = 60
"""Munge refuses credentials that are five minutes off; a minute leaves room to drift."""
RELEASES = ("20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11")
MAX_RELEASES_APART = 2
"""What every slurmctld promises of older slurmds."""
MIN_PYTHON = (3, 11)


class Takeover(StrEnum):
    """What becomes of a file that was there before Shoal: nothing is lost in any case."""

    REFUSE = "refuse"
    KEEP = "keep"
    REPLACE = "replace"


def objections(inventory: Inventory, facts: Mapping[str, Facts], takeover: Takeover) -> dict[str, list[str]]:
    """By address, why a machine must not be touched as it is. Empty: it may be."""
    found: dict[str, list[str]] = {}
    kept = facts.get(inventory.controller.address)
    for host in _asked(inventory, facts):
        fact = facts[host.address]
        told = [*_objections(host, fact, inventory, takeover, kept)]
        if takeover is Takeover.KEEP and host == inventory.controller:
            told += _keyless(inventory, facts)
        told += _namesakes(host, inventory, facts)
        if told:
            found[host.address] = told
    return found


def whose(fact: Facts, inventory: Inventory) -> str:
    """Whose a machine is that belongs to another cluster, and what to do."""
    if fact.own_cluster != inventory.cluster:
        return (
            f"belongs to cluster `{fact.own_cluster}`; `shoal cluster remove {fact.hostname} --cluster"
            f" {fact.own_cluster}` first, or, if that is gone, `rm {STATE_DIR}/cluster` on it"
        )
    return (
        f"belongs to a cluster `{fact.own_cluster}` that was made by another inventory: work from the home"
        f" that has it, or `shoal cluster remove {fact.hostname} --cluster {inventory.cluster}` there first,"
        f" or, if that cluster is gone, `rm {STATE_DIR}/cluster` on it; if it is this very cluster, put"
        f" `id: {fact.own_id}` into clusters/{inventory.cluster}.yaml of this home"
    )


def _namesakes(host: Host, inventory: Inventory, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Why its name is another's, also one's that does not answer. Who joined by a name keeps it."""
    label, hostname = _names(host, facts)
    same = []
    for other in inventory.hosts:
        others = _names(other, facts)
        if other.address != host.address and (others[0] == label or others[1] == hostname):
            same.append(other)
    if not same or (_has_joined_so(host, facts) and not any(_has_joined_so(other, facts) for other in same)):
        return
    if away := [other for other in same if other.address not in facts]:
        why = "left and was not cleaned" if away[0].is_unclean else "does not answer"
        yield (
            f"is called `{label}`, as {away[0].address} is, which {why};"
            f" `shoal cluster remove {away[0].label} --cluster {inventory.cluster}` first"
        )
    else:
        yield (
            f"is called `{label}`, and so is another machine of the cluster;"
            " give each a name of its own with `hostnamectl set-hostname`"
        )


def _names(host: Host, facts: Mapping[str, Facts]) -> tuple[str, str]:
    """What Slurm calls it, and what it calls itself: nothing, where nobody ever knew."""
    if fact := facts.get(host.address):
        return host.name or fact.hostname, fact.hostname
    return host.label, host.found.hostname if host.found else ""


def _has_joined_so(host: Host, facts: Mapping[str, Facts]) -> bool:
    return host.found is not None and host.found.hostname == _names(host, facts)[1]


def _asked(inventory: Inventory, facts: Mapping[str, Facts]) -> Sequence[Host]:
    return [host for host in inventory.hosts if host.address in facts]


def _objections(
    host: Host, fact: Facts, inventory: Inventory, takeover: Takeover, kept: Facts | None
) -> Iterator[str]:
    if fact.is_others(inventory):
        yield whose(fact, inventory)
    if fact.hostname == "localhost":
        yield "calls itself `localhost`, as every machine does; `hostnamectl set-hostname` gives it a name"
    if kept is not None and abs(fact.off_s - kept.off_s) > MAX_SKEW_S:
        yield (
            f"has a clock {fact.off_s - kept.off_s:+d} s off the controller's, more than {MAX_SKEW_S} s, and"
            " munge would refuse it: `apt-get install chrony` on both"
        )
    if fact.found.address.startswith("127.") and len(inventory.hosts) > 1:
        yield "is known by a loopback address only; say with `inside:` where the others reach it"
    if fact.split_gpus:
        which = ",".join(map(str, fact.split_gpus))
        yield (
            f"has MIG switched on at GPU {which}, and Slurm would hand out a whole one that nobody can use:"
            f" `nvidia-smi -i {which} -mig 0`, or leave the machine out"
        )
    if host.has(Role.DATABASE) and "database" not in fact.own_made:
        yield from _foreign_servers(fact)
        if DATABASE in fact.databases:
            yield f"has a database `{DATABASE}` that Shoal did not make; rename it, or choose another machine"
    if takeover is not Takeover.REPLACE:
        yield from _foreign_files(host, fact, inventory, takeover, kept)


def _foreign_servers(fact: Facts) -> Iterator[str]:
    if others := sorted(name for name in fact.packages if name.startswith(MYSQL)):
        yield (
            f"has {', '.join(others)}, and accounting is set up with MariaDB; choose another machine for"
            " `database`"
        )
    elif fact.databases and "mariadb-server" not in {*fact.packages, *fact.removed, *fact.own_packages}:
        yield (
            "has data in /var/lib/mysql, and not from Debian's `mariadb-server`, which would take it over:"
            " choose another machine for `database`, or install that yourself if it may"
        )


def _foreign_files(
    host: Host, fact: Facts, inventory: Inventory, takeover: Takeover, kept: Facts | None
) -> Iterator[str]:
    keeps_key = inventory.keeps_munge_key or takeover is Takeover.KEEP
    for path in sorted(fact.files):
        if not _is_foreign(fact, path) or path not in _wanted_paths(host):
            continue
        if path == MUNGE_KEY and keeps_key and kept is not None and path in kept.files:
            if fact.files[path] != kept.files[path]:
                yield f"has a {path} other than the controller's, which `--existing keep` would spread"
            continue
        by_whom = "was changed since Shoal wrote it" if fact.was_own(path) else "was there before Shoal"
        yield f"has a {path} that {by_whom}; `--existing replace` moves it to {path}{shell.BACKUP}"


def _is_foreign(fact: Facts, path: str) -> bool:
    if path == MUNGE_KEY and "munge" in fact.own_packages and not fact.was_own(path):
        return False  # made by the package that Shoal installed, before Shoal was cut off
    return path in fact.files and not fact.is_own(path)


def _keyless(inventory: Inventory, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Of a controller that is told to keep its key and has none, while another machine has one."""
    having = [host for host in _asked(inventory, facts) if _is_foreign(facts[host.address], MUNGE_KEY)]
    if having and MUNGE_KEY not in facts[inventory.controller.address].files:
        labels = ", ".join(host.label for host in having)
        yield (
            f"has no {MUNGE_KEY} that `--existing keep` could spread, and {labels} has one: copy it here, or"
            f" say `--controller {having[0].address}`, or `--existing replace` for a new one"
        )


def _wanted_paths(host: Host) -> set[str]:
    paths = {
        MUNGE_KEY,
        SLURM_CONF,
        f"{SLURM_DIR}/gres.conf",
        f"{SLURM_DIR}/topology.conf",
        f"{SLURM_DIR}/cgroup.conf",
    }
    if host.has(Role.DATABASE):
        paths |= {SLURMDBD_CONF, render.MARIADB_CNF}
    if host.has(Role.WORKER):
        paths |= {render.HEALTH_PATH}
    return paths


def misfits(inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, list[str]]:
    """By address, why what the machine's archive installed does not fit the controller's."""
    found: dict[str, list[str]] = {}
    controller = facts.get(inventory.controller.address)
    for host in _asked(inventory, facts):
        if controller is not None and (told := [*_misfits(host, facts[host.address], controller)]):
            found[host.address] = told
    return found


def _misfits(host: Host, fact: Facts, controller: Facts) -> Iterator[str]:
    if fact.slurm_uid != controller.slurm_uid:
        yield (
            f"has the user `slurm` as uid {fact.slurm_uid}, the controller as {controller.slurm_uid}, and"
            f" Slurm goes by the number: `usermod -u {controller.slurm_uid} slurm` there"
        )
    if not host.has(Role.WORKER):
        return
    ours, theirs = release(fact, "slurmd"), release(controller, "slurmctld")
    if ours and theirs and (ours > theirs or _apart(ours, theirs) > MAX_RELEASES_APART):
        how = "newer than" if ours > theirs else "too old for"
        yield (
            f"has Slurm {ours} ({fact.os} {fact.os_version}), {how} the controller's {theirs}"
            f" ({controller.os} {controller.os_version}): take machines of one release, or the newest for"
            " `--controller`"
        )
    if tuple(int(number) for number in (fact.python or "0.0").split(".")) < MIN_PYTHON:
        yield (
            f"has Python {fact.python or '(none)'}, and Shoal's own part on a node needs"
            f" {'.'.join(map(str, MIN_PYTHON))}: Debian 12, Ubuntu 24.04, or newer"
        )


def release(fact: Facts, package: str) -> str:
    """`22.05`: two machines of one release understand each other. Empty where it is not installed."""
    found = re.match(r"(?:\d+:)?(\d+\.\d+)", fact.packages.get(package, ""))
    return found.group(1) if found else ""


def _apart(older: str, newer: str) -> int:
    if older not in RELEASES or newer not in RELEASES:
        return 0  # newer than this list: slurmctld itself will say
    return RELEASES.index(newer) - RELEASES.index(older)


def unlike_users(inventory: Inventory, facts: Mapping[str, Facts]) -> list[str]:
    """Sentences about a login that is somebody else on another machine: its jobs would run as them."""
    controller = facts.get(inventory.controller.address)
    if controller is None:
        return []
    name, uid = controller.login
    told = []
    for host in _asked(inventory, facts):
        other, number = facts[host.address].login
        if other != name or number != uid:
            told.append(
                f"{host.label}: logged in as `{other}`, uid {number}; on the controller as `{name}`, uid"
                f" {uid}. Slurm goes by the number: jobs of `{name}` would run there as somebody else"
            )
    return told


def remarks(inventory: Inventory, facts: Mapping[str, Facts], *, is_contained: bool) -> list[str]:
    """What works, and is good to know."""
    present = _asked(inventory, facts)
    told = unlike_users(inventory, facts)
    create = f"`shoal cluster create --name {inventory.cluster}`"
    if direct := [host.label for host in present if facts[host.address].init != "systemd"]:
        told.append(
            f"no systemd on {', '.join(direct)}: Shoal starts the daemons itself, and after a restart of the"
            f" machine {create} starts them again"
        )
    if bare := [host.label for host in present if not facts[host.address].found.cgroup]:
        told.append(f"no writable cgroups on {', '.join(bare)}: memory and devices of jobs are not confined")
    elif not is_contained:
        told.append(
            "not every machine answered, and cgroups are used once all are known to have them: memory and"
            f" devices of jobs are not confined until {create} reaches all"
        )
    if not inventory.shared:
        told.append(
            "no directory that all machines share: jobs with `checkpoint` will be refused. Once there is one"
            f" (NFS, say): `shoal cluster create --name {inventory.cluster} --shared DIR`"
        )
    return told
