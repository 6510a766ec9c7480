"""Which programs of the node a rank can run, when its user may not enter the directories they are in.

A root user's Python often lies in root's own, closed home. Whole Python environments are shown to the
job; any other directory behind a closed one is left out of its PATH, where it could only fail.
"""

from __future__ import annotations

import os
import sys

from shoal.runtime.confine.view import first_closed

ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")


def job_path(node_path: str, uid: int | None) -> str:
    """The PATH of the ranks: what is out of reach gives way to the Python that runs Shoal."""
    entries: list[str] = []
    for entry in node_path.split(":"):
        if first_closed(entry, uid) is None or environment_of(entry) is not None:
            entries.append(entry)
        else:
            entries += [os.path.join(prefix, "bin") for prefix in (sys.prefix, sys.base_prefix)]
    return ":".join(dict.fromkeys(entries))


def programs(path: str) -> tuple[str, ...]:
    """Directories that must stay readable, though the job's user cannot reach them by itself."""
    entries = [environment_of(entry) or entry for entry in path.split(":")]
    wanted = [sys.prefix, sys.base_prefix, *entries]
    real = {os.path.realpath(one) for one in wanted if one.startswith("/") and os.path.isdir(one)}
    return tuple(sorted(real - {"/"}))


def environment_of(entry: str) -> str | None:
    """The Python environment whose `bin` this is, if it is one."""
    above = os.path.dirname(entry.rstrip("/"))
    is_environment = any(os.path.exists(os.path.join(above, mark)) for mark in ENVIRONMENT_MARKS)
    return above if is_environment or above in (sys.prefix, sys.base_prefix) else None
