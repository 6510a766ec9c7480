"""Who holds what where, in the order of what stopping them costs: kept up to date, so that looking for the
cheapest does not grow with the cluster.

Seconds lost grow alike for everybody as time goes by, so an order made once stays true. That holds for the
median as well, by which those count whose checkpoints nobody knows. Most clusters evict nobody for days: who
came is put in order when somebody asks, and whoever has gone by then never is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from heapq import merge, nsmallest
from typing import NamedTuple

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Need, millicpus_needed
from shoal.scheduler.devices import Amount, held_by
from shoal.scheduler.fair import CPUS_PER_GPU, devices
from shoal.scheduler.loss import RESTART_S, UNKNOWN, safe_until
from shoal.scheduler.snapshot import Holding


class Side(NamedTuple):
    """Those who stand alike when it comes to who may evict whom, and hold alike."""

    priority: int
    project: str
    num_nodes: int
    on_first: Amount
    is_known: bool
    """Whether their checkpoints are."""

    @classmethod
    def of(cls, holding: Holding) -> Side:
        first = holding.allocation[0]
        on_first = Amount(
            len(first.gpu_ids) * first.gpu_milli, 0 if first.gpu_ids else millicpus_needed(first.cpus)
        )
        is_known = holding.checkpoint_at is not None
        return cls(holding.priority, holding.project, len(holding.allocation), on_first, is_known)

    def waste(self, need: Need) -> float:
        """How many devices stop for each that a node with this need has use for."""
        here = devices(self.on_first)
        asked = devices(Amount(need.num_gpus * need.gpu_milli, need.millicpus))
        return self.num_nodes * here / max(min(here, asked), 1e-6)


class _Weight:
    """Of all who run on a node: devices, and those times when their work is safe, in whole numbers, so that
    what has come and gone leaves nothing behind.
    """

    __slots__ = ("known", "known_safe", "unknown", "unknown_safe")

    def __init__(self) -> None:
        self.known = self.known_safe = self.unknown = self.unknown_safe = 0

    def add(self, amount: int, safe: int, *, is_known: bool) -> None:
        if is_known:
            self.known += amount
            self.known_safe += safe
        else:
            self.unknown += amount
            self.unknown_safe += safe

    @property
    def is_nothing(self) -> bool:
        """Nobody is left who would lose anything."""
        return not self.known and not self.unknown

    def loss(self, now: float, typical: float) -> float:
        """If all of them stop: sorts nodes, in no unit that means anything."""
        whole_runs = 1000 * now * self.unknown - self.unknown_safe
        unknown = whole_runs if typical == UNKNOWN else min(whole_runs, 1000 * (now - typical) * self.unknown)
        restarts = 1000 * RESTART_S * (self.known + self.unknown)
        return 1000 * now * self.known - self.known_safe + unknown + restarts


Party = tuple[int, str]
"""A priority and a project: who may evict whom depends on nothing else."""


class Stakes:
    def __init__(self, max_evictions: int) -> None:
        self._max_evictions = max_evictions
        self._unread: dict[str, Holding] = {}
        """Those that were added since anybody asked."""
        self._on_node: dict[str, dict[str, NodeShare]] = {}
        self.leaving: dict[str, Holding] = {}
        """Asked to stop already: what they hold is free soon."""
        self._side_of: dict[str, Side] = {}
        self._spent: dict[str, Holding] = {}
        self._devices_of: dict[str, float] = {}
        self._sides: dict[Side, list[tuple[float, str]]] = {}
        """Of those in `side_of`. The one that saved last is first."""
        self._held: dict[Party, dict[str, tuple[int, int]]] = {}
        """By node, the thousandths of CPUs and the GPUs that the same hold there."""
        self._saves: list[float] = []
        """Up to when the work of those is safe who do not leave and whose checkpoints are known; sorted."""
        self._weights: dict[str, _Weight] = {}
        """By node, of all who do not leave."""

    @property
    def on_node(self) -> Mapping[str, Mapping[str, NodeShare]]:
        """By node, what each attempt holds there."""
        self._catch_up()
        return self._on_node

    @property
    def side_of(self) -> Mapping[str, Side]:
        """Of all that do not leave and were not evicted as often as anybody may be."""
        self._catch_up()
        return self._side_of

    @property
    def spent(self) -> Mapping[str, Holding]:
        """Those that were."""
        self._catch_up()
        return self._spent

    @property
    def devices_of(self) -> Mapping[str, float]:
        """Of those who were not, what they hold; CPUs count as parts of a GPU."""
        self._catch_up()
        return self._devices_of

    @property
    def sides(self) -> Collection[Side]:
        self._catch_up()
        return self._sides.keys()

    @property
    def typical(self) -> float:
        """Up to when the work of one without a known checkpoint is taken to be safe: as the median of those
        with one; of an even number, of the two in the middle the one that loses more.
        """
        self._catch_up()
        return self._saves[(len(self._saves) - 1) // 2] if self._saves else UNKNOWN

    def add(self, holding: Holding) -> None:
        self._unread[holding.attempt_id] = holding
        if holding.is_leaving:
            self.leaving[holding.attempt_id] = holding

    def remove(self, holding: Holding) -> None:
        """As it was added."""
        self.leaving.pop(holding.attempt_id, None)
        if self._unread.pop(holding.attempt_id, None) is None:
            self._strike(holding)

    def _catch_up(self) -> None:
        if self._unread:
            unread, self._unread = self._unread, {}
            for holding in unread.values():
                self._enter(holding)

    def _enter(self, holding: Holding) -> None:
        for share in holding.allocation:
            self._on_node.setdefault(share.node, {})[holding.attempt_id] = share
        if holding.is_leaving:
            return
        if holding.checkpoint_at is not None:
            insort(self._saves, safe_until(holding))
        held = held_by(holding.allocation)
        if holding.num_evicted < self._max_evictions:
            side = self._side_of[holding.attempt_id] = Side.of(holding)
            insort(self._sides.setdefault(side, []), _place(holding))
            self._devices_of[holding.attempt_id] = devices(held)
            self._count(holding, 1)
        else:
            self._spent[holding.attempt_id] = holding
        self._weigh(holding, held, 1)

    def _strike(self, holding: Holding) -> None:
        for share in holding.allocation:
            here = self._on_node.get(share.node, {})
            here.pop(holding.attempt_id, None)
            if not here:
                self._on_node.pop(share.node, None)
        if holding.is_leaving:
            return
        if holding.checkpoint_at is not None:
            del self._saves[bisect_left(self._saves, safe_until(holding))]
        self._spent.pop(holding.attempt_id, None)
        self._leave_side(holding)
        self._weigh(holding, held_by(holding.allocation), -1)

    def cheapest(self, sides: Collection[Side], need: Need, now: float) -> Iterator[str]:
        """Attempts of those sides, by what they would lose for each device that `need` has use for."""
        self._catch_up()
        ways = [self._by_loss(side, side.waste(need), now) for side in sorted(sides)]
        return (attempt_id for _, attempt_id in merge(*ways))

    def emptiest(self, count: int, now: float) -> list[str]:
        """Nodes that lose least if all of them but those who leave stop, the first first."""
        typical = self.typical
        losses = ((weight.loss(now, typical), name) for name, weight in self._weights.items())
        return [name for _, name in nsmallest(count, losses)]

    def loss_on(self, name: str, now: float) -> float:
        """What sorts a node among the emptiest."""
        self._catch_up()
        weight = self._weights.get(name)
        return 0.0 if weight is None else weight.loss(now, self.typical)

    def held_on(self, sides: Collection[Side]) -> Iterator[tuple[str, int, int]]:
        """Nodes, and how many thousandths of CPUs and GPUs those of the sides' parties hold there."""
        self._catch_up()
        parties = sorted({(side.priority, side.project) for side in sides})
        if len(parties) == 1:
            return ((name, *held) for name, held in self._held[parties[0]].items())
        total: dict[str, tuple[int, int]] = {}
        for party in parties:
            for name, (cpus, gpus) in self._held[party].items():
                so_far = total.get(name, (0, 0))
                total[name] = so_far[0] + cpus, so_far[1] + gpus
        return ((name, *held) for name, held in total.items())

    def _count(self, holding: Holding, sign: int) -> None:
        party = holding.priority, holding.project
        here = self._held.setdefault(party, {})
        for share in holding.allocation:
            cpus, gpus = here.get(share.node, (0, 0))
            cpus += sign * millicpus_needed(share.cpus)
            gpus += sign * len(share.gpu_ids)
            if cpus or gpus:
                here[share.node] = cpus, gpus
            else:
                del here[share.node]
        if not here:
            del self._held[party]

    def _weigh(self, holding: Holding, held: Amount, sign: int) -> None:
        amount = sign * (held.milligpus * int(CPUS_PER_GPU) + held.millicpus)
        safe, is_known = amount * round(safe_until(holding) * 1000), holding.checkpoint_at is not None
        for share in holding.allocation:
            weight = self._weights.get(share.node)
            if weight is None:
                weight = self._weights[share.node] = _Weight()
            weight.add(amount, safe, is_known=is_known)
            if weight.is_nothing:
                del self._weights[share.node]

    def _leave_side(self, holding: Holding) -> None:
        side = self._side_of.pop(holding.attempt_id, None)
        if side is None:
            return
        del self._devices_of[holding.attempt_id]
        self._count(holding, -1)
        equals = self._sides[side]
        del equals[bisect_left(equals, _place(holding))]
        if not equals:
            del self._sides[side]

    def _by_loss(self, side: Side, waste: float, now: float) -> Iterator[tuple[float, str]]:
        typical = UNKNOWN if side.is_known else self.typical
        return (
            ((max(now - max(-since, typical), 0.0) + RESTART_S) * waste, own)
            for since, own in self._sides[side]
        )


def _place(holding: Holding) -> tuple[float, str]:
    return -safe_until(holding), holding.attempt_id
