"""Who holds what where, in the order of what stopping them costs: kept up to date, so that looking for the
cheapest does not grow with the cluster.

Seconds lost grow alike for everybody as time goes by, so an order made once stays true.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from heapq import merge, nsmallest
from typing import NamedTuple

from shoal.scheduler.amounts import Need, millicpus_needed
from shoal.scheduler.devices import Amount, held_by
from shoal.scheduler.fair import devices
from shoal.scheduler.loss import RESTART_S, safe_until
from shoal.scheduler.snapshot import Holding


class Side(NamedTuple):
    """Those who stand alike when it comes to who may evict whom, and hold alike."""

    priority: int
    project: str
    num_nodes: int
    on_first: Amount

    @classmethod
    def of(cls, holding: Holding) -> Side:
        first = holding.allocation[0]
        on_first = Amount(
            len(first.gpu_ids) * first.gpu_milli, 0 if first.gpu_ids else millicpus_needed(first.cpus)
        )
        return cls(holding.priority, holding.project, len(holding.allocation), on_first)

    def waste(self, need: Need) -> float:
        """How many devices stop for each that a node with this need has use for."""
        here = devices(self.on_first)
        asked = devices(Amount(need.num_gpus * need.gpu_milli, need.millicpus))
        return self.num_nodes * here / max(min(here, asked), 1e-6)


class Stakes:
    def __init__(self) -> None:
        self.on_node: dict[str, dict[str, Holding]] = {}
        self.leaving: dict[str, Holding] = {}
        """Asked to stop already: what they hold is free soon."""
        self._sides: dict[Side, list[tuple[float, str]]] = {}
        """All others. The one that saved last is first."""
        self._whole: dict[str, tuple[float, float]] = {}
        """By node, the devices of all others who run there, and for each of them up to when work is safe."""

    @property
    def sides(self) -> Collection[Side]:
        return self._sides.keys()

    def add(self, holding: Holding) -> None:
        for share in holding.allocation:
            self.on_node.setdefault(share.node, {})[holding.attempt_id] = holding
        if holding.is_leaving:
            self.leaving[holding.attempt_id] = holding
        else:
            insort(self._sides.setdefault(Side.of(holding), []), _place(holding))
            self._weigh(holding, 1)

    def remove(self, holding: Holding) -> None:
        for share in holding.allocation:
            here = self.on_node.get(share.node, {})
            here.pop(holding.attempt_id, None)
            if not here:
                self.on_node.pop(share.node, None)
        if self.leaving.pop(holding.attempt_id, None) is not None:
            return
        side = self._sides[Side.of(holding)]
        del side[bisect_left(side, _place(holding))]
        if not side:
            del self._sides[Side.of(holding)]
        self._weigh(holding, -1)

    def cheapest(self, sides: Collection[Side], need: Need, now: float) -> Iterator[str]:
        """Attempts of those sides, by what they would lose for each device that `need` has use for."""
        ways = [self._by_loss(side, side.waste(need), now) for side in sorted(sides)]
        return (attempt_id for _, attempt_id in merge(*ways))

    def emptiest(self, count: int, now: float) -> list[str]:
        """Nodes that lose least if all of them but those who leave stop, the first first."""
        losses = ((held * (now + RESTART_S) - safe, name) for name, (held, safe) in self._whole.items())
        return [name for _, name in nsmallest(count, losses)]

    def _weigh(self, holding: Holding, sign: int) -> None:
        all_of_it = sign * devices(held_by(holding.allocation))
        for share in holding.allocation:
            held, safe = self._whole.get(share.node, (0.0, 0.0))
            self._whole[share.node] = held + all_of_it, safe + all_of_it * safe_until(holding)
            if share.node not in self.on_node:
                del self._whole[share.node]

    def _by_loss(self, side: Side, waste: float, now: float) -> Iterator[tuple[float, str]]:
        return ((max(now + since, 0.0) * waste + RESTART_S * waste, own) for since, own in self._sides[side])


def _place(holding: Holding) -> tuple[float, str]:
    return -safe_until(holding), holding.attempt_id
