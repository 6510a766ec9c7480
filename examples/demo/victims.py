"""Find the processes of one cluster, by what they are: ranks, supervisors, the control plane."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rank:
    """A rank's own process, below its shell and whatever holds it together."""

    pid: int
    rank: int
    node: str
    command: str


def control_plane(home: Path) -> int:
    """The process that serves this home."""
    return int(json.loads((home / "server.json").read_bytes())["pid"])


def supervisor(home: Path, attempt_id: str, node: str) -> int:
    """The process that looks after one node's share of an attempt."""
    claimed = home / "spool" / "live" / attempt_id / node / "claimed"
    return int(json.loads(claimed.read_bytes())["pid"])


def rank_process(attempt_id: str, rank: int) -> Rank | None:
    """The program of this rank: the youngest process that carries its marks; None before it runs."""
    found = [
        Rank(pid, rank, env.get("SHOAL_NODE", ""), command)
        for pid, env, command in _processes()
        if env.get("SHOAL_ATTEMPT_ID") == attempt_id and env.get("RANK") == str(rank)
    ]
    return max(found, key=lambda process: process.pid, default=None)


def processes_of(home: Path) -> list[int]:
    """Everything that runs for this home: its control plane, its supervisors, their ranks."""
    attempts = {path.name for place in ("live", "kept") for path in (home / "spool" / place).glob("*")}
    return [
        pid
        for pid, env, command in _processes()
        if env.get("SHOAL_ATTEMPT_ID") in attempts
        or (env.get("SHOAL_HOME") == str(home) and "shoal.cli.serve" in command)
        or str(home / "spool") in command
    ]


def log_on_disk(home: Path, attempt_id: str, node: str) -> str:
    """What the ranks of one node have said, as the supervisor wrote it: needs no control plane."""
    log = home / "spool" / "live" / attempt_id / node / "log"
    return log.read_text(encoding="utf-8", errors="replace")


def _processes() -> Iterator[tuple[int, dict[str, str], str]]:
    """pid, environment and command line of every process one may look into; others without the first."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        env: dict[str, str] = {}
        with contextlib.suppress(OSError):
            pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            env = {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            yield int(entry.name), env, " ".join(words).strip()
