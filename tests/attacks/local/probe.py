"""What a hostile rank tries against its walls, told in one line of JSON each. Run by a job, not imported."""

# Plain strings: what is tried is what the system calls say, and a rank may have little memory.
# ruff: noqa: PTH110, PTH116, PTH123, PTH208

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER_AND_MOUNTS = 0x10000000 | 0x00020000
REMOUNT_BIND, PTRACE_ATTACH = 0x1000 | 0x20, 16
facts = json.loads(sys.argv[1])


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def read(path: str) -> str:
    with open(path, "rb") as file:
        return repr(file.read(300))


def write(path: str, text: str) -> str:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
    return f"wrote {text} to {path}"


def mount(source: str, target: str, kind: str, flags: int = 0) -> str:
    checked(LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, None))
    return f"mounted {target}"


def remount_in_a_user_namespace() -> str:
    """In a child: root of a namespace of its own, with every capability there."""
    child = os.fork()
    if child == 0:
        try:
            checked(LIBC.unshare(NEW_USER_AND_MOUNTS))
            write("/proc/self/setgroups", "deny")
            write("/proc/self/uid_map", f"0 {facts['uid']} 1")
            mount("", "/", "", REMOUNT_BIND)
            write("/etc/shoal-was-here", "x")
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise PermissionError("refused inside")
    return "made / writable"


def connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    return f"connected to {path}"


def own_cgroup(controller: str) -> str:
    with open("/proc/self/cgroup", encoding="ascii") as file:
        lines = [line.strip().split(":", 2) for line in file]
    place = next(path for _, names, path in lines if controller in names.split(","))
    # Our own place is seen from the mount's root, which need not be the hierarchy's.
    base = f"/sys/fs/cgroup/{controller}"
    while place and not os.path.exists(base + place):
        place = place.partition("/")[2] and "/" + place[1:].partition("/")[2]
    return base + place


def ran_as_root(program: str) -> str:
    output = os.popen(f"{program} -u").read().strip()
    if output != "0":
        raise PermissionError(f"it ran as {output}")
    return "root"


def kill(pid: int) -> str:
    os.kill(pid, signal.SIGKILL)
    return f"killed {pid}"


def other_processes() -> str:
    """Every process here that is neither ours nor the sandbox's own two."""
    everybody = [name for name in os.listdir("/proc") if name.isdigit()]
    strangers = [name for name in everybody if os.stat(f"/proc/{name}").st_uid not in (facts["uid"], 0)]
    if not strangers:
        raise ProcessLookupError("nobody else is here")
    return " ".join(strangers)


def against(target: str, pid: int) -> dict[str, Callable[[], object]]:
    return {
        f"kill {target}": lambda: kill(pid),
        f"read the environment of {target}": lambda: read(f"/proc/{pid}/environ"),
        f"read the command line of {target}": lambda: read(f"/proc/{pid}/cmdline"),
        f"read the memory of {target}": lambda: read(f"/proc/{pid}/mem"),
        f"trace {target}": lambda: checked(LIBC.ptrace(PTRACE_ATTACH, pid, None, None)),
    }


def attempts() -> dict[str, Callable[[], object]]:
    home, victim, server, supervisor = (facts[name] for name in ("home", "victim", "server", "supervisor"))
    by_name: dict[str, Callable[[], object]] = {
        "list the home": lambda: next(name for name in os.listdir(home) if name != "spool"),
        "read the database": lambda: read(f"{home}/shoal.db"),
        "read the signing key": lambda: read(f"{home}/keys/signing.key"),
        "read the credentials": lambda: read(f"{home}/credentials.json"),
        "read an archive": lambda: read(f"{home}/archives/x.tar"),
        "read its own order": lambda: read(f"{facts['share']}/task_spec.json"),
        "write its own outcome": lambda: write(f"{facts['share']}/outcome.json", "{}"),
        "write its own log": lambda: write(f"{facts['share']}/log", "1.0 0 o forged\n"),
        "read another job's file": lambda: read(f"{facts['other_share']}/work/secret"),
        "read another job's log": lambda: read(f"{facts['other_share']}/log"),
        "reach the home through the first process": lambda: read(f"/proc/1/root{home}/shoal.db"),
        "see another user's processes": other_processes,
        "kill the sandbox's first process": lambda: kill(1),
        "become root": lambda: os.setuid(0),
        "become root's group": lambda: os.setgid(0),
        "join other groups": lambda: os.setgroups([0]),
        "run a setuid program": lambda: ran_as_root(facts["setuid"]),
        "mount a file system": lambda: mount("none", "/mnt", "tmpfs"),
        "make everything writable": lambda: mount("", "/", "", REMOUNT_BIND),
        "make everything writable as its own root": remount_in_a_user_namespace,
        "make a device": lambda: os.mknod("/tmp/mem", 0o20666, os.makedev(1, 1)),
        "open the memory": lambda: read("/dev/mem"),
        "open a disk": lambda: read(facts["disk"]),
        "open a GPU": lambda: read("/dev/nvidia0"),
        "reboot by a file": lambda: write("/proc/sysrq-trigger", "h"),
        "name a program for crashes": lambda: write("/proc/sys/kernel/core_pattern", "|/tmp/x"),
        "rename the machine": lambda: checked(LIBC.sethostname(b"mine", 4)),
        "change its root": lambda: os.chroot("/tmp"),
        "raise its memory limit": lambda: write(f"{own_cgroup('memory')}/memory.limit_in_bytes", "-1"),
        "raise its process limit": lambda: write(f"{own_cgroup('pids')}/pids.max", "max"),
        "leave its cgroup": lambda: write("/sys/fs/cgroup/pids/tasks", "0"),
        "spare itself when memory is short": lambda: write("/proc/self/oom_score_adj", "-1000"),
        "talk to a server such as docker": lambda: connect(facts["socket"]),
        "talk to a server by its other name": lambda: connect(f"/var{facts['socket']}"),
        "write in /usr": lambda: write("/usr/bin/shoal-was-here", "x"),
        "write in /etc": lambda: write("/etc/shoal-was-here", "x"),
    }
    for target, pid in (("another job", victim), ("the control plane", server), ("a supervisor", supervisor)):
        by_name |= against(target, pid)
    return by_name


if __name__ == "__main__":
    for name, attempt in attempts().items():
        try:
            result = {"did": str(attempt())}
        except (OSError, IndexError, StopIteration) as error:
            result = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps({"attempt": name, **result}), flush=True)
    os.kill(-1, signal.SIGKILL)  # everybody this user may signal, in sight or not
