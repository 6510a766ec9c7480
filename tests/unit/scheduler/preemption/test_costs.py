"""The index of running attempts by eviction cost, after many changes."""

from __future__ import annotations

import msgspec

from shoal.scheduler.facts.snapshot import Holding
from shoal.scheduler.preemption.costs import PreemptionCosts
from tests.support.clusters import NOW, holding


def filled(*held: Holding) -> PreemptionCosts:
    costs = PreemptionCosts(max_evictions=5)
    for attempt in held:
        costs.add(attempt)
    return costs


def test_node_whose_last_job_is_stopping_leaves_the_cost_index() -> None:
    """Otherwise it would stay among the cheapest nodes for ever, before nodes on which a job could be
    evicted.
    """
    first, second = holding(1, {"node-01": (0,)}), holding(2, {"node-01": (1,)})
    stopping = msgspec.structs.replace(first, is_stopping=True)
    costs = filled(first, second)
    costs.remove(first)
    costs.add(stopping)
    costs.remove(second)
    assert costs.cheapest_nodes(9, NOW) == filled(stopping).cheapest_nodes(9, NOW) == []
    costs.remove(stopping)
    assert costs.cheapest_nodes(9, NOW) == filled().cheapest_nodes(9, NOW) == []
