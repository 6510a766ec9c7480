"""Open a control plane from its settings: the home directory, the store, the engine, the first admin.

Every opening also checks that no engine judges work that was handed to another engine. `shoal connect`
refuses to leave something behind that may run. But variables also name engines, people copy files, and each
of several control planes has its own settings. Here the store says what holds resources, and the disk says
for which cluster that was laid down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from shoal.clock import Clock, SystemClock
from shoal.control.bootstrap import chain_key, claim_database, ensure_admin, load_authority, load_signing_key
from shoal.control.capabilities import Records
from shoal.control.commands.policy import declare_policy, read_policy
from shoal.control.core import Core
from shoal.control.loops.anchor import check_anchor, drop_anchor
from shoal.control.loops.leadership import keep_leadership, urls_for_supervisors
from shoal.control.memory.health import LoopHealth
from shoal.control.restored import settle_restored
from shoal.control.services.state import SidecarIdentities
from shoal.engines.home_records import (
    MAILBOX,
    SPOOL,
    ClusterId,
    UnfinishedAttempt,
    read_cluster,
    set_aside,
    unfinished_attempt,
    write_cluster,
)
from shoal.engines.registry import cluster_of, open_engine
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.spool_directory import begin_term
from shoal.errors import StateError, StoreUnavailable
from shoal.home import account_name
from shoal.ids import id_factory
from shoal.model.moves import TaskEnded
from shoal.settings import Settings
from shoal.store import Store, Tx, open_store

MAX_ATTEMPTS_SHOWN = 5
NO_ENGINE = ""
"""The engine's name of a node that was another cluster's. See `refresh_nodes`."""
DEFAULT_CLUSTER_NAMES = {SPOOL: "this machine", MAILBOX: "a Slurm or Ray that was connected before"}


def cluster_for(settings: Settings) -> ClusterId:
    """Return the cluster that a control plane with these settings hands work to. `SpecError`: it was never
    connected.
    """
    return cluster_of(settings.engine, settings.state_dir, is_shared=settings.shared is not None)


async def find_abandoned(store: Store, home: Path, cluster: ClusterId, term: int) -> list[UnfinishedAttempt]:
    """Return attempts that hold resources, were laid down for another cluster and have ended there.

    `term` is the term of the control plane that opens. `StateError`: some of them may still run there.
    """
    recorded = read_cluster(home)
    abandoned: list[UnfinishedAttempt] = []
    for place in (SPOOL, MAILBOX):
        of_place = recorded if recorded is not None and recorded.folder == place else None
        if place == cluster.folder and (of_place is None or not of_place.is_other(cluster)):
            continue
        at_place = await _holding_at(store, home, place, term)
        _refuse_running(at_place, str(of_place or DEFAULT_CLUSTER_NAMES[place]), cluster)
        abandoned += at_place
    return abandoned


async def settle_abandoned(
    records: Records, home: Path, abandoned: list[UnfinishedAttempt], cluster: ClusterId
) -> None:
    """Record how those attempts ended, because the engine that is open now cannot know it. From then on this
    cluster has the work. The nodes of the other cluster belong to no engine, and `refresh_nodes` forgets them
    unless this cluster has them too.
    """
    recorded = read_cluster(home)
    is_moved = recorded is not None and recorded.is_other(cluster)
    ended = [outcome for attempt in abandoned for outcome in attempt.outcomes.values() if outcome is not None]

    def record(tx: Tx) -> None:
        for outcome in ended:
            records.recorder.advance(tx, outcome.attempt_id, TaskEnded(outcome))
        for node in tx.nodes.all() if is_moved else ():
            tx.nodes.put(msgspec.structs.replace(node, engine=NO_ENGINE, version=node.version + 1))

    if ended or is_moved:
        await records.store.write(record)
    if recorded != cluster:
        write_cluster(home, cluster)


def refuse_other_cluster(home: Path, cluster: ClusterId) -> None:
    """Raise `StateError` if the leader hands work to another cluster. For a control plane that stands by."""
    leads = read_cluster(home)
    if leads is not None and leads.is_other(cluster):
        raise StateError(
            f"the leader hands work to {leads}, and this control plane would hand it to {cluster}",
            hint="connect this one to the same (`shoal connect --help`), or `shoal down` the others first",
        )


async def _holding_at(store: Store, home: Path, place: str, term: int) -> list[UnfinishedAttempt]:
    draft = home / place / "draft"
    if not draft.is_dir():
        return []
    # A deposed control plane that wakes late must not lay anything down there any more.
    begin_term(draft, home / place / "trash", term)
    holding = await store.read(lambda tx: tx.attempts.holding())
    unfinished = [unfinished_attempt(home, place, attempt.attempt_id) for _, attempt in holding]
    return [attempt for attempt in unfinished if attempt.outcomes]


def _refuse_running(abandoned: list[UnfinishedAttempt], former_cluster: str, cluster: ClusterId) -> None:
    running = [attempt for attempt in abandoned if attempt.open_nodes]
    if running:
        shown = "; ".join(map(str, running[:MAX_ATTEMPTS_SHOWN])) + (
            " ..." if len(running) > MAX_ATTEMPTS_SHOWN else ""
        )
        raise StateError(
            f"{len(running)} attempts may run on {former_cluster}, and this control plane would hand work to "
            f"{cluster}, and could not watch them: {shown}",
            hint="connect that one again (`shoal connect --help`), `shoal up`, and let them end, or "
            "`shoal down --jobs`",
        )


STORE_LOOP = "store"


@asynccontextmanager
async def open_core(settings: Settings) -> AsyncIterator[Core]:
    """Open everything, and close all of it at the end. Running jobs keep running."""
    clock = SystemClock()
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    opening = partial(
        open_store,
        settings.store_url,
        clock=clock,
        leader=settings.url,
        chain_key=partial(chain_key, home=settings.state_dir),
    )
    store = await anyio.to_thread.run_sync(opening)
    try:
        request = await claim_database(
            store, settings.state_dir, is_bound_to_machine=settings.is_bound_to_machine
        )
        if request is not None:
            # Before an engine looks, because it would judge by the copied records what runs under the
            # original.
            await anyio.to_thread.run_sync(set_aside, settings.state_dir, clock.now())
        cluster = cluster_for(settings)
        abandoned = await find_abandoned(store, settings.state_dir, cluster, store.term)
        engine = open_engine(
            settings.engine,
            home=settings.state_dir,
            clock=clock,
            server_file=settings.leader_file,
            demo=str(settings.demo) if settings.demo else None,
            access=_reach(settings, clock),
            term=store.term,
        )
        core = Core(
            store=store,
            engine=engine,
            clock=clock,
            new_id=id_factory(clock.now),
            settings=settings,
            key=load_signing_key(settings.state_dir),
            policy=read_policy(settings.policy) if settings.policy else None,
        )
        core.leadership.control_urls = urls_for_supervisors(settings)
        if settings.has_other_machines:
            core.services.sidecar_identities = SidecarIdentities(
                load_authority(settings.state_dir, clock), clock
            )
        try:
            await check_anchor(core.anchors, core.records.store, is_restored=request is not None)
            await ensure_admin(core.records, core.sealing, core.settings, account_name())
            if request is not None:
                await settle_restored(core.records, core.sealing, core.settings, request)
            await settle_abandoned(core.records, settings.state_dir, abandoned, cluster)
            await declare_policy(core.records, core.planning.planner)
            store.watch_writes(partial(_record_store_health, core.loop_health))
            async with keep_leadership(core.records, core.leadership, core.settings, store):
                yield core
            if not core.leadership.deposed.is_set():
                await drop_anchor(core.anchors, core.records.store)
        finally:
            await engine.close()
    finally:
        await store.close()


def _reach(settings: Settings, clock: Clock) -> ControlPlaneAccess | None:
    """How supervisors on other machines find and recognize the cluster's control planes."""
    if not settings.urls_for_supervisors:
        return None
    authority = load_authority(settings.state_dir, clock)
    return ControlPlaneAccess(urls=settings.urls_for_supervisors, ca=authority.certificate.decode("ascii"))


def _record_store_health(loop_health: LoopHealth, error: StoreUnavailable | None) -> None:
    """Report a store that takes no writes, as on a full disk, through `/healthz` and `shoal status`."""
    if error is None:
        loop_health.record_success(STORE_LOOP)
    else:
        loop_health.record_failure(STORE_LOOP, error)
