"""The data plane beside a home, as its file names it. What keeps it is elsewhere: `down` needs no server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from shoal.runtime.spool import start_ticks

FACTS = "serving.json"


def running(home: Path) -> dict[str, Any] | None:
    """The data plane of this home; None if there is none, another process has its number by now, or the file
    was copied from the home whose data plane it names.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        facts: dict[str, Any] = json.loads((home / FACTS).read_text(encoding="utf-8"))
        if facts["home"] != directory_of(home):
            return None
        if start_ticks(int(facts["pid"])) == facts["ticks"] and not _is_dead(int(facts["pid"])):
            return facts
    return None


def directory_of(home: Path) -> list[int]:
    """What tells the home from a copy of it."""
    facts = home.stat()
    return [facts.st_dev, facts.st_ino]


def stop(home: Path) -> int | None:
    """Have it finish what it has and end; None if there is none."""
    found = running(home)
    (home / FACTS).unlink(missing_ok=True)
    return terminate(found) if found is not None else None


def terminate(found: dict[str, Any]) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(found["pid"]), signal.SIGTERM)
    return int(found["pid"])


def _is_dead(pid: int) -> bool:
    """Ended, and nobody has asked how: as one whose parent became another program meanwhile."""
    state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    return state in (b"Z", b"X")
