"""Find the processes of one cluster: its control plane, its supervisors, their ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def processes_of(home: Path) -> list[int]:
    """Everything that runs for this home."""
    attempts = {path.name for place in ("live", "archived") for path in (home / "spool" / place).glob("*")}
    return [
        pid
        for pid, env, command in _processes()
        if env.get("SHOAL_ATTEMPT_ID") in attempts
        or (env.get("SHOAL_HOME") == str(home) and "shoal.cli.control_plane.server" in command)
        or str(home / "spool") in command
    ]


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
