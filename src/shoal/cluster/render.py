"""The files of a cluster as text: Slurm's, MariaDB's, and the health check. Pure; golden-tested.

A file knows its owner and mode, and whether it is a secret: a secret is sent on standard input, never
printed, and never on a command line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.cluster.facts import (
    DATABASE,
    DATABASE_USER,
    GOING_ON,
    MUNGE_KEY,
    SLURM_CONF,
    SLURM_DIR,
    SLURMDBD_CONF,
    Facts,
)
from shoal.cluster.inventory import DetectedHardware, HostRole, Inventory, InventoryHost

CONTROLLER_PORT, WORKER_PORT, DATABASE_PORT = 6817, 6818, 6819
SRUN_PORTS = "60001-63000"
"""The ports where `srun` listens for its tasks: a range, so that a firewall can open it."""
HEALTH_PATH = "/usr/local/sbin/shoal-node-health"
MARIADB_CNF = "/etc/mysql/mariadb.conf.d/60-shoal-slurm.cnf"
NOTICE = "# Written by `shoal cluster`. Settings of your own belong in the inventory, under `slurm:`.\n"
HEALTH_EVERY_S = 60


@dataclass(frozen=True)
class File:
    path: str
    content: bytes
    owner: str = "root:root"
    mode: str = "0644"
    is_secret: bool = False
    is_binary: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class ClusterSecrets:
    """Secrets that only the machines may know. `repr` must not print them to a log."""

    munge_key: bytes
    database_password: str

    def __repr__(self) -> str:
        return "Secrets(...)"


def declared_nodes(inventory: Inventory) -> list[tuple[InventoryHost, DetectedHardware]]:
    """Return workers whose hardware is known, in the inventory's order: only these can be declared as
    nodes.
    """
    return [(host, host.hardware) for host in inventory.hosts if host.has(HostRole.WORKER) and host.hardware]


def slurm_conf(inventory: Inventory, facts: Mapping[str, Facts]) -> File:
    """Return `slurm.conf`, the same on every machine."""
    nodes = declared_nodes(inventory)
    lines = [f"{key}={value}" for key, value in {**_settings(inventory, facts), **inventory.slurm}.items()]
    lines += ["", *(_node_line(host, hardware) for host, hardware in nodes), ""]
    names = ",".join(host.label for host, _ in nodes)
    lines += [f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP"]
    if with_gpus := ",".join(host.label for host, hardware in nodes if hardware.gpus):
        lines += [f"PartitionName=gpu Nodes={with_gpus} MaxTime=INFINITE State=UP"]
    return File(SLURM_CONF, (NOTICE + "\n".join(lines) + "\n").encode())


def is_contained(inventory: Inventory, facts: Mapping[str, Facts]) -> bool:
    """Whether cgroups hold jobs everywhere, so that the end of a job means that none of its processes runs.

    That is so only if every machine is known to have cgroups. A machine that does not answer keeps its
    `slurm.conf` and may come back with it, so cgroups are switched on only while all answer, and stay on
    while some do not.
    """
    detected = {host.address: host.hardware for host in inventory.hosts if host.hardware}
    controller = facts.get(inventory.controller.address)
    is_taken_up = controller is not None and controller.is_contained
    return all(hardware.cgroup for hardware in detected.values()) and (
        is_taken_up or detected.keys() <= facts.keys()
    )


def _settings(inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, str | int]:
    controller, database = inventory.controller, inventory.database
    assert controller.hardware is not None
    assert database.hardware is not None
    nodes = declared_nodes(inventory)
    has_cgroups = is_contained(inventory, facts)
    settings: dict[str, str | int] = {
        "ClusterName": inventory.cluster,
        "SlurmctldHost": f"{controller.hardware.hostname}({controller.hardware.address})",
        "SlurmctldPort": CONTROLLER_PORT,
        "SlurmdPort": WORKER_PORT,
        "SrunPortRange": SRUN_PORTS,
        "SlurmUser": "slurm",
        "AuthType": "auth/munge",
        "DisableRootJobs": "YES",
        "StateSaveLocation": "/var/spool/slurmctld",
        "SlurmdSpoolDir": "/var/spool/slurmd",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
        "SlurmdLogFile": "/var/log/slurm/slurmd.log",
        "ProctrackType": "proctrack/cgroup" if has_cgroups else "proctrack/linuxproc",
        "TaskPlugin": "task/affinity,task/cgroup" if has_cgroups else "task/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "SchedulerType": "sched/backfill",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "TopologyPlugin": "topology/tree",
        "PriorityType": "priority/multifactor",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": database.hardware.address,
        "AccountingStoragePort": DATABASE_PORT,
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": 30,
        "HealthCheckProgram": HEALTH_PATH,
        "HealthCheckInterval": HEALTH_EVERY_S,
        "HealthCheckNodeState": "ANY",
        "ReturnToService": 2,
        # Slurm ends the jobs of a node that was away for longer than this: at least a fence's default.
        "SlurmdTimeout": 1800,
        "KillWait": 30,
    }
    if nodes:
        settings["DefMemPerCPU"] = min(hardware.memory_mib // hardware.cpus for _, hardware in nodes)
    if any(hardware.gpus for _, hardware in nodes):
        settings |= {"GresTypes": "gpu", "AccountingStorageTRES": "gres/gpu"}
    return settings


def _node_line(host: InventoryHost, hardware: DetectedHardware) -> str:
    gres = ",".join(
        ":".join(("gpu", *((gpus.kind,) if gpus.kind else ()), str(len(gpus.files))))
        for gpus in hardware.gpus
    )
    return (
        f"NodeName={host.label} NodeHostname={hardware.hostname} "
        f"NodeAddr={hardware.address} CPUs={hardware.cpus}"
        f" Sockets={hardware.sockets} CoresPerSocket={hardware.cores} ThreadsPerCore={hardware.threads}"
        f" RealMemory={hardware.memory_mib}{f' Gres={gres}' if gres else ''} State=UNKNOWN"
    )


def gres_conf(inventory: Inventory) -> File:
    """Return `gres.conf`: every GPU by its device file. Empty if there is none: a stale file breaks a
    node.
    """
    lines = [
        f"NodeName={host.label} Name=gpu{f' Type={gpus.kind}' if gpus.kind else ''}"
        f" File={file_range(gpus.files)}"
        for host, hardware in declared_nodes(inventory)
        for gpus in hardware.gpus
    ]
    return File(f"{SLURM_DIR}/gres.conf", (NOTICE + "".join(line + "\n" for line in lines)).encode())


def file_range(files: Sequence[str]) -> str:
    """Return `/dev/nvidia[0-7]` for eight in a row; a list otherwise."""
    numbers = [int(re.sub(r"\D", "", path)) for path in files]
    stem = re.sub(r"\d+$", "", files[0])
    if [f"{stem}{number}" for number in numbers] != list(files):
        return ",".join(files)
    if len(numbers) == 1:
        return files[0]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{stem}[{numbers[0]}-{numbers[-1]}]"
    return f"{stem}[{','.join(map(str, numbers))}]"


def topology_conf(inventory: Inventory) -> File:
    """Return `topology.conf`: one leaf for each `switch`, under one root if there are several."""
    leaves: dict[str, list[str]] = {}
    for host, _ in declared_nodes(inventory):
        leaves.setdefault(host.switch, []).append(host.label)
    lines = [f"SwitchName={name} Nodes={','.join(nodes)}" for name, nodes in leaves.items()]
    if len(leaves) > 1:
        lines.append(f"SwitchName=shoal-root Switches={','.join(leaves)}")
    return File(f"{SLURM_DIR}/topology.conf", (NOTICE + "".join(line + "\n" for line in lines)).encode())


def cgroup_conf(fact: Facts) -> File:
    """Return `cgroup.conf` for one machine: its version of cgroups, and no systemd if it has none."""
    cgroup = fact.hardware.cgroup
    lines = [
        f"CgroupPlugin=cgroup/{cgroup}",
        "ConstrainCores=yes",
        "ConstrainRAMSpace=yes",
        "ConstrainSwapSpace=no",
        "ConstrainDevices=yes",
    ]
    if cgroup == "v2" and fact.init != "systemd":
        lines.append("IgnoreSystemd=yes")
    if not cgroup:
        lines = []  # proctrack/linuxproc reads none of it
    return File(f"{SLURM_DIR}/cgroup.conf", (NOTICE + "".join(line + "\n" for line in lines)).encode())


def slurmdbd_conf(inventory: Inventory, secrets: ClusterSecrets) -> File:
    database = inventory.database.hardware
    assert database is not None
    settings = {
        "AuthType": "auth/munge",
        "DbdHost": database.hostname,
        "DbdAddr": database.address,
        "DbdPort": DATABASE_PORT,
        "SlurmUser": "slurm",
        "LogFile": "/var/log/slurm/slurmdbd.log",
        "PidFile": "/run/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": DATABASE_USER,
        "StoragePass": secrets.database_password,
        "StorageLoc": DATABASE,
    }
    text = "".join(f"{key}={value}\n" for key, value in settings.items())
    return File(SLURMDBD_CONF, (NOTICE + text).encode(), owner="slurm:slurm", mode="0600", is_secret=True)


def mariadb_cnf() -> File:
    """Return the InnoDB settings that slurmdbd needs; without them it warns at every start."""
    text = (
        "[mariadbd]\nbind-address = 127.0.0.1\n"
        "innodb_buffer_pool_size = 256M\ninnodb_lock_wait_timeout = 900\n"
    )
    return File(MARIADB_CNF, (NOTICE + text).encode())


def munge_key(secrets: ClusterSecrets) -> File:
    return File(MUNGE_KEY, secrets.munge_key, owner="munge:munge", mode="0400", is_secret=True)


def database_sql(secrets: ClusterSecrets) -> bytes:
    """Return SQL that makes the accounting database. It may run again. Sent on standard input, because it has
    the password.
    """
    if not re.fullmatch(r"[A-Za-z0-9]{16,}", secrets.database_password):
        raise ValueError("the database password must be letters and digits, at least 16")
    return (
        f"create database if not exists {DATABASE};\n"
        f"create user if not exists {DATABASE_USER}@localhost identified by '{secrets.database_password}';\n"
        f"alter user {DATABASE_USER}@localhost identified by '{secrets.database_password}';\n"
        f"grant all on {DATABASE}.* to {DATABASE_USER}@localhost;\n"
    ).encode()


UNKILLED = f"""\
threads() {{
  find /proc -maxdepth 4 -path '/proc/[!0-9]*' -prune -o -path '/proc/*/*' ! -path '/proc/*/task*' -prune \\
    -o -name cgroup -exec cat {{}} + 2>&1 || [ $? -eq 1 ] || echo "find failed"
}}
unkilled() {{
  jobs=$(threads | awk '
    /^[0-9]+:/ {{
      seen = 1
      sub("/user@.*", "")
      if (match($0, "/([^/]*_)?slurmstepd[.]scope/job_[0-9]+/|/slurm[^/]*/uid_[0-9]+/job_[0-9]+/")) {{
        job = substr($0, RSTART, RLENGTH - 1); sub(".*_", "", job); jobs[job]
      }}
      next
    }}
    !/No such (file or directory|process)$/ {{ failed = 1 }}
    END {{ for (job in jobs) print job; exit failed || !seen }}') || return 1
  [ -n "$jobs" ] || return 0
  here=$(squeue -h -w "$node" -t {GOING_ON},completing -o %A) || return 1
  for job in $jobs; do
    case " $(echo $here) " in *" $job "*) ;; *) echo "$job"; return ;; esac
  done
}}
"""
"""In `sh`: `unkilled` names a job that is over, or runs elsewhere by now, and still has a live process here.

