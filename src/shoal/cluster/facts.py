"""What one script, run once on a machine, tells of it; and the reading of what it told.

The script changes nothing. It is plain `sh` with what a bare Debian or Ubuntu has, and prints one fact a
line: a word, then values. What cannot be found out is not printed, and the reader says which fact is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from shoal.cluster.inventory import Found, Gpus, Host, Inventory, sentences
from shoal.errors import EngineRefused

STATE_DIR = "/var/lib/shoal-cluster"
"""What Shoal did to a machine is written down there, by the machine itself; `destroy` goes by it."""
MUNGE_KEY = "/etc/munge/munge.key"
SLURM_DIR = "/etc/slurm"
SLURM_CONF = f"{SLURM_DIR}/slurm.conf"
SLURMDBD_CONF = f"{SLURM_DIR}/slurmdbd.conf"
CONTAINED = "ProctrackType=proctrack/cgroup"
"""The line of `slurm.conf` by which control groups hold all processes of a job."""
GOING_ON = "configuring,running,resizing,signaling,stopped,suspended,stage_out"
"""Slurm's states of a job that has nodes and is not ending: it finds each by its own name alone."""
DATABASE, DATABASE_USER = "slurm_acct", "shoal_slurm"
"""The user's name is our own: one `slurm` may be somebody else's."""
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
"""Files that Shoal may write. One that is there already and is not Shoal's is never lost silently."""
PACKAGES = ("munge", "slurm-client", "slurmd", "slurmctld", "slurmdbd", "mariadb-server")
MYSQL = ("mysql-server", "mysql-community-server", "percona-server-server", "percona-xtradb-cluster")
"""How the packages of databases begin that have their data where MariaDB has it."""

