"""A script that reports the facts of a machine, run once on it, and the parser of its output.

The script changes nothing. It is plain `sh` with the programs of a bare Debian or Ubuntu. It prints one fact
a line: a word, then values. A fact that cannot be found out is not printed, and the parser says which is
missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from shoal.cluster.inventory import DetectedHardware, Gpus, Inventory, InventoryHost, validation_messages
from shoal.errors import EngineRefused

STATE_DIR = "/var/lib/shoal-cluster"
"""What Shoal did to a machine is recorded there, on the machine itself; `destroy` undoes what is recorded."""
MUNGE_KEY = "/etc/munge/munge.key"
SLURM_DIR = "/etc/slurm"
SLURM_CONF = f"{SLURM_DIR}/slurm.conf"
SLURMDBD_CONF = f"{SLURM_DIR}/slurmdbd.conf"
CONTAINED = "ProctrackType=proctrack/cgroup"
"""The line of `slurm.conf` that makes Slurm hold all processes of a job in control groups."""
GOING_ON = "configuring,running,resizing,signaling,stopped,suspended,stage_out"
"""Slurm's states of a job that has nodes and is not ending."""
DATABASE, DATABASE_USER = "slurm_acct", "shoal_slurm"
"""The database user has a name of our own: a user `slurm` may belong to another program."""
PYTHON = "/usr/bin/python3"
WATCHED = (
    MUNGE_KEY,
    SLURM_CONF,
    SLURMDBD_CONF,
    f"{SLURM_DIR}/cgroup.conf",
    f"{SLURM_DIR}/gres.conf",
    f"{SLURM_DIR}/topology.conf",
    "/usr/local/sbin/shoal-node-health",
    "/etc/mysql/mariadb.conf.d/60-shoal-slurm.cnf",
)
"""Files that Shoal may write. A file that was there before and is not Shoal's is never lost silently."""
PACKAGES = ("munge", "slurm-client", "slurmd", "slurmctld", "slurmdbd", "mariadb-server")
MYSQL = ("mysql-server", "mysql-community-server", "percona-server-server", "percona-xtradb-cluster")
"""Prefixes of packages of databases that keep their data where MariaDB does."""

SHARE_OF_MEMORY = 0.97
"""Slurm drains a node that has less memory than declared, and kernels differ in what they reserve."""
MEMORY_STEP_MIB = 64

