"""What every node would cost that could serve a demand: which attempts must stop there, and what that loses.

`EligibleNodes` counts the nodes as a gang may use them: those of one domain together if it must be close, and
one of each domain over which it must spread. `PreemptionOptions` evaluates a node when it is asked, and again
when an attempt that runs there is counted as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import Any

from shoal.scheduler.facts.amounts import Demand, Need, NodeResources
from shoal.scheduler.facts.capacity import NodeUse
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.facts.snapshot import Holding
from shoal.scheduler.placement.fit import fits
from shoal.scheduler.preemption.costs import PriorityGroup, lost_s
from shoal.scheduler.preemption.freed_capacity import FreedCapacity, cheapest_set


class EligibleNodes:
    """Nodes that could serve a gang, by domain."""

    def __init__(self, demand: Demand, nodes: Mapping[str, NodeUse]) -> None:
        self._demand = demand
        self._nodes = nodes
        self._within = demand.within if demand.is_close_required else None
        self._domains: dict[str, dict[str, set[str]]] = {}
        """By domain and spread domain, the nodes there."""
        self._all: set[str] = set()

    def empty_copy(self) -> EligibleNodes:
        """Return the same without any nodes."""
        return EligibleNodes(self._demand, self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def is_eligible(self, name: str) -> bool:
        """Whether a gang could use the node: it is in a domain of each level that the gang asks for."""
        return None not in self._where(name)

    def add(self, name: str) -> None:
        domain, spot = self._where(name)
        assert domain is not None
        assert spot is not None
        self._all.add(name)
        self._domains.setdefault(domain, {}).setdefault(spot, set()).add(name)

    def discard(self, name: str) -> None:
        if name not in self._all:
            return
        domain, spot = self._where(name)
        assert domain is not None
        assert spot is not None
        self._all.discard(name)
        nodes_by_spread = self._domains[domain]
        nodes_by_spread[spot].discard(name)
        if not nodes_by_spread[spot]:
            del nodes_by_spread[spot]

    def has_beside(self, name: str) -> bool:
        """Whether another node of its spread domain is already in."""
        domain, spot = self._where(name)
        return spot in self._domains.get(domain or "", ())

    def is_enough(self) -> bool:
        """Whether the gang could start on some of the nodes."""
        return any(
            len(nodes_by_spread) >= self._demand.min_nodes for nodes_by_spread in self._domains.values()
        )

    def sufficient_domains(self) -> list[list[str]]:
        """Return the nodes of each domain that has enough."""
        return [
            sorted(name for names in nodes_by_spread.values() for name in names)
            for _, nodes_by_spread in sorted(self._domains.items())
            if len(nodes_by_spread) >= self._demand.min_nodes
        ]

    def tightest(self, key: Callable[[str], Any]) -> list[str] | None:
        """Return as many nodes as the gang needs, those with the least keys; None: there are not enough."""
        tightest_by_domain = [
            sorted((min(names, key=key) for names in nodes_by_spread.values()), key=key)[
                : self._demand.min_nodes
            ]
            for nodes_by_spread in self._domains.values()
            if len(nodes_by_spread) >= self._demand.min_nodes
        ]
        return min(tightest_by_domain, key=lambda names: [key(name) for name in names], default=None)

    def _where(self, name: str) -> tuple[str | None, str | None]:
        node, spread = self._nodes[name], self._demand.spread
        domain = "" if self._within is None else node.label(self._within)
        return domain, name if spread is None else node.label(spread)


NUM_SETS = 4096
"""Nodes for which the cheapest set is searched. On further nodes all attempts stop that are not spared in the
end."""
TIE = 1e-6
"""Of attempts with equal expected losses, the one with the smaller maximum loss goes first."""

Cost = tuple[float, int, int, str]
"""What is lost, GPUs and CPUs left over, the node's name."""


