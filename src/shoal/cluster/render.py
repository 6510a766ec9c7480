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
from shoal.cluster.inventory import Found, Host, Inventory, Role

CONTROLLER_PORT, WORKER_PORT, DATABASE_PORT = 6817, 6818, 6819
SRUN_PORTS = "60001-63000"
"""Where `srun` listens for its tasks: a range, so that a firewall can be told."""
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
class Secrets:
    """What only the machines may know. `repr` must not tell it to a log."""

    munge_key: bytes
    database_password: str

    def __repr__(self) -> str:
        return "Secrets(...)"


def declared(inventory: Inventory) -> list[tuple[Host, Found]]:
    """Workers that are known well enough to be nodes, in the inventory's order."""
    return [(host, host.found) for host in inventory.hosts if host.has(Role.WORKER) and host.found]


def slurm_conf(inventory: Inventory, facts: Mapping[str, Facts]) -> File:
    """`slurm.conf`, the same everywhere."""
    nodes = declared(inventory)
    lines = [f"{key}={value}" for key, value in {**_settings(inventory, facts), **inventory.slurm}.items()]
    lines += ["", *(_node_line(host, found) for host, found in nodes), ""]
    names = ",".join(host.label for host, _ in nodes)
    lines += [f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP"]
    if with_gpus := ",".join(host.label for host, found in nodes if found.gpus):
        lines += [f"PartitionName=gpu Nodes={with_gpus} MaxTime=INFINITE State=UP"]
    return File(SLURM_CONF, (NOTICE + "\n".join(lines) + "\n").encode())


def is_contained(inventory: Inventory, facts: Mapping[str, Facts]) -> bool:
    """Whether cgroups hold jobs everywhere, so that a job's end says that nothing of it runs.

    Only if every machine is known to have them. One that does not answer keeps the `slurm.conf` it has, and
    may come back with it: cgroups are taken up only while all answer, and kept while some do not.
    """
    known = {host.address: host.found for host in inventory.hosts if host.found}
    controller = facts.get(inventory.controller.address)
    is_taken_up = controller is not None and controller.is_contained
    return all(found.cgroup for found in known.values()) and (is_taken_up or known.keys() <= facts.keys())


def _settings(inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, str | int]:
    controller, database = inventory.controller, inventory.database
    assert controller.found is not None
    assert database.found is not None
    nodes = declared(inventory)
    has_cgroups = is_contained(inventory, facts)
    settings: dict[str, str | int] = {
        "ClusterName": inventory.cluster,
        "SlurmctldHost": f"{controller.found.hostname}({controller.found.address})",
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
        "AccountingStorageHost": database.found.address,
        "AccountingStoragePort": DATABASE_PORT,
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": 30,
        "HealthCheckProgram": HEALTH_PATH,
        "HealthCheckInterval": HEALTH_EVERY_S,
        "HealthCheckNodeState": "ANY",
        "ReturnToService": 2,
        # When a node is back that was away for longer, Slurm ends what ran there: a fence's default, no less.
        "SlurmdTimeout": 1800,
        "KillWait": 30,
    }
    if nodes:
        settings["DefMemPerCPU"] = min(found.memory_mib // found.cpus for _, found in nodes)
    if any(found.gpus for _, found in nodes):
        settings |= {"GresTypes": "gpu", "AccountingStorageTRES": "gres/gpu"}
    return settings


def _node_line(host: Host, found: Found) -> str:
    gres = ",".join(
        ":".join(("gpu", *((gpus.kind,) if gpus.kind else ()), str(len(gpus.files)))) for gpus in found.gpus
    )
    return (
        f"NodeName={host.label} NodeHostname={found.hostname} NodeAddr={found.address} CPUs={found.cpus}"
        f" Sockets={found.sockets} CoresPerSocket={found.cores} ThreadsPerCore={found.threads}"
        f" RealMemory={found.memory_mib}{f' Gres={gres}' if gres else ''} State=UNKNOWN"
    )


def gres_conf(inventory: Inventory) -> File:
    """`gres.conf`: every GPU by its device file. Empty where there is none: a stale one breaks a node."""
    lines = [
        f"NodeName={host.label} Name=gpu{f' Type={gpus.kind}' if gpus.kind else ''}"
        f" File={file_range(gpus.files)}"
        for host, found in declared(inventory)
        for gpus in found.gpus
    ]
    return File(f"{SLURM_DIR}/gres.conf", (NOTICE + "".join(line + "\n" for line in lines)).encode())


def file_range(files: Sequence[str]) -> str:
    """`/dev/nvidia[0-7]` for eight in a row; a list otherwise."""
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
    """`topology.conf`: one leaf for each `switch` of the inventory, under one root if there are several."""
    leaves: dict[str, list[str]] = {}
    for host, _ in declared(inventory):
        leaves.setdefault(host.switch, []).append(host.label)
    lines = [f"SwitchName={name} Nodes={','.join(nodes)}" for name, nodes in leaves.items()]
    if len(leaves) > 1:
        lines.append(f"SwitchName=shoal-root Switches={','.join(leaves)}")
    return File(f"{SLURM_DIR}/topology.conf", (NOTICE + "".join(line + "\n" for line in lines)).encode())


def cgroup_conf(fact: Facts) -> File:
    """`cgroup.conf` for one machine: its own version of cgroups, and no systemd where there is none."""
    cgroup = fact.found.cgroup
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


def slurmdbd_conf(inventory: Inventory, secrets: Secrets) -> File:
    database = inventory.database.found
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
    """What slurmdbd wants of InnoDB, or it warns at every start."""
    text = (
        "[mariadbd]\nbind-address = 127.0.0.1\n"
        "innodb_buffer_pool_size = 256M\ninnodb_lock_wait_timeout = 900\n"
    )
    return File(MARIADB_CNF, (NOTICE + text).encode())


def munge_key(secrets: Secrets) -> File:
    return File(MUNGE_KEY, secrets.munge_key, owner="munge:munge", mode="0400", is_secret=True)


def database_sql(secrets: Secrets) -> bytes:
    """What makes the accounting database. May run again; sent on standard input, for the password's sake."""
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
"""In `sh`: `unkilled` names a job that is over, or runs elsewhere by now, and of which something lives here.

It looks thread by thread, as with cgroups v1 a process whose first thread has ended is shown in none; threads
may end meanwhile. Users must not be able to hide what lives, nor to feign it. Their names and commands stand
in what Slurm tells of a job, so it is asked for numbers alone, of jobs that go on at this node: one that was
queued again has its number elsewhere, too. And in `user@UID.service`, users name control groups as they like.
"""


def health_check(host: Host, found: Found) -> File:
    """The program slurmd runs every minute: what is wrong drains the node, what Shoal drained comes back.

    The word of whoever else drained it stands, Slurm's own (`Kill task failed`) too: a person resumes it. Of
    a node that Shoal has drained Slurm does not say what it could not kill, so that is looked for; whatever
    goes wrong with that look keeps the drain.
    """
    num_gpus = sum(len(gpus.files) for gpus in found.gpus)
    devices = " ".join(path for gpus in found.gpus for path in gpus.files)
    text = f"""\
#!/bin/sh
{NOTICE.strip()}
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C
node={host.label}
told() {{
  scontrol -o show node "$node" 2>/dev/null
}}
wrong() {{
  case $(told) in
    "") exit 1 ;;
    *" Reason=shoal:"*) ;;
    *" Reason="*) case $(told | sed 's/.* State=//; s/ .*//') in *DOWN* | *DRAIN*) exit 1 ;; esac ;;
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
case $(told) in
  *" Reason=shoal:"*)
    left=$(unkilled) || wrong "it is not known whether something of a job that is over lives"
    [ -z "$left" ] || wrong "Kill task failed: job $left is over, and something of it lives"
    scontrol update "nodename=$node" state=resume
    ;;
esac
exit 0
"""
    return File(HEALTH_PATH, text.encode(), mode="0755")


def names(inventory: Inventory) -> tuple[str, ...]:
    """Lines for `/etc/hosts`: ranks of a job find each other by name without any DNS."""
    pairs = [(host.found, host.label) for host in inventory.hosts if host.found]
    return tuple(
        f"{found.address} {' '.join(dict.fromkeys((found.hostname, label)))}" for found, label in pairs
    )


def digest(files: Iterable[File]) -> str:
    """One word for the contents of several files."""
    return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()[:32]
