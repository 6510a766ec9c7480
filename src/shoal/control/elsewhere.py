"""No engine judges what was handed to another: looked at whenever a control plane opens.

`shoal connect` refuses to leave something behind that may run; but engines are also named by variables, files
are copied, and of several control planes each has settings of its own. Here the store says what holds
resources, and the disk where that was laid down.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.control.core import Core
from shoal.engines.cluster_id import DESK, SPOOL, ClusterId, Left, left_of, read_cluster, write_cluster
from shoal.engines.drafts import begin_term
from shoal.engines.registry import cluster_of
from shoal.errors import StateError
from shoal.model.moves import NodeEnded
from shoal.settings import Settings
from shoal.store import Store, Tx

SHOWN = 5
NOBODYS = ""
"""For an engine's name at a node: it was another cluster's. See `refresh_nodes`."""
UNNAMED = {SPOOL: "this machine", DESK: "a Slurm or Ray that was connected before"}


def cluster_for(settings: Settings) -> ClusterId:
    """The one that a control plane with these settings hands work to. `SpecError`: it was never connected."""
    return cluster_of(settings.engine, settings.state_dir, is_shared=settings.shared is not None)


async def find_left(store: Store, home: Path, cluster: ClusterId, term: int) -> list[Left]:
    """Attempts that hold resources and were laid down for another cluster, where they have ended.

    `term`: of the control plane that opens. `StateError`: some may run there.
    """
    recorded = read_cluster(home)
    found: list[Left] = []
    for place in (SPOOL, DESK):
        of_place = recorded if recorded is not None and recorded.place == place else None
        if place == cluster.place and (of_place is None or not of_place.is_other(cluster)):
            continue
        left = await _holding_at(store, home, place, term)
        _refuse_running(left, str(of_place or UNNAMED[place]), cluster)
        found += left
    return found


async def settle_left(core: Core, left: list[Left], cluster: ClusterId) -> None:
    """Record how those ended, which the engine that is open now would not know; then its work is here. Nodes
    of another cluster are nobody's from then on, and forgotten unless this one has them, too.
    """
    home = core.settings.state_dir
    recorded = read_cluster(home)
    is_moved = recorded is not None and recorded.is_other(cluster)
    ended = [outcome for one in left for outcome in one.shares.values() if outcome is not None]

    def record(tx: Tx) -> None:
        for outcome in ended:
            core.recorder.advance(tx, outcome.attempt_id, NodeEnded(outcome))
        for node in tx.nodes.all() if is_moved else ():
            tx.nodes.put(msgspec.structs.replace(node, engine=NOBODYS, version=node.version + 1))

    if ended or is_moved:
        await core.store.write(record)
    if recorded != cluster:
        write_cluster(home, cluster)


def refuse_another(home: Path, cluster: ClusterId) -> None:
    """For one that stands by: `StateError` where whoever leads hands work to another cluster."""
    leads = read_cluster(home)
    if leads is not None and leads.is_other(cluster):
        raise StateError(
            f"whoever leads hands work to {leads}, and this control plane would hand it to {cluster}",
            hint="connect this one to the same (`shoal connect --help`), or `shoal down` the others first",
        )


async def _holding_at(store: Store, home: Path, place: str, term: int) -> list[Left]:
    draft = home / place / "draft"
    if not draft.is_dir():
        return []
    # One that was deposed and wakes late must not lay anything down there any more.
    begin_term(draft, home / place / "trash", term)
    holding = await store.read(lambda tx: tx.attempts.holding())
    found = [left_of(home, place, attempt.attempt_id) for _, attempt in holding]
    return [left for left in found if left.shares]


def _refuse_running(left: list[Left], there: str, cluster: ClusterId) -> None:
    running = [one for one in left if one.open_nodes]
    if running:
        shown = "; ".join(map(str, running[:SHOWN])) + (" ..." if len(running) > SHOWN else "")
        raise StateError(
            f"{len(running)} attempts may run on {there}, and this control plane would hand work to "
            f"{cluster}, and know nothing of them: {shown}",
            hint="connect that one again (`shoal connect --help`), `shoal up`, and let them end, or "
            "`shoal down --jobs`",
        )