class PreemptionOptions:
    def __init__(
        self,
        state: ClusterState,
        demand: Demand,
        groups: Collection[PriorityGroup],
        barred: AbstractSet[str],
        gone: Mapping[str, Holding],
        reserved: Mapping[str, Sequence[Need]],
        now: float,
        settle_s: float,
    ) -> None:
        """`groups`: the attempts that may be evicted, once they have run for `settle_s`.

        `gone`: attempts that count as stopped. `reserved`: needs that nodes must hold in addition to what is
        held there.
        """
        self.state = state
        self.demand = demand
        self.need = demand.need
        self.groups = frozenset(groups)
        self.barred = barred | demand.excluded
        self.gone = dict(gone)
        self.reserved = reserved
        self.now = now
        self._settle_s = settle_s
        self.settles_at = inf
        """When the first attempt may be evicted that was passed over because it had just started."""
        self.eligible = EligibleNodes(demand, state.capacity.nodes)
        """Nodes that could serve."""
        self.costs: dict[str, tuple[Cost, list[str]]] = {}
        """What these nodes cost, and which attempts would have to stop."""
        self._median_safe_until = state.preemption_costs.median_safe_until
        self._usable: dict[str, bool] = {}
        self._large: dict[NodeResources, bool] = {}
        self._losses: dict[str, float] = {}
        self._freed: dict[str, FreedCapacity] = {}
        self._num_sets = 0

    def is_usable(self, name: str) -> bool:
        is_usable = self._usable.get(name)
        if is_usable is None:
            node, labels = self.state.capacity.nodes.get(name), self.need.labels
            is_usable = node is not None and node.is_open and name not in self.barred
            is_usable = is_usable and node is not None and (not labels or node.has(labels))
            is_usable = self._usable[name] = (
                is_usable and node is not None and self._is_large_enough(node.whole)
            )
        return is_usable

    def _is_large_enough(self, whole: NodeResources) -> bool:
        is_large_enough = self._large.get(whole)
        if is_large_enough is None:
            is_large_enough = self._large[whole] = fits(self.need, whole, whole)
        return is_large_enough

    def freed_on(self, name: str) -> FreedCapacity:
        freed = self._freed.get(name)
        if freed is None:
            tasks = self.state.preemption_costs.on_node.get(name, {})
            node, reserved = self.state.capacity.nodes[name], self.reserved.get(name, ())
            freed = self._freed[name] = FreedCapacity(node, self.need, tasks, reserved)
            for attempt_id in tasks:
                if attempt_id in self.gone:
                    freed.leave(attempt_id)
        return freed

    def leave(self, holding: Holding) -> None:
        self.gone[holding.attempt_id] = holding
        for task in holding.allocation:
            freed = self._freed.get(task.node)
            if freed is not None:
                freed.leave(holding.attempt_id)

    def stay(self, holding: Holding) -> None:
        del self.gone[holding.attempt_id]
        for task in holding.allocation:
            freed = self._freed.get(task.node)
            if freed is not None:
                freed.stay(holding.attempt_id)

    def cheapest(self) -> Iterator[str]:
        """Yield the attempts that may stop, in order of loss per device."""
        attempt_ids = self.state.preemption_costs.cheapest(self.groups, self.need, self.now)
        return filter(self._has_settled, attempt_ids)

    def _has_settled(self, attempt_id: str) -> bool:
        at = self.state.holdings[attempt_id].placed_at + self._settle_s
        if at > self.now:
            self.settles_at = min(self.settles_at, at)
        return at <= self.now

    def evaluate(self, name: str) -> None:
        """Record what the node costs. A node that cannot serve is not compared."""
        group_of, freed = self.state.preemption_costs.group_of, self.freed_on(name)
        losses = {
            attempt_id: self.loss_of(attempt_id)
            for attempt_id in sorted(self.state.preemption_costs.on_node.get(name, ()))
            if attempt_id not in self.gone
            and group_of.get(attempt_id) in self.groups
            and self._has_settled(attempt_id)
        }
        self._num_sets += 1
        victims = cheapest_set(freed, losses, self.need, is_rough=self._num_sets > NUM_SETS)
        self.costs.pop(name, None)
        if victims is None or not self.eligible.is_eligible(name):
            self.eligible.discard(name)
            return
        self.eligible.add(name)
        loss = sum(losses[attempt_id] for attempt_id in victims)
        self.costs[name] = (loss, *freed.left(victims), name), victims

    def loss_of(self, attempt_id: str) -> float:
        loss = self._losses.get(attempt_id)
        if loss is None:
            holding = self.state.holdings[attempt_id]
            seconds = lost_s(holding, self.now, self._median_safe_until) + TIE * lost_s(holding, self.now)
            loss = self._losses[attempt_id] = seconds * self.state.preemption_costs.devices_of[attempt_id]
        return loss

    def reevaluate(self, holdings: Iterable[Holding]) -> list[str]:
        """Evaluate again the nodes on which these attempts run, because their costs have changed."""
        nodes = sorted({task.node for holding in holdings for task in holding.allocation})
        usable = [name for name in nodes if self.is_usable(name)]
        for name in usable:
            self.evaluate(name)
        return usable

    def ready_nodes(self) -> EligibleNodes:
        """Return the nodes on which the need fits once all attempts that count as gone have stopped."""
        ready = self.eligible.empty_copy()
        for name in self.costs:
            if self.freed_on(name).fits():
                ready.add(name)
        return ready