It looks thread by thread, because with cgroups v1 a process whose first thread has ended is shown in no
cgroup. Threads may end meanwhile. Users must not be able to hide or fake a live process. Their names and
commands appear in what Slurm prints of a job, so it is asked only for the numbers of jobs that are active on
this node: a job that was queued again has its number elsewhere, too. And in `user@UID.service`, users name
control groups as they like.
"""


def health_check(host: InventoryHost, hardware: DetectedHardware) -> File:
    """Return the program that slurmd runs every minute. It drains a broken node and resumes what Shoal
    drained.

    A node drained by another user, or by Slurm (`Kill task failed`), stays so until a person resumes it.
    Slurm does not report what it could not kill on a node that Shoal has drained, so the program looks for
    it. If that fails in any way, the node stays drained.
    """
    num_gpus = sum(len(gpus.files) for gpus in hardware.gpus)
    devices = " ".join(path for gpus in hardware.gpus for path in gpus.files)
    text = f"""\
#!/bin/sh
{NOTICE.strip()}
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C
node={host.label}
node_info() {{
  scontrol -o show node "$node" 2>/dev/null
}}
wrong() {{
  case $(node_info) in
    "") exit 1 ;;
    *" Reason=shoal:"*) ;;
    *" Reason="*) case $(node_info | sed 's/.* State=//; s/ .*//') in *DOWN* | *DRAIN*) exit 1 ;; esac ;;
  esac
  scontrol update "nodename=$node" state=drain "reason=shoal: $1"
  exit 1
}}
{UNKILLED}munge -n </dev/null | unmunge >/dev/null 2>&1 || wrong "munge does not answer"
for place in / /tmp /var/spool/slurmd; do
  [ -w "$place" ] || wrong "$place is read-only"
  used=$(df -P "$place" | awk 'NR == 2 {{ sub("%", "", $5); print $5 }}')
  [ "${{used:-0}}" -lt 98 ] || wrong "$place is $used% full"
