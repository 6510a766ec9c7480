"""What a process inherits besides its program. A fork can replace a start only if all of it is equal.

The stand-in runs this before each start, so it imports only `os` and reads a few small files.
"""

from __future__ import annotations

import os

RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "CROSS_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "CROSS_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", "JAX_LOCAL_DEVICE_IDS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE"),
    *("_", "SHLVL", "PWD", "OLDPWD"),
)
RANK_PREFIXES = ("SHOAL_", "SLURM_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MPI_LOCAL")
"""Variables that differ between the ranks, the groups and the standbys of one job, and those of the shell.
The zygote imports without them, and stops at an import that asks for one (`preload`)."""
STATUS_FIELDS = (
    *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Seccomp_filters", "THP_enabled"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("Cpus_allowed", "Mems_allowed"),
)
SIGNAL_FIELDS = ("SigBlk", "SigIgn")
OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33, which no program can use. Whether they are ignored depends on how a start began."""
PRIORITY, NICE, RT_PRIORITY, POLICY = 15, 16, 37, 38
"""Fields of `/proc/self/stat`, counted from the one after the name."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts", "time")
FIRST_INHERITED = 3


def is_of_rank(name: str) -> bool:
    """Whether the variable may differ between a zygote and the ranks that it forks."""
    return name in RANK_NAMES or name.startswith(RANK_PREFIXES)


def without_unbuffered(arguments: list[str]) -> list[str]:
    """Return the arguments from the script, `-m` or `-c` on. A `-u` behind that is the program's own."""
    return arguments[1:] if arguments[:1] == ["-u"] else arguments


def program_name(arguments: list[str], cwd: str) -> str:
    """Return which program this is: the path of a script, `-m module`, or `-c`."""
    first, *rest = without_unbuffered(arguments)
    if first in ("-c", "-m"):
        return f"-m {rest[0]}" if first == "-m" else first
    # As Python makes a path absolute: it leaves the rest as it is, even `./`.
    return first if first.startswith("/") else f"{cwd}/{first}"


def signature(interpreter: str, program: str, cwd: str, environment: dict[str, str]) -> str:
    """Return everything that must be equal for a fork of the zygote to equal a start in this process."""
    variables = sorted(item for item in environment.items() if not is_of_rank(item[0]))
    return repr((interpreter, program, cwd, variables, _status(), _settings(), _inherited_files()))


def _status() -> list[str]:
    fields = [line.partition(":\t")[::2] for line in _read("status").split("\n")]
    signals = [int(value, 16) & ~OF_THE_C_LIBRARY for name, value in fields if name in SIGNAL_FIELDS]
    return [value for name, value in fields if name in STATUS_FIELDS] + [f"{signal:x}" for signal in signals]


def _settings() -> list[object]:
    """Return limits, scheduling, memory policy, control groups and namespaces."""
    stat = _read("stat").rpartition(")")[2].split()
    root = os.stat("/")
    return [
        [stat[field] for field in (PRIORITY, NICE, RT_PRIORITY, POLICY)],
        *(_read(name) for name in ("limits", "oom_score_adj", "personality", "timerslack_ns", "cgroup")),
        _read("numa_maps").split("\n", 1)[0].split()[1:2],
        [_link(f"ns/{name}") for name in NAMESPACES],
        (root.st_dev, root.st_ino),
    ]


def _inherited_files() -> list[tuple[int, int, int]]:
    """Return the open files besides the standard streams, such as those of `<(command)`."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            # Descriptors that this interpreter itself opened are closed at an exec.
            if fd >= FIRST_INHERITED and os.get_inheritable(fd):
                facts = os.fstat(fd)
                files.append((fd, facts.st_dev, facts.st_ino))
        except OSError:
            continue  # it was the listing itself
    return sorted(files)


def _read(name: str) -> str:
    try:
        with open(f"/proc/self/{name}", "rb") as file:
            return os.fsdecode(file.read(1 << 16))
    except OSError:
        return ""


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/{name}")
    except OSError:
        return ""
