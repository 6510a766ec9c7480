"""Who holds what where, after much has come and gone."""

from __future__ import annotations

import msgspec

from shoal.scheduler.snapshot import Holding
from shoal.scheduler.stakes import Stakes
from tests.support.clusters import NOW, holding


def filled(*held: Holding) -> Stakes:
    stakes = Stakes(max_evictions=5)
    for one in held:
        stakes.add(one)
    return stakes


def test_node_whose_last_job_was_leaving_is_forgotten() -> None:
    """Else it would be among the emptiest for ever, before nodes on which somebody could be evicted."""
    first, second = holding(1, {"node-01": (0,)}), holding(2, {"node-01": (1,)})
    leaving = msgspec.structs.replace(first, is_leaving=True)
    stakes = filled(first, second)
    stakes.remove(first)
    stakes.add(leaving)
    stakes.remove(second)
    assert stakes.emptiest(9, NOW) == filled(leaving).emptiest(9, NOW) == []
    stakes.remove(leaving)
    assert stakes.emptiest(9, NOW) == filled().emptiest(9, NOW) == []