SHARE_OF_MEMORY = 0.97
"""Slurm drains a node that has less than declared; kernels differ in what they keep for themselves."""
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
  told=$($ask --query-gpu=index,mig.mode.current,name 2>/dev/null) ||
    told=$($ask --query-gpu=index,name 2>/dev/null | sed 's/, */, -, /')
  timeout 60 nvidia-smi -q 2>/dev/null | sed -n 's/^ *Minor Number *: *\\([0-9][0-9]*\\) *$/minor \\1/p'
  printf '%s\\n' "$told" | sed -n 's/^\\([0-9][0-9]*\\), *\\([^,]*\\), */gpu \\1 \\2 /p'
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
    """One machine, as it was when it was asked."""

    hostname: str
    os: str
    os_version: str
    arch: str
    uid: int
    now: int
    init: str
    found: Found
    is_contained: bool = False
    """Whether its `slurm.conf` has cgroups hold jobs."""
    packages: Mapping[str, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    """Packages that were there once: their settings are there yet, and what they kept."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path to the SHA-256 of what is in it."""
    databases: frozenset[str] = frozenset()
    """Of MariaDB, its own included."""
    login: tuple[str, int] = ("root", 0)
    """Who we logged in as, before `sudo`."""
    slurm_uid: int | None = None
    python: str = ""
    """`3.11`; empty where there is none yet."""
    off_s: int = 0
    """Seconds by which its clock is ahead of ours."""
    split_gpus: tuple[int, ...] = ()
    """Those with MIG switched on: no job can have one whole."""
    own_cluster: str = ""
    own_id: str = ""
    """Of that cluster; none where an older Shoal claimed the machine."""
    own_files: frozenset[tuple[str, str]] = frozenset()
    """(SHA-256, path) of everything Shoal ever wrote here."""
    own_packages: frozenset[str] = frozenset()
    own_made: frozenset[str] = frozenset()
    """`database`, `names`, or a folder's path."""
    own_started: frozenset[str] = frozenset()
    firewalls: tuple[str, ...] = ()

    def is_others(self, inventory: Inventory) -> bool:
        """Whether it belongs to another cluster. One that has no id counts by its name alone."""
        is_same = self.own_cluster == inventory.cluster and self.own_id in {"", inventory.id}
        return bool(self.own_cluster) and not is_same

    def is_own(self, path: str) -> bool:
        """Whether what is at `path` now is what Shoal wrote there."""
        return (self.files.get(path, ""), path) in self.own_files

    def was_own(self, path: str) -> bool:
        """Whether Shoal ever wrote there, whatever is there now."""
        return any(own == path for _, own in self.own_files)


def read_facts(text: str, host: Host, now: int | None = None, as_root: str = "") -> Facts:
    """The facts in what the script printed, asked for at `now`. `as_root`: how a person runs something there.

    Raises `EngineRefused` if the machine cannot be used as it is, whatever it printed.
    """
    as_root = as_root or f"ssh {host.address} sudo"
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if not lines or lines[-1] != ["end"]:
        told = text.strip().splitlines()[-1:] or ["nothing"]
        raise EngineRefused(
            f"{host.label}: the machine did not finish telling about itself; its last words: {told[0]}",
            hint=f"{as_root} sh -c true",
        )
    one = {words[0]: words[1:] for words in reversed(lines)}
    os_id, os_version, os_like = (*one.get("os", ["unknown"]), "unknown", "none")[:3]
    if not {"debian", "ubuntu"} & {os_id, *os_like.split()}:
        raise EngineRefused(
            f"{host.label} runs `{os_id} {os_version}`; Slurm is installed on Debian and Ubuntu only",
            hint="name machines that run Debian or Ubuntu, or install one of them there",
        )
    if one["uid"] != ["0"]:
        raise EngineRefused(
            f"{host.label}: commands run as uid {one['uid'][0]}, and `sudo -n` did not make them root",
            hint=f"give the user `NOPASSWD: ALL` in sudoers on {host.address}, or connect with `--user root`",
        )
    try:
        return _read(lines, one, host, now)
    except ValidationError as wrong:
        raise EngineRefused(
            f"{host.label} calls itself or its parts what Slurm cannot use: {'; '.join(sentences(wrong))}",
            hint=f"{as_root} hostnamectl set-hostname NAME",
        ) from None
    except (KeyError, IndexError, ValueError) as wrong:
        raise EngineRefused(
            f"{host.label} told of itself what cannot be read: {wrong!r}", hint=f"{as_root} lscpu"
        ) from None


def _read(lines: list[list[str]], one: Mapping[str, list[str]], host: Host, now: int | None) -> Facts:
    os_id, os_version = (*one.get("os", ["unknown"]), "unknown")[:2]
    own: dict[str, list[list[str]]] = {}
    for words in lines:
        if words[0] == "own" and len(words) > 2:
            own.setdefault(words[1], []).append(words[2:])
    return Facts(
        hostname=one["hostname"][0],
        os=os_id,
        os_version=os_version,
        arch=one["arch"][0],
        uid=0,
        now=int(one["now"][0]),
        init="systemd" if one["init"] == ["systemd"] else "direct",
        found=_found(lines, one, host),
        is_contained="contained" in one,
        packages={words[1]: words[2] for words in _packages(lines, "i")},
        removed=frozenset(words[1] for words in _packages(lines, "c")),
        files={words[1]: words[2] for words in lines if words[0] == "file"},
        databases=frozenset(words[1] for words in lines if words[0] == "database") - {"lost+found"},
        login=(one["login"][0], int(one["login"][1])) if "login" in one else ("root", 0),
        slurm_uid=int(one["slurm_uid"][0]) if "slurm_uid" in one else None,
        python=one["python"][0] if one.get("python") else "",
        off_s=0 if now is None else int(one["now"][0]) - now,
        split_gpus=tuple(int(words[1]) for words in lines if words[0] == "gpu" and words[2] == "Enabled"),
        own_cluster=own.get("cluster", [[""]])[0][0],
        own_id="".join(own.get("cluster", [[""]])[0][1:2]),
        own_files=frozenset((words[0], words[1]) for words in own.get("files", [])),
        own_packages=frozenset(words[0] for words in own.get("packages", [])),
        own_made=frozenset(words[-1] for words in own.get("made", [])),
        own_started=frozenset(words[0] for words in own.get("started", [])),
        firewalls=tuple(words[1] for words in lines if words[0] == "firewall"),
    )


def _packages(lines: list[list[str]], state: str) -> list[list[str]]:
    """Those of which dpkg's second letter is this. The first is what is wanted of it: `h` of one on hold."""
    return [words for words in lines if words[0] == "package" and len(words) > 3 and words[3][1:2] == state]


def _found(lines: list[list[str]], one: Mapping[str, list[str]], host: Host) -> Found:
    sockets, cores, threads = shape_of_cpus(
        [words[1] for words in lines if words[0] == "cpu"], int(one["cpus"][0])
    )
    memory_mib = int(int(one["memory_kib"][0]) / 1024 * SHARE_OF_MEMORY)
    cgroups = [words[1] for words in lines if words[0] == "cgroup"]
    return Found(
        hostname=one["hostname"][0],
        address=inside_address(host, one.get("connection", []), [w[1] for w in lines if w[0] == "address"]),
        sockets=sockets,
        cores=cores,
        threads=threads,
        memory_mib=max(MEMORY_STEP_MIB, memory_mib // MEMORY_STEP_MIB * MEMORY_STEP_MIB),
        gpus=gpus_of(
            [(int(words[1]), " ".join(words[3:])) for words in lines if words[0] == "gpu"],
            [words[1] for words in lines if words[0] == "device"],
            [int(words[1]) for words in lines if words[0] == "minor"],
        ),
        cgroup="v2" if "v2" in cgroups else "v1" if "v1" in cgroups else "",
    )


def shape_of_cpus(rows: list[str], usable: int) -> tuple[int, int, int]:
    """(sockets, cores in each, threads in each). Flat where only some of the CPUs may be used."""
    pairs = [tuple(row.split(",")) for row in rows]
    sockets = len({pair[1] for pair in pairs if len(pair) == 2})
    cores = len(set(pairs))
    if len(pairs) != usable or not sockets or cores % sockets or len(pairs) % cores:
        return 1, usable, 1
    return sockets, cores // sockets, len(pairs) // cores


def inside_address(host: Host, connection: list[str], addresses: list[str]) -> str:
    """Where the other machines reach this one: as the inventory says, else where our connection arrived."""
    if host.inside:
        return host.inside
    arrived = connection[2] if len(connection) == 4 else ""
    if arrived and not arrived.startswith("127.") and arrived != "::1":
        return arrived
    return addresses[0] if addresses else arrived or host.address


def gpus_of(told: list[tuple[int, str]], devices: list[str], minors: list[int]) -> tuple[Gpus, ...]:
    """GPUs by kind: as the driver tells, else as device files that are there, of no kind.

    The driver counts GPUs along the bus, and names their files by minor numbers: not always the same.
    """
    by_kind: dict[str, list[str]] = {}
    numbers = minors if len(minors) == len(told) else [index for index, _ in told]
    for number, (_, name) in sorted(zip(numbers, told, strict=True)):
        by_kind.setdefault(gpu_kind(name), []).append(f"/dev/nvidia{number}")
    if not by_kind and devices:
        by_kind[""] = sorted(devices, key=lambda path: int(re.sub(r"\D", "", path)))
    return tuple(Gpus(kind=kind, files=tuple(files)) for kind, files in by_kind.items())


def gpu_kind(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` is `a100`, `NVIDIA GeForce RTX 4090` is `rtx_4090`: what a job asks for."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    words = [word for word in words if word not in {"nvidia", "tesla", "geforce", "quadro"}]
    if words and words[0] in {"rtx", "gtx", "titan"}:
        return "_".join(words[:2])
    return words[0] if words else ""