_ASKED = " ".join((*PACKAGES, *(f"'{start}*'" for start in MYSQL)))
SCRIPT = f"""\
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin
echo uid $(id -u)
echo login ${{SUDO_USER:-root}} ${{SUDO_UID:-0}}
echo hostname $(hostname -s 2>/dev/null || uname -n)
. /etc/os-release && echo os "$ID" "${{VERSION_ID:-unknown}}" "${{ID_LIKE:-none}}"
echo arch $(uname -m)
echo now $(date +%s)
[ -d /run/systemd/system ] && echo init systemd || echo init direct
[ "$(stat -fc %T /sys/fs/cgroup 2>/dev/null)" = cgroup2fs ] && echo cgroup v2
[ -w /sys/fs/cgroup/memory/cgroup.procs ] && echo cgroup v1
echo cpus $(nproc)
lscpu -p=core,socket 2>/dev/null | grep -v '^#' | sed 's/^/cpu /'
echo memory_kib $(awk '/^MemTotal:/ {{print $2}}' /proc/meminfo)
echo connection $SSH_CONNECTION
hostname -I 2>/dev/null | tr ' ' '\\n' | sed -n 's/^./address &/p'
if command -v nvidia-smi >/dev/null; then
  ask='timeout 60 nvidia-smi --format=csv,noheader'
  listed=$($ask --query-gpu=index,mig.mode.current,name 2>/dev/null) ||
    listed=$($ask --query-gpu=index,name 2>/dev/null | sed 's/, */, -, /')
  timeout 60 nvidia-smi -q 2>/dev/null | sed -n 's/^ *Minor Number *: *\\([0-9][0-9]*\\) *$/minor \\1/p'
  printf '%s\\n' "$listed" | sed -n 's/^\\([0-9][0-9]*\\), *\\([^,]*\\), */gpu \\1 \\2 /p'
fi
for device in /dev/nvidia[0-9]*; do [ -c "$device" ] && echo device "$device"; done
dpkg-query -W -f='package ${{Package}} ${{Version}} ${{db:Status-Abbrev}}\\n' {_ASKED} 2>/dev/null
grep -qsx '{CONTAINED}' {SLURM_CONF} && echo contained
for path in {" ".join(WATCHED)}; do
  [ -e "$path" ] && echo file "$path" $(sha256sum <"$path" | cut -d' ' -f1)
done
for place in /var/lib/mysql/*/; do [ -d "$place" ] && echo database $(basename "$place"); done
id -u slurm >/dev/null 2>&1 && echo slurm_uid $(id -u slurm)
[ -x {PYTHON} ] && echo python $({PYTHON} -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for what in cluster files packages made; do
  [ -r {STATE_DIR}/$what ] && sed "s/^/own $what /" {STATE_DIR}/$what
done
for stamp in {STATE_DIR}/started/*; do
  case $stamp in *.log|*'*') ;; *) echo own started "${{stamp##*/}}" ;; esac
done
command -v ufw >/dev/null && ufw status 2>/dev/null | grep -q 'Status: active' && echo firewall ufw
command -v firewall-cmd >/dev/null && firewall-cmd --state >/dev/null 2>&1 && echo firewall firewalld
command -v nft >/dev/null && nft list ruleset 2>/dev/null | grep -q 'hook input' && echo firewall nftables
echo end
"""


