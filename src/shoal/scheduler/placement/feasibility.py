"""What the cluster could hold if nothing ran on it: the difference between *not now* and *never*.

`WholeNodeQuota` compares whole nodes with what a project may have, because an exclusive node counts with all
that it has. The project must be allowed `min_nodes` nodes as large as each node of the gang. So whichever of
the remaining nodes are chosen, together they pass no ceiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from shoal.scheduler.facts.amounts import Demand, Need, NodeResources, whole_node_devices
from shoal.scheduler.facts.capacity import Capacity, NodeUse
from shoal.scheduler.order.project_tree import ProjectTree, QuotaRefusal
from shoal.scheduler.placement.fit import SHORTAGE_KINDS, fits, shortages


class SuitableNodes:
    """The nodes that could give some need when empty, by name."""

    def __init__(self, nodes: Iterable[NodeUse]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.open = [node for node in self.nodes if node.is_open]
        self.open_names = {node.name for node in self.open}
        self.closed = [node for node in self.nodes if not node.is_open]
        self.pools = {node.view.pool for node in self.nodes}

    def without(self, names: frozenset[str]) -> SuitableNodes:
        return SuitableNodes(node for node in self.nodes if node.name not in names) if names else self


class Feasibility:
    """Answers about empty nodes, kept until a node changes."""

    def __init__(self, capacity: Capacity) -> None:
        self._nodes_by_size = capacity.nodes_by_size
        self._by_need: dict[Need, SuitableNodes] = {}
        self._by_wholes: dict[tuple[NodeResources, ...], SuitableNodes] = {}
        self._is_open: dict[Demand, bool] = {}

    def suitable(self, need: Need) -> SuitableNodes:
        """Return the nodes, closed ones included. Needs that the same nodes can give share one answer."""
        if need not in self._by_need:
            wholes = tuple(whole for whole in self._nodes_by_size if fits(need, whole, whole))
            if need.labels:
                return self._labelled(need, wholes)
            if wholes not in self._by_wholes:
                self._by_wholes[wholes] = SuitableNodes(
                    node for whole in wholes for node in self._nodes_by_size[whole].values()
                )
            self._by_need[need] = self._by_wholes[wholes]
        return self._by_need[need]

    def _labelled(self, need: Need, wholes: tuple[NodeResources, ...]) -> SuitableNodes:
        nodes = (node for whole in wholes for node in self._nodes_by_size[whole].values())
        self._by_need[need] = SuitableNodes(node for node in nodes if node.has(need.labels))
        return self._by_need[need]

    def fits_open_nodes(self, demand: Demand) -> bool:
        """Whether the open nodes, without those it excludes, could hold the demand when empty."""
        is_open = self._is_open.get(demand)
        if is_open is None:
            suitable = self.suitable(demand.need).without(demand.excluded)
            is_open = self._is_open[demand] = can_hold(demand, suitable.open)
        return is_open

    def distinguishing_amounts(self, need: Need) -> tuple[str, ...]:
        """Return the amounts by which the nodes that could give `need` differ from the others;
        never empty.
        """
        short = {name for whole in self._nodes_by_size for name in shortages(need, whole, whole)}
        if need.memory_bytes is None:
            short.discard("memory")  # in proportion: a node with the CPUs and GPUs has it
        if need.num_gpus:
            short.add("gpus")
        return tuple(name for name in SHORTAGE_KINDS if name in short) or ("cpus",)

    def node_sizes(self) -> list[NodeResources]:
        """Return the distinct capacities of nodes."""
        return list(self._nodes_by_size)

    def pools(self, whole: NodeResources) -> set[str]:
        """Return the pools of the nodes that have `whole`."""
        return {node.view.pool for node in self._nodes_by_size[whole].values()}


def can_hold(demand: Demand, nodes: Collection[NodeUse]) -> bool:
    """Whether `nodes`, each of which could give the need, are enough, and close enough or apart."""
    return largest_gang(demand, nodes) >= demand.min_nodes


def largest_gang(demand: Demand, nodes: Collection[NodeUse]) -> int:
    """Return how many of `nodes` could serve as one gang."""
    if demand.spread is None:
        if demand.within is None or not demand.is_close_required:
            return len(nodes)
        return max(count_by_domain(demand.within, nodes).values(), default=0)
    within = demand.within if demand.is_close_required else None
    apart: dict[str | None, set[str]] = {}
    for node in nodes:
        enclosing = node.label(within) if within else ""
        domain = node.label(demand.spread)
        if enclosing is not None and domain is not None:
            apart.setdefault(enclosing, set()).add(domain)
    return max(map(len, apart.values()), default=0)


def count_by_domain(label: str, nodes: Collection[NodeUse]) -> Counter[str]:
    """Count `nodes` by domain of the label. Nodes without the label are in none."""
    domains = (node.label(label) for node in nodes)
    return Counter(domain for domain in domains if domain is not None)


class WholeNodeQuota:
    """What a project is refused of the nodes that could serve an exclusive demand."""

    def __init__(self, tree: ProjectTree, project: str, demand: Demand, suitable: SuitableNodes) -> None:
        self._demand = demand
        self._nodes = suitable.without(demand.excluded).nodes
        amounts = {node.whole: whole_node_devices(node.whole, demand.min_nodes) for node in self._nodes}
        refusals = {whole: tree.refusal(project, amount) for whole, amount in amounts.items()}
        self._refused: dict[NodeResources, QuotaRefusal] = {
            whole: refusal for whole, refusal in refusals.items() if refusal is not None
        }

    def allowed(self) -> Demand:
        """Return the demand, with the nodes that are too large for the project excluded."""
        too_large = frozenset(node.name for node in self._nodes if node.whole in self._refused)
        return self._demand._replace(excluded=self._demand.excluded | too_large)

    def refusal(self) -> QuotaRefusal | None:
        """Return the refusal of the smallest amount that would do, if only nodes that are too large could
        serve.
        """
        if not self._refused or not can_hold(self._demand, self._nodes):
            return None
        if can_hold(self._demand, [node for node in self._nodes if node.whole not in self._refused]):
            return None
        return min(
            self._refused.values(), key=lambda refusal: (refusal.requested, refusal.by, refusal.device)
        )