done
for device in {devices or '""'}; do
  [ -z "$device" ] || [ -c "$device" ] || wrong "$device is gone"
done
if [ {num_gpus} -gt 0 ] && command -v nvidia-smi >/dev/null; then
  seen=$(timeout 30 nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -c '^[0-9]')
  [ "$seen" -eq {num_gpus} ] || wrong "$seen of {num_gpus} GPUs answer"
fi
case $(node_info) in
  *" Reason=shoal:"*)
    left=$(unkilled) || wrong "it is not known whether something of a job that is over lives"
    [ -z "$left" ] || wrong "Kill task failed: job $left is over, and something of it lives"
    scontrol update "nodename=$node" state=resume
    ;;
esac
exit 0
"""
    return File(HEALTH_PATH, text.encode(), mode="0755")


def hosts_file_lines(inventory: Inventory) -> tuple[str, ...]:
    """Return lines for `/etc/hosts`: ranks of a job find each other by name without DNS."""
    pairs = [(host.hardware, host.label) for host in inventory.hosts if host.hardware]
    return tuple(f"{fact.address} {' '.join(dict.fromkeys((fact.hostname, label)))}" for fact, label in pairs)


def digest(files: Iterable[File]) -> str:
    """Return one hash of the contents of several files."""
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()[:32]
