"""Why a machine must not become part of a cluster as it is, in sentences that end with what to do. Pure.

`preflight_problems` is called before anything is changed, `incompatibilities` when the packages are
installed, and `remarks` at the end.

`reconcile_members` decides what stays declared of a member that shows less than it joined with. A lost GPU,
or a driver that does not answer, is for a person to repair: if it became the new declaration, the node that
was drained for it would come back without the GPU. The same goes for a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from shoal.cluster.inventory import DetectedHardware, HostRole, Inventory, InventoryHost

MAX_SKEW_S = 60
"""Munge refuses credentials that are five minutes off; a minute leaves room to drift."""
RELEASES = ("20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11")
MAX_RELEASES_APART = 2
"""How much older a slurmd may be than its slurmctld, by Slurm's own rule."""
MIN_PYTHON = (3, 11)


class Takeover(StrEnum):
    """What happens to a file that was there before Shoal. It is never lost."""

    REFUSE = "refuse"
    KEEP = "keep"
    REPLACE = "replace"


def preflight_problems(
    inventory: Inventory, facts: Mapping[str, Facts], takeover: Takeover
) -> dict[str, list[str]]:
    """Return, by address, why a machine must not be changed as it is. Empty: it may be."""
    result: dict[str, list[str]] = {}
    kept = facts.get(inventory.controller.address)
    for host in _reachable_hosts(inventory, facts):
        fact = facts[host.address]
        problems = [*_host_problems(host, fact, inventory, takeover, kept)]
        if takeover is Takeover.KEEP and host == inventory.controller:
            problems += _missing_key_problem(inventory, facts)
        problems += _name_conflicts(host, inventory, facts)
        if problems:
            result[host.address] = problems
    return result


def other_owner_text(fact: Facts, inventory: Inventory) -> str:
    """Say which cluster a machine belongs to, and what to do."""
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


