"""What took a node's memory is told from what is held there, not from how it came to be."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import NodeShare
from shoal.scheduler import Holding, Planner, Policy
from tests.support.clusters import GIB, NOW, holding, job, node, request


def told(*held: Holding) -> str:
    planner = Planner(Policy())
    planner.set_node(node("node-01", memory_bytes=8 * GIB))
    for one in held:
        planner.hold(one)
    planner.add(job(1, request(memory_bytes=GIB)))
    planner.plan(NOW)
    said = planner.explain("att-1", NOW)
    assert said is not None
    return said.details[0]


def half(number: int, gpus: tuple[int, ...]) -> Holding:
    share = NodeShare(node="node-01", cpus=1.0, memory_bytes=4 * GIB, gpu_ids=gpus)
    return msgspec.structs.replace(holding(number, {}), allocation=(share,))


def test_of_two_jobs_that_took_as_much_memory_the_one_with_more_gpus_is_told_of() -> None:
    one, other = half(1, (0,)), half(2, (1, 2))
    assert "4 GiB went with 2 GPUs to one job" in told(one, other)
    assert told(one, other) == told(other, one)
