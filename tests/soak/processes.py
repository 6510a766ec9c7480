"""Which processes belong to one home: its supervisors, and what runs below them.

Read from the machine's own /proc, so pids are the machine's also for what lives in a namespace of its own.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class HomeProcesses(msgspec.Struct, frozen=True):
    """Pids by what they are."""

    supervisors: list[int]
    sandboxes: list[int]
    """bubblewrap and the first process of its namespace."""
    setups: list[int]
    ranks: list[int]
    fork_servers: list[int]
    stray_fork_servers: list[int]
    """Those of them whose control plane is gone."""

    def all_of_jobs(self) -> list[int]:
        """What should be gone once no job runs."""
        return self.supervisors + self.sandboxes + self.setups + self.ranks + self.stray_fork_servers


def find(home: Path) -> HomeProcesses:
    """One look. What ends meanwhile is not listed."""
    stats = _parents_and_names()
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    attempts = {path.name for place in ("live", "archived") for path in (home / "spool" / place).glob("*")}
    supervisors = [pid for pid, (_, name) in stats.items() if name != b"bwrap" and _supervises(pid, home)]
    # A supervisor that has just forked is a child with its parent's command line.
    first = [pid for pid in supervisors if stats[pid][0] not in supervisors]
    sandboxes: list[int] = []
    setups: list[int] = []
    ranks: list[int] = []
    for pid, (_, name) in stats.items():
        marks = _environment(pid)
        if marks.get(b"SHOAL_ATTEMPT_ID", b"").decode() in attempts:
            (ranks if b"SHOAL_RANK" in marks else setups).append(pid)
        elif name == b"bwrap" and _is_below(pid, first, stats):
            sandboxes.append(pid)
            sandboxes += [child for child in children.get(pid, ()) if stats[child][1] == b"sh"]
    nurseries = [pid for pid in stats if _is_fork_server(pid, home)]
    strays = [
        pid for pid in nurseries if not any(b"shoal.cli" in word for word in _command_line(stats[pid][0]))
    ]
    return HomeProcesses(first, sandboxes, setups, ranks, nurseries, strays)


def describe(pid: int) -> str:
    """For people: what is left of a process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = "(gone)"
    return f"{pid} {words[:200]}"


def _supervises(pid: int, home: Path) -> bool:
    words = _command_line(pid)
    return b"shoal.runtime.supervisor" in words and words[-1].startswith(f"{home}/".encode())


def _is_fork_server(pid: int, home: Path) -> bool:
    if b"shoal.runtime.process.fork_server" not in _command_line(pid):
        return False
    return _environment(pid).get(b"SHOAL_SERVER_FILE", b"").startswith(f"{home}/".encode())


def _command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return [b""]


def _environment(pid: int) -> dict[bytes, bytes]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}


def _parents_and_names() -> dict[int, tuple[int, bytes]]:
    """Every living process; zombies run nothing."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            before, _, after = (entry / "stat").read_bytes().rpartition(b")")
        except OSError:
            continue
        state, parent = after.split()[:2]
        if state not in (b"Z", b"X"):
            found[int(entry.name)] = (int(parent), before.partition(b"(")[2])
    return found


def _is_below(pid: int, tops: list[int], stats: dict[int, tuple[int, bytes]]) -> bool:
    while pid in stats:
        if pid in tops:
            return True
        pid = stats[pid][0]
    return False