def _name_conflicts(host: InventoryHost, inventory: Inventory, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Say why its name is taken, also by a machine that does not answer. A member keeps the name it joined
    by.
    """
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


def _names(host: InventoryHost, facts: Mapping[str, Facts]) -> tuple[str, str]:
    """Return Slurm's name for it and its own host name; "" if they were never known."""
    if fact := facts.get(host.address):
        return host.name or fact.hostname, fact.hostname
    return host.label, host.hardware.hostname if host.hardware else ""


def _has_joined_so(host: InventoryHost, facts: Mapping[str, Facts]) -> bool:
    return host.hardware is not None and host.hardware.hostname == _names(host, facts)[1]


def _reachable_hosts(inventory: Inventory, facts: Mapping[str, Facts]) -> Sequence[InventoryHost]:
    return [host for host in inventory.hosts if host.address in facts]


def _host_problems(
    host: InventoryHost, fact: Facts, inventory: Inventory, takeover: Takeover, kept: Facts | None
) -> Iterator[str]:
    if fact.belongs_to_other(inventory):
        yield other_owner_text(fact, inventory)
    if fact.hostname == "localhost":
        yield "calls itself `localhost`, as every machine does; `hostnamectl set-hostname` gives it a name"
    if kept is not None and abs(fact.clock_skew_s - kept.clock_skew_s) > MAX_SKEW_S:
        yield (
            f"has a clock {fact.clock_skew_s - kept.clock_skew_s:+d} s off the controller's, "
            f"more than {MAX_SKEW_S} s, and"
            " munge would refuse it: `apt-get install chrony` on both"
        )
    if fact.hardware.address.startswith("127.") and len(inventory.hosts) > 1:
        yield "is known by a loopback address only; set `inside:` to the address that the others reach"
    if fact.split_gpus:
        which = ",".join(map(str, fact.split_gpus))
        yield (
            f"has MIG switched on at GPU {which}, and Slurm would assign a whole GPU that no job can use:"
            f" `nvidia-smi -i {which} -mig 0`, or leave the machine out"
        )
    if host.has(HostRole.DATABASE) and "database" not in fact.own_made:
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
    host: InventoryHost, fact: Facts, inventory: Inventory, takeover: Takeover, kept: Facts | None
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
        return False  # made by the package that Shoal installed before it was interrupted
    return path in fact.files and not fact.is_own(path)


def _missing_key_problem(inventory: Inventory, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Name a controller that should keep its key and has none, while another machine has one."""
    having = [
        host for host in _reachable_hosts(inventory, facts) if _is_foreign(facts[host.address], MUNGE_KEY)
    ]
    if having and MUNGE_KEY not in facts[inventory.controller.address].files:
        labels = ", ".join(host.label for host in having)
        yield (
            f"has no {MUNGE_KEY} that `--existing keep` could spread, and {labels} has one: copy it here, or"
            f" say `--controller {having[0].address}`, or `--existing replace` for a new one"
        )


def _wanted_paths(host: InventoryHost) -> set[str]:
    paths = {
        MUNGE_KEY,
        SLURM_CONF,
        f"{SLURM_DIR}/gres.conf",
        f"{SLURM_DIR}/topology.conf",
        f"{SLURM_DIR}/cgroup.conf",
    }
    if host.has(HostRole.DATABASE):
        paths |= {SLURMDBD_CONF, render.MARIADB_CNF}
    if host.has(HostRole.WORKER):
        paths |= {render.HEALTH_PATH}
    return paths


def incompatibilities(inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, list[str]]:
    """Return, by address, why the installed packages do not fit the controller's."""
    result: dict[str, list[str]] = {}
    controller = facts.get(inventory.controller.address)
    for host in _reachable_hosts(inventory, facts):
        if controller is not None and (
            problems := [*_host_incompatibilities(host, facts[host.address], controller)]
        ):
            result[host.address] = problems
    return result


def _host_incompatibilities(host: InventoryHost, fact: Facts, controller: Facts) -> Iterator[str]:
    if fact.slurm_uid != controller.slurm_uid:
        yield (
            f"has the user `slurm` as uid {fact.slurm_uid}, the controller as {controller.slurm_uid}, and"
            f" Slurm goes by the number: `usermod -u {controller.slurm_uid} slurm` there"
        )
    if not host.has(HostRole.WORKER):
        return
    ours, theirs = release(fact, "slurmd"), release(controller, "slurmctld")
    if ours and theirs and (ours > theirs or _releases_apart(ours, theirs) > MAX_RELEASES_APART):
        how = "newer than" if ours > theirs else "too old for"
        yield (
            f"has Slurm {ours} ({fact.os} {fact.os_version}), {how} the controller's {theirs}"
            f" ({controller.os} {controller.os_version}): take machines of one release, or the newest for"
            " `--controller`"
        )
    if tuple(int(number) for number in (fact.python or "0.0").split(".")) < MIN_PYTHON:
        yield (
            f"has Python {fact.python or '(none)'}, and Shoal's node archive needs"
            f" {'.'.join(map(str, MIN_PYTHON))}: Debian 12, Ubuntu 24.04, or newer"
        )


def release(fact: Facts, package: str) -> str:
    """Return `22.05`, or "" if it is not installed. Machines of one release understand each other."""
    match = re.match(r"(?:\d+:)?(\d+\.\d+)", fact.packages.get(package, ""))
    return match.group(1) if match else ""


def _releases_apart(older: str, newer: str) -> int:
    if older not in RELEASES or newer not in RELEASES:
        return 0  # newer than this list: slurmctld itself decides
    return RELEASES.index(newer) - RELEASES.index(older)


def mismatched_logins(inventory: Inventory, facts: Mapping[str, Facts]) -> list[str]:
    """Name logins whose uid belongs to another user on another machine: their jobs would run as that user."""
    controller = facts.get(inventory.controller.address)
    if controller is None:
        return []
    name, uid = controller.login
    problems = []
    for host in _reachable_hosts(inventory, facts):
        other, number = facts[host.address].login
        if other != name or number != uid:
            problems.append(
                f"{host.label}: logged in as `{other}`, uid {number}; on the controller as `{name}`, uid"
                f" {uid}. Slurm goes by the number: jobs of `{name}` would run there as another user"
            )
    return problems


def remarks(inventory: Inventory, facts: Mapping[str, Facts], *, is_contained: bool) -> list[str]:
    """Return what works but is good to know."""
    present = _reachable_hosts(inventory, facts)
    mismatched = mismatched_logins(inventory, facts)
    create = f"`shoal cluster create --name {inventory.cluster}`"
    if direct := [host.label for host in present if facts[host.address].init != "systemd"]:
        mismatched.append(
            f"no systemd on {', '.join(direct)}: Shoal starts the daemons itself, and after a restart of the"
            f" machine {create} starts them again"
        )
    if bare := [host.label for host in present if not facts[host.address].hardware.cgroup]:
        mismatched.append(
            f"no writable cgroups on {', '.join(bare)}: memory and devices of jobs are not confined"
        )
    elif not is_contained:
        mismatched.append(
            "not every machine answered, and cgroups are used once all are known to have them: memory and"
            f" devices of jobs are not confined until {create} reaches all"
        )
    if not inventory.shared:
        mismatched.append(
            "no directory that all machines share: jobs with `checkpoint` will be refused. Once there is one"
            f" (NFS, say): `shoal cluster create --name {inventory.cluster} --shared DIR`"
        )
    return mismatched


def reconcile_members(
    inventory: Inventory, seen: Mapping[str, DetectedHardware], accepted: Collection[str]
) -> tuple[Inventory, list[str]]:
    """Return the inventory with the detected hardware, and a sentence for each member that shows less.

    `accepted`: addresses of members that are declared as they are now.
    """
    result, doubts = dict(seen), []
    for host in inventory.hosts:
        old, new = host.hardware, seen.get(host.address)
        if old is None or new is None or host.address in accepted:
            continue
        result[host.address], mismatches = _reconcile(old, new)
        doubts += [_mismatch_text(host, line, inventory) for line in mismatches]
    return inventory.with_hardware(result), doubts


def _reconcile(old: DetectedHardware, new: DetectedHardware) -> tuple[DetectedHardware, list[str]]:
    kept, mismatches = new, []
    if _has_fewer(old, new):
        kept = kept.model_copy(update={"gpus": old.gpus})
        mismatches.append(
            f"shows {_gpus_text(new)} and stays declared with {_gpus_text(old)}, as it joined: "
            "see `nvidia-smi`"
        )
    if new.hostname != old.hostname:
        kept = kept.model_copy(update={"hostname": old.hostname})
        mismatches.append(
            f"calls itself `{new.hostname}` and stays declared as `{old.hostname}`, as it joined:"
            f" `hostnamectl set-hostname {old.hostname}`"
        )
    return kept, mismatches


def _gpu_counts(hardware: DetectedHardware) -> Counter[str]:
    return Counter({gpus.kind: len(gpus.files) for gpus in hardware.gpus})


def _has_fewer(old: DetectedHardware, new: DetectedHardware) -> bool:
    """Whether there are fewer GPUs in all, or of one kind. A kind that was not known before does not
    count.
    """
    before, now = _gpu_counts(old), _gpu_counts(new)
    return now.total() < before.total() or any(now[kind] < num for kind, num in before.items() if kind)


def _gpus_text(hardware: DetectedHardware) -> str:
    kinds = [f"{num} {kind or 'of no known kind'}" for kind, num in _gpu_counts(hardware).items()]
    return f"GPUs: {', '.join(kinds)}" if kinds else "no GPU"


def _mismatch_text(host: InventoryHost, line: str, inventory: Inventory) -> str:
    accept = f"shoal cluster create --name {inventory.cluster} --as-found {host.label}"
    return f"{host.label} {line} there; to accept that, `{accept}`"
