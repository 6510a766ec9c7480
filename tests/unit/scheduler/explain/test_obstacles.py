"""The message about a node's memory follows from what is held there, not from the order in which it
started.
"""

from __future__ import annotations

import msgspec

from shoal.model.attempt import NodeTask
from shoal.scheduler import Holding, Planner, Policy
from tests.support.clusters import GIB, NOW, candidate, holding, node, request


def memory_detail(*held: Holding) -> str:
    planner = Planner(Policy())
    planner.set_node(node("node-01", memory_bytes=8 * GIB))
    for holding_ in held:
        planner.hold(holding_)
    planner.add(candidate(1, request(memory_bytes=GIB)))
    planner.plan(NOW)
    explanation = planner.explain("att-1", NOW)
    assert explanation is not None
    return explanation.details[0]


def half(number: int, gpus: tuple[int, ...]) -> Holding:
    task = NodeTask(node="node-01", cpus=1.0, memory_bytes=4 * GIB, gpu_ids=gpus)
    return msgspec.structs.replace(holding(number, {}), allocation=(task,))


def test_of_two_jobs_with_equal_memory_the_one_with_more_gpus_is_named() -> None:
    first, second = half(1, (0,)), half(2, (1, 2))
    assert "4 GiB went with 2 GPUs to one job" in memory_detail(first, second)
    assert memory_detail(first, second) == memory_detail(second, first)