@dataclass(frozen=True)
class Facts:
    """The facts of one machine, as it reported them."""

    hostname: str
    os: str
    os_version: str
    arch: str
    uid: int
    now: int
    init: str
    hardware: DetectedHardware
    is_contained: bool = False
    """Whether its `slurm.conf` holds jobs in cgroups."""
    packages: Mapping[str, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    """Packages that were removed and left their settings and data."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path to the SHA-256 of its content."""
    databases: frozenset[str] = frozenset()
    """MariaDB's databases, its own included."""
    login: tuple[str, int] = ("root", 0)
    """The user that logged in, before `sudo`."""
    slurm_uid: int | None = None
    python: str = ""
    """`3.11`, or "" if Python is not installed."""
    clock_skew_s: int = 0
    """Seconds by which its clock is ahead of this machine's."""
    split_gpus: tuple[int, ...] = ()
    """GPUs with MIG switched on, which no job can have whole."""
    own_cluster: str = ""
    own_id: str = ""
    """The id of the cluster it belongs to; "" if an older Shoal claimed the machine."""
    own_files: frozenset[tuple[str, str]] = frozenset()
    """(SHA-256, path) of everything Shoal ever wrote here."""
    own_packages: frozenset[str] = frozenset()
    own_made: frozenset[str] = frozenset()
    """`database`, `names`, or a folder's path."""
    own_started: frozenset[str] = frozenset()
    firewalls: tuple[str, ...] = ()

    def belongs_to_other(self, inventory: Inventory) -> bool:
        """Whether it belongs to another cluster. A cluster without an id is compared by its name only."""
        is_same = self.own_cluster == inventory.cluster and self.own_id in {"", inventory.id}
        return bool(self.own_cluster) and not is_same

    def is_own(self, path: str) -> bool:
        """Whether the file at `path` is as Shoal wrote it."""
        return (self.files.get(path, ""), path) in self.own_files

    def was_own(self, path: str) -> bool:
        """Whether Shoal ever wrote a file there, whatever it is now."""
        return any(recorded == path for _, recorded in self.own_files)


def read_facts(text: str, host: InventoryHost, now: int | None = None, as_root: str = "") -> Facts:
    """Parse the script's output. `now`: when it ran. `as_root`: the command prefix for a person to run
    things.

    Raise `EngineRefused` if the machine cannot be used as it is.
    """
    as_root = as_root or f"ssh {host.address} sudo"
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or lines[-1] != ["end"]:
        last_line = text.strip().splitlines()[-1:] or ["nothing"]
        raise EngineRefused(
            f"{host.label}: the machine did not finish its report; its last line: {last_line[0]}",
            hint=f"{as_root} sh -c true",
        )
    values = {fields[0]: fields[1:] for fields in reversed(lines)}
    os_id, os_version, os_like = (*values.get("os", ["unknown"]), "unknown", "none")[:3]
    if not {"debian", "ubuntu"} & {os_id, *os_like.split()}:
        raise EngineRefused(
            f"{host.label} runs `{os_id} {os_version}`; Slurm is installed on Debian and Ubuntu only",
            hint="name machines that run Debian or Ubuntu, or install one of them there",
        )
    if values["uid"] != ["0"]:
        raise EngineRefused(
            f"{host.label}: commands run as uid {values['uid'][0]}, and `sudo -n` did not make them root",
            hint=f"give the user `NOPASSWD: ALL` in sudoers on {host.address}, or connect with `--user root`",
        )
    try:
        return _facts(lines, values, host, now)
    except ValidationError as wrong:
        raise EngineRefused(
            f"{host.label} has a name or parts that Slurm cannot use: "
            f"{'; '.join(validation_messages(wrong))}",
            hint=f"{as_root} hostnamectl set-hostname NAME",
        ) from None
    except (KeyError, IndexError, ValueError) as wrong:
        raise EngineRefused(
            f"{host.label} reported a value that cannot be read: {wrong!r}", hint=f"{as_root} lscpu"
        ) from None


def _facts(
    lines: list[list[str]], values: Mapping[str, list[str]], host: InventoryHost, now: int | None
) -> Facts:
    os_id, os_version = (*values.get("os", ["unknown"]), "unknown")[:2]
    records: dict[str, list[list[str]]] = {}
    for fields in lines:
        if fields[0] == "own" and len(fields) > 2:
            records.setdefault(fields[1], []).append(fields[2:])
    return Facts(
        hostname=values["hostname"][0],
        os=os_id,
        os_version=os_version,
        arch=values["arch"][0],
        uid=0,
        now=int(values["now"][0]),
        init="systemd" if values["init"] == ["systemd"] else "direct",
        hardware=_hardware(lines, values, host),
        is_contained="contained" in values,
        packages={fields[1]: fields[2] for fields in _packages(lines, "i")},
        removed=frozenset(fields[1] for fields in _packages(lines, "c")),
        files={fields[1]: fields[2] for fields in lines if fields[0] == "file"},
        databases=frozenset(fields[1] for fields in lines if fields[0] == "database") - {"lost+found"},
        login=(values["login"][0], int(values["login"][1])) if "login" in values else ("root", 0),
        slurm_uid=int(values["slurm_uid"][0]) if "slurm_uid" in values else None,
        python=values["python"][0] if values.get("python") else "",
        clock_skew_s=0 if now is None else int(values["now"][0]) - now,
        split_gpus=tuple(int(fields[1]) for fields in lines if fields[0] == "gpu" and fields[2] == "Enabled"),
        own_cluster=records.get("cluster", [[""]])[0][0],
        own_id="".join(records.get("cluster", [[""]])[0][1:2]),
        own_files=frozenset((fields[0], fields[1]) for fields in records.get("files", [])),
        own_packages=frozenset(fields[0] for fields in records.get("packages", [])),
        own_made=frozenset(fields[-1] for fields in records.get("made", [])),
        own_started=frozenset(fields[0] for fields in records.get("started", [])),
        firewalls=tuple(fields[1] for fields in lines if fields[0] == "firewall"),
    )


def _packages(lines: list[list[str]], state: str) -> list[list[str]]:
    """Return the packages in this state: dpkg's second letter. The first is the wanted state: `h` is on
    hold.
    """
    return [
        fields for fields in lines if fields[0] == "package" and len(fields) > 3 and fields[3][1:2] == state
    ]


def _hardware(
    lines: list[list[str]], values: Mapping[str, list[str]], host: InventoryHost
) -> DetectedHardware:
    sockets, cores, threads = shape_of_cpus(
        [fields[1] for fields in lines if fields[0] == "cpu"], int(values["cpus"][0])
    )
    memory_mib = int(int(values["memory_kib"][0]) / 1024 * SHARE_OF_MEMORY)
    cgroups = [fields[1] for fields in lines if fields[0] == "cgroup"]
    return DetectedHardware(
        hostname=values["hostname"][0],
        address=inside_address(
            host, values.get("connection", []), [w[1] for w in lines if w[0] == "address"]
        ),
        sockets=sockets,
        cores=cores,
        threads=threads,
        memory_mib=max(MEMORY_STEP_MIB, memory_mib // MEMORY_STEP_MIB * MEMORY_STEP_MIB),
        gpus=group_gpus(
            [(int(fields[1]), " ".join(fields[3:])) for fields in lines if fields[0] == "gpu"],
            [fields[1] for fields in lines if fields[0] == "device"],
            [int(fields[1]) for fields in lines if fields[0] == "minor"],
        ),
        cgroup="v2" if "v2" in cgroups else "v1" if "v1" in cgroups else "",
    )


def shape_of_cpus(rows: list[str], usable: int) -> tuple[int, int, int]:
    """Return (sockets, cores in each, threads in each); one flat socket if only some CPUs may be used."""
    pairs = [tuple(row.split(",")) for row in rows]
    sockets = len({pair[1] for pair in pairs if len(pair) == 2})
    cores = len(set(pairs))
    if len(pairs) != usable or not sockets or cores % sockets or len(pairs) % cores:
        return 1, usable, 1
    return sockets, cores // sockets, len(pairs) // cores


def inside_address(host: InventoryHost, connection: list[str], addresses: list[str]) -> str:
    """Return where other machines reach this one: as the inventory says, else where our connection
    arrived.
    """
    if host.inside:
        return host.inside
    arrived = connection[2] if len(connection) == 4 else ""
    if arrived and not arrived.startswith("127.") and arrived != "::1":
        return arrived
    return addresses[0] if addresses else arrived or host.address


def group_gpus(listed: list[tuple[int, str]], devices: list[str], minors: list[int]) -> tuple[Gpus, ...]:
    """Group GPUs by kind, as the driver lists them; without a driver list the device files, of no kind.

    The driver counts GPUs along the bus and names their files by minor numbers, which may differ.
    """
    by_kind: dict[str, list[str]] = {}
    numbers = minors if len(minors) == len(listed) else [index for index, _ in listed]
    for number, (_, name) in sorted(zip(numbers, listed, strict=True)):
        by_kind.setdefault(gpu_kind(name), []).append(f"/dev/nvidia{number}")
    if not by_kind and devices:
        by_kind[""] = sorted(devices, key=lambda path: int(re.sub(r"\D", "", path)))
    return tuple(Gpus(kind=kind, files=tuple(files)) for kind, files in by_kind.items())


def gpu_kind(name: str) -> str:
    """Return the kind that a job requests: `a100` for `NVIDIA A100-SXM4-80GB`, `rtx_4090` for a GeForce."""
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part]
    parts = [part for part in parts if part not in {"nvidia", "tesla", "geforce", "quadro"}]
    if parts and parts[0] in {"rtx", "gtx", "titan"}:
        return "_".join(parts[:2])
    return parts[0] if parts else ""
