"""From settings to a core that can run: the home directory, the store, the engine, the first admin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio.to_thread

from shoal.clock import Clock, SystemClock
from shoal.control.anchor import check_anchor, drop_anchor
from shoal.control.authority import load_authority
from shoal.control.core import Core
from shoal.control.elsewhere import cluster_for, find_left, settle_left
from shoal.control.first import chain_key, claim, load_key, prepare
from shoal.control.lead import keeping_lead, urls_for_supervisors
from shoal.control.policy import declare_policy
from shoal.control.policy_file import read_policy
from shoal.control.restored import settle_restored
from shoal.control.services.porches import Porches
from shoal.control.turns import Turns
from shoal.engines.reach import Reach
from shoal.engines.registry import open_engine
from shoal.engines.set_aside import set_aside
from shoal.errors import StoreUnavailable
from shoal.home import account_name
from shoal.ids import id_factory
from shoal.settings import Settings
from shoal.store import open_store

STORE = "store"


@asynccontextmanager
async def open_core(settings: Settings) -> AsyncIterator[Core]:
    """Open everything, and let go of it all at the end. What runs on the nodes runs on."""
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
        request = await claim(store, settings.state_dir, is_bound_to_machine=settings.is_bound_to_machine)
        if request is not None:
            # Before an engine looks: it would judge by the copied records what runs under the original.
            await anyio.to_thread.run_sync(set_aside, settings.state_dir, clock.now())
        cluster = cluster_for(settings)
        left = await find_left(store, settings.state_dir, cluster, store.term)
        engine = open_engine(
            settings.engine,
            home=settings.state_dir,
            clock=clock,
            server_file=settings.leader_file,
            demo=str(settings.demo) if settings.demo else None,
            reach=_reach(settings, clock),
            term=store.term,
        )
        core = Core(
            store=store,
            engine=engine,
            clock=clock,
            new_id=id_factory(clock.now),
            settings=settings,
            key=load_key(settings.state_dir),
            policy=read_policy(settings.policy) if settings.policy else None,
        )
        core.control_urls = urls_for_supervisors(settings)
        if settings.has_other_machines:
            core.porches = Porches(load_authority(settings.state_dir, clock), clock)
        try:
            await check_anchor(core, is_restored=request is not None)
            await prepare(core, account_name())
            if request is not None:
                await settle_restored(core, request)
            await settle_left(core, left, cluster)
            await declare_policy(core)
            store.watch_writes(partial(_note_write, core.turns))
            async with keeping_lead(core, store):
                yield core
            if not core.deposed.is_set():
                await drop_anchor(core)
        finally:
            await engine.close()
    finally:
        await store.close()


def _reach(settings: Settings, clock: Clock) -> Reach | None:
    """How supervisors on other machines find and know the cluster's control planes."""
    if not settings.reach:
        return None
    authority = load_authority(settings.state_dir, clock)
    return Reach(urls=settings.reach, ca=authority.certificate.decode("ascii"))


def _note_write(turns: Turns, error: StoreUnavailable | None) -> None:
    """A store that takes no writes, as on a full disk, is told by `/healthz` and `shoal status`."""
    if error is None:
        turns.went_well(STORE)
    else:
        turns.failed(STORE, error)
