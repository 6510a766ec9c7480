"""What the local engine writes and runs: orders completed for here, the supervisor's command. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import msgspec

import shoal
from shoal.engines.base import Submission
from shoal.wire import Order

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""All of our own environment that a supervisor sees. Its ranks see their order's, and our PATH."""
CODE = os.path.dirname(os.path.dirname(os.path.abspath(shoal.__file__)))  # noqa: PTH100,PTH120 - a string for PYTHONPATH


NAME_ROOM = 1024
"""For the directory of a share on a forked supervisor's command line."""


def complete_orders(
    submission: Submission, master_addr: str, master_port: int, confinement: tuple[str, ...] | None
) -> tuple[Order, ...]:
    """The orders with what this engine decides filled in, the same for every node of the gang.

    Where this machine cannot switch users, jobs run as whoever runs Shoal; `shoal nodes` says so. Where
    nobody knows whether it can (None), the user asked for stays: never root because a probe failed.
    """
    can_switch = confinement is None or "uid" in confinement
    return tuple(
        msgspec.structs.replace(
            order,
            master_addr=master_addr,
            master_port=master_port,
            confinement=confinement,
            uid=order.uid if can_switch else None,
        )
        for order in submission.orders
    )


def supervisor_command(directory: str) -> list[str]:
    """Runs this very code whatever the current directory holds: no user site, nothing unsafe on the path."""
    return [sys.executable, "-P", "-s", "-m", "shoal.runtime.supervisor", directory]


def nursery_command() -> list[str]:
    """The process that forks supervisors. Its last word is only room for theirs, which are longer."""
    return [sys.executable, "-P", "-s", "-m", "shoal.runtime.nursery", "." * NAME_ROOM]


def supervisor_environment(environment: Mapping[str, str], server_file: str) -> dict[str, str]:
    """The little a supervisor needs. No other `SHOAL_` variable: tokens must not travel here."""
    kept = {name: environment[name] for name in PASSED_ON if name in environment}
    path = environment.get("PATH", os.defpath)
    ours = {"PYTHONPATH": CODE, "SHOAL_SERVER_FILE": server_file, "SHOAL_PATH": path}
    return {"PATH": os.defpath, **kept, **ours}


def detect_command() -> list[str]:
    """Prints the ways to confine a job that work here, as one line of words."""
    code = "from shoal.runtime.confine.detect import detect; print(*detect())"
    return [sys.executable, "-P", "-s", "-c", code]
