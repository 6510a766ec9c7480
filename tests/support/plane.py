"""A control plane with the real store, scheduler and commands, over the fake engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.control import ControlPlane, runner
from shoal.control.core import Core
from shoal.engines.fake import Act, FakeCluster, FakeEngine, Script, always
from shoal.ids import id_factory
from shoal.model.node import Gpu, NodeFacts
from shoal.settings import ServerLimits, Settings
from shoal.store import open_memory_store, open_store

FOREVER = always(Act(run_s=None, lines=("hello",)))
"""Every job prints a line and runs until it is stopped."""


def nodes(count: int = 2, gpus: int = 4) -> list[NodeFacts]:
    """Nodes that small jobs do not fill, with some GPUs."""
    return [
        NodeFacts(
            name=f"node-{number}",
            cpus=4096.0,
            memory_bytes=64 << 40,
            disk_bytes=100 << 30,
            gpus=tuple(Gpu(index=index, kind="H100") for index in range(gpus)),
            is_simulated=True,
        )
        for number in range(1, count + 1)
    ]


@asynccontextmanager
async def open_plane(
    home: Path,
    *,
    script: Script = FOREVER,
    limits: ServerLimits | None = None,
    is_durable: bool = False,
    is_running: bool = True,
) -> AsyncIterator[ControlPlane]:
    """`is_durable`: SQLite on disk instead of memory. Not `is_running`: no loop moves anything."""
    clock = SystemClock()
    settings = Settings(home=home, port=0, limits=limits or ServerLimits())
    store = open_store(settings.store_url, clock=clock) if is_durable else open_memory_store()
    cluster = FakeCluster(nodes(), clock=clock, script=script)
    core = Core(
        store=store,
        engine=FakeEngine(cluster),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=settings,
        key=os.urandom(32),
    )
    try:
        if is_running:
            with _quick_turns():
                async with ControlPlane.running(core) as plane:
                    yield plane
        else:
            yield ControlPlane(core)
    finally:
        await store.close()


@contextmanager
def _quick_turns() -> Iterator[None]:
    """The fake engine tells nobody of what happened there: it is looked at often, so that no test waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "WATCH_EVERY_S", 0.1)
        patch.setattr(runner, "SERVE_EVERY_S", 0.1)
        yield
