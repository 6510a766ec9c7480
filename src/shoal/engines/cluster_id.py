"""Which cluster a home hands its work to, and what of that work is on disk.

What an engine does not list does not run, and a node that was started anew has ended what ran there: both are
evidence about the cluster that was asked, and about no other. So who opens an engine looks here first
whether the work there is its own. Reads and writes files; asks nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.engines.refusal import is_name
from shoal.runtime import spool
from shoal.wire import NodeOutcome

FILE = "cluster.json"
LOCAL = "local"
SPOOL, DESK = "spool", "desk"


class ClusterId(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of which one it is. Equal ones may be two; `is_other` ones are."""

    engine: str
    name: str = ""
    """What it calls itself; empty: not known."""
    heads: tuple[str, ...] = ()
    """Who controls it, any of them; empty: not known."""
    way: str = ""
    """How it is asked, which may change; counts where both have nothing else to go by."""

    @property
    def place(self) -> str:
        """The folder of the home through which its supervisors are spoken to."""
        return SPOOL if self.engine == LOCAL else DESK

    def is_other(self, than: ClusterId) -> bool:
        if self.engine != than.engine:
            return True
        names = {one.name for one in (self, than) if one.name}
        if len(names) > 1:
            return True
        if self.heads and than.heads:
            return not set(self.heads) & set(than.heads)
        return not (self.name and than.name) and self.way != than.way

    def __str__(self) -> str:
        if self.engine == LOCAL:
            return f"the machine {self.name[:8]}" if self.name else "this machine"
        name = f" `{self.name}`" if self.name else ""
        at = ", ".join(self.heads) or self.way
        return f"the {self.engine.capitalize()}{name}{f' ({at})' if at else ''}"


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is laid down and not forgotten."""

    attempt_id: str
    job: str
    """How people name it; its attempt's id where that cannot be read."""
    shares: dict[str, NodeOutcome | None]
    """By node: how it ended; None: nobody has said that it has."""

    @property
    def open_nodes(self) -> list[str]:
        return [node for node, outcome in self.shares.items() if outcome is None]

    def __str__(self) -> str:
        return f"{self.job} on {', '.join(self.open_nodes)}"


def this_machine(*, is_shared: bool) -> ClusterId:
    """`is_shared`: control planes on other machines, with engines of their own, may read the same."""
    known = ""
    with contextlib.suppress(OSError):
        known = Path("/etc/machine-id").read_text(encoding="ascii").strip() if is_shared else ""
    return ClusterId(engine=LOCAL, name=known)


def read_cluster(home: Path) -> ClusterId | None:
    """The one that whoever led last handed its work to; None: nobody has written that down."""
    try:
        return msgspec.json.decode((home / FILE).read_bytes(), type=ClusterId)
    except FileNotFoundError:
        return None


def write_cluster(home: Path, cluster: ClusterId) -> None:
    """Durably."""
    spool.durable_write(home / FILE, msgspec.json.encode(cluster))


def all_left(home: Path, place: str) -> Iterator[Left]:
    """Everything in that folder, oldest first."""
    live = home / place / "live"
    for entry in sorted(live.iterdir()) if live.is_dir() else ():
        if is_name(entry.name):
            yield left_of(home, place, entry.name)


def left_of(home: Path, place: str, attempt_id: str) -> Left:
    """What that folder has of one attempt: no shares where it was never laid down, or is forgotten."""
    attempt, job, shares = home / place / "live" / attempt_id, attempt_id, dict[str, NodeOutcome | None]()
    for directory in sorted(path for path in attempt.glob("*") if path.is_dir()):
        files = spool.Share(directory)
        shares[directory.name] = None
        with contextlib.suppress(msgspec.DecodeError):
            order, outcome = spool.read_order(files), spool.read_outcome(files)
            if order is not None:
                job = f"{order.project}/{order.job_number}"
                # Of another incarnation: written late, by somebody who was deposed.
                is_own = outcome is not None and outcome.incarnation == order.incarnation
                shares[directory.name] = outcome if is_own else None
    return Left(attempt_id=attempt_id, job=job, shares=shares)
