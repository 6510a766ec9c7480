"""Nodes on which Slurm runs somebody else's jobs: known as such, however ours come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.slurm.engine import NODES_S
from shoal.wire import EndKind, TaskSpecRequest
from tests.unit.engines.slurm.test_slurm_stranded import Bench

pytestmark = pytest.mark.anyio


async def is_busy(bench: Bench, after_s: float = NODES_S) -> bool:
    bench.clock.advance(after_s)
    return {facts.name: facts.is_busy for facts in await bench.engine.nodes()}["n0"]


@pytest.mark.parametrize("state", ["MIXED", "ALLOCATED", "MIXED+COMPLETING"])
async def test_a_node_that_is_given_to_others_each_time_slurm_is_asked_is_busy(
    tmp_path: Path, state: str
) -> None:
    bench = Bench(tmp_path)
    assert not await is_busy(bench)
    bench.slurm.state = state
    assert not await is_busy(bench, NODES_S / 2), "Slurm was not asked again"
    assert not await is_busy(bench, NODES_S / 2), "it may be the end of a job of ours"
    assert not await is_busy(bench, NODES_S / 2)
    assert await is_busy(bench, NODES_S / 2), "ours waits for it, and is not what is there"
    bench.slurm.state = "IDLE"
    assert not await is_busy(bench)


async def test_a_node_that_is_given_to_ours_is_not_busy(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    mailbox, bench.slurm.state = bench.engine.mailbox, "ALLOCATED"
    mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="n0"))
    assert not any([await is_busy(bench) for _ in range(3)])
    mailbox.reap(mailbox.find("att_1")["n0"], EndKind.SUCCEEDED, "")
    assert not await is_busy(bench, NODES_S / 2)
    assert not await is_busy(bench, NODES_S / 2)
    assert await is_busy(bench), "somebody else was given what we left"
