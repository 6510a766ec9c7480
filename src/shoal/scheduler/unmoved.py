"""Why a job that may have others stop for it waits all the same: those who gave way often enough run on."""

from __future__ import annotations

import msgspec

from shoal.scheduler.amounts import Demand
from shoal.scheduler.book import Book
from shoal.scheduler.fit import fits
from shoal.scheduler.policy import Policy
from shoal.scheduler.rights import ground
from shoal.scheduler.snapshot import Candidate, Holding
from shoal.scheduler.types import Explanation
from shoal.scheduler.words import number_of


def with_unmoved(
    said: Explanation, candidate: Candidate, demand: Demand, book: Book, policy: Policy
) -> Explanation:
    """Counts those it could have stop, on nodes that could hold it, if they had not given way so often."""
    if not book.stakes.spent:
        return said
    asked = book.asked(demand)
    count = sum(
        _is_on_use(one, demand, book)
        and ground(candidate, asked, one.priority, one.project, book.tree, policy) is not None
        for one in book.stakes.spent.values()
    )
    if not count:
        return said
    facts = {**said.facts, "unmoved": count, "max_evictions": policy.max_evictions}
    who, on = ("1 job", "runs on until it ends") if count == 1 else (f"{count} jobs", "run on until they end")
    line = (
        f"{who} that it could have stop gave way {number_of(policy.max_evictions, 'time')} already, and {on}"
    )
    if not policy.max_evictions:
        line = f"nobody gives way here (`max_evictions: 0`): {who} that it could have stop {on}"
    return msgspec.structs.replace(said, details=(*said.details, line), facts=facts)


def _is_on_use(one: Holding, demand: Demand, book: Book) -> bool:
    nodes = (book.capacity.nodes.get(share.node) for share in one.allocation)
    return any(node is not None and fits(demand.need, node.whole, node.whole) for node in nodes)
