"""Find the set of running attempts that lose least by stopping and let one demand start.

`CandidateNodes` evaluates as few nodes as it takes to have a choice: first those that cost nothing, then
those on which the cheapest jobs run, then those that could serve at best. If none could, or too few together,
nothing more is evaluated.

`VictimSearch` takes the cheapest set of each evaluated node, which is exact if few jobs run there. It adds
the nodes that cost least one by one; a gang stops whole and counts once. In the end each attempt that is not
needed is spared, the most expensive first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple, Protocol

from shoal.scheduler.facts.amounts import NodeResources, remaining_after
from shoal.scheduler.facts.snapshot import Holding
from shoal.scheduler.preemption.options import PreemptionOptions

EXTRA_NODES = 16
"""Nodes that are compared in addition to the number that the demand needs."""
NUM_JOBS = 512
"""This many of the cheapest jobs are examined, and four more for each node, before whole nodes are
compared."""
NUM_DOMAINS = 4
"""Domains that are compared if a gang must be close together."""


class _CheapJobs:
    """The cheapest jobs on one node."""

    __slots__ = ("attempt_ids", "missing")

    def __init__(self, missing: int) -> None:
        self.attempt_ids: list[str] = []
        self.missing = missing
        """How many more GPUs must be freed, at least."""


class CandidateNodes:
    """Chooses the nodes to evaluate."""

    def __init__(self, options: PreemptionOptions) -> None:
        self._options = options
        self._seen: dict[str, _CheapJobs] = {}

    def evaluate(self) -> None:
        """Evaluate nodes that cost nothing first, then those on which the cheapest jobs run, then those that
        could serve at best. If none could, or too few together, none is evaluated twice.
        """
        preemption_costs, eligible, demand = (
            self._options.state.preemption_costs,
            self._options.eligible,
            self._options.demand,
        )
        is_plain = not demand.is_close_required and demand.spread is None
        limit = demand.min_nodes + len(self._options.reserved) if is_plain else None
        ready = self._options.state.finders.of(self._options.need).ranked(self._options.barred, limit)
        stopping = {task.node for holding in self._options.gone.values() for task in holding.allocation}
        for name in sorted({*ready, *stopping}):
            if self._options.is_usable(name) and self._options.freed_on(name).fits():
                self._options.evaluate(name)
        if not self._options.groups or eligible.is_enough():
            return
        if is_plain:
            if self._evaluate_nodes_of_cheap_jobs(stopping):
                return
            # If small jobs fill all nodes, every node has some expensive jobs, but some nodes have few.
            for name in preemption_costs.cheapest_nodes(
                2 * demand.min_nodes + 4 * EXTRA_NODES, self._options.now
            ):
                if name not in self._options.costs and self._options.is_usable(name):
                    self._options.evaluate(name)
        if not eligible.is_enough():
            self._evaluate_hopeful_domains(stopping)

    def _evaluate_hopeful_domains(self, stopping: AbstractSet[str]) -> None:
        """Evaluate the domains that could serve at best, those that lose least first, until there is a
        choice.
        """
        hopeful, now, preemption_costs = (
            self._hopeful(stopping),
            self._options.now,
            self._options.state.preemption_costs,
        )
        losses = {name: preemption_costs.loss_on(name, now) for names in hopeful for name in names}
        by_loss = [sorted(names, key=lambda name: (losses[name], name)) for names in hopeful]
        count = self._options.demand.min_nodes
        by_loss.sort(key=lambda names: (sum(losses[name] for name in names[:count]), names))
        for number, names in enumerate(by_loss):
            if number >= NUM_DOMAINS and self._options.eligible.is_enough():
                return
            for index, name in enumerate(names):
                if index >= 2 * count + 4 * EXTRA_NODES and self._options.eligible.is_enough():
                    break
                if name not in self._options.costs:
                    self._options.evaluate(name)

    def _hopeful(self, stopping: AbstractSet[str]) -> list[list[str]]:
        """Return, by domain, nodes that have enough GPUs and CPUs if all attempts that may be evicted stop,
        if those are enough together.
        """
        need, nodes, hopeful = (
            self._options.need,
            self._options.state.capacity.nodes,
            self._options.eligible.empty_copy(),
        )
        for name in (*self._options.costs, *stopping):
            if self._options.is_usable(name) and hopeful.is_eligible(name):
                hopeful.add(name)
        for name, cpus, gpus in self._options.state.preemption_costs.held_on(self._options.groups):
            node = nodes.get(name)
            if node is None:
                continue
            needed_millicpus = node.whole.millicpus if need.is_exclusive else need.millicpus
            if node.free.millicpus + cpus < needed_millicpus or node.free.num_devices + gpus < need.num_gpus:
                continue
            if self._options.is_usable(name) and hopeful.is_eligible(name):
                hopeful.add(name)
        return hopeful.sufficient_domains()

    def _evaluate_nodes_of_cheap_jobs(self, stopping: AbstractSet[str]) -> bool:
        """Evaluate a node once enough of its jobs have been seen. Return whether there is a choice
        of nodes.
        """
        enough, needed = self._options.demand.min_nodes + EXTRA_NODES, self._options.need.num_gpus
        holdings, nodes = self._options.state.holdings, self._options.state.capacity.nodes
        for attempt_id in islice(self._options.cheapest(), NUM_JOBS + 4 * self._options.demand.min_nodes):
            for task in holdings[attempt_id].allocation:
                name = task.node
                cheap_jobs = self._seen.get(name)
                if cheap_jobs is None:
                    if not self._options.is_usable(name):
                        continue
                    missing = 0 if name in stopping else needed - nodes[name].free.num_devices
                    cheap_jobs = self._seen[name] = _CheapJobs(missing)
                cheap_jobs.missing -= len(task.gpu_ids)
                cheap_jobs.attempt_ids.append(attempt_id)
                # A cheap job alone seldom frees enough on its node.
                if cheap_jobs.missing > 0 or name in self._options.costs:
                    continue
                if self._options.freed_on(name).fits(cheap_jobs.attempt_ids):
                    self._options.evaluate(name)
            if len(self._options.costs) >= enough and self._options.eligible.is_enough():
                return True
        return False


class VictimSet(NamedTuple):
    victims: list[Holding]
    spare: dict[str, NodeResources]
    """The nodes to start on, and what they have left beside the job then."""
    stopping: tuple[str, ...]
    """Attempts that must have left these nodes first."""


class EvictionRights(Protocol):
    """Which attempts may be evicted, one after the other, and whether that is enough for the ceilings."""

    def take(self, victims: Sequence[Holding]) -> bool:
        """Stop these attempts, if all of them may be evicted."""

    def spare(self, holding: Holding) -> bool:
        """Let the attempt continue, if the job is allowed beside it."""

    def stop_until_allowed(self, cheapest: Iterator[Holding]) -> list[Holding] | None:
        """Stop further attempts until the job is allowed, and return them. None: it is never allowed."""

    def undo(self) -> None:
        """Let all of them continue."""


class VictimSearch:
    def __init__(self, options: PreemptionOptions) -> None:
        self._options = options

    def run(self, rights: EvictionRights) -> VictimSet | None:
        """Return None if the attempts are not enough, or may not all be evicted."""
        CandidateNodes(self._options).evaluate()
        for _, names in sorted(
            (self._estimate(names), names) for names in self._options.eligible.sufficient_domains()
        ):
            victims = self._choose(names, rights)
            if self._start_nodes() is not None:
                more = rights.stop_until_allowed(self._others())
                for holding in more or ():
                    victims[holding.attempt_id] = holding
                    self._options.leave(holding)
                if more is not None:
                    self._spare_some(victims, rights)
                    return self._victim_set(victims)
            rights.undo()
            for holding in victims.values():
                self._options.stay(holding)
            self._options.reevaluate(victims.values())
        return None

    def _estimate(self, names: list[str]) -> float:
        return sum(
            sorted(self._options.costs[name][0][0] for name in names)[: self._options.demand.min_nodes]
        )

    def _choose(self, names: list[str], rights: EvictionRights) -> dict[str, Holding]:
        """Choose attempts to stop until as many nodes as needed can serve, if that is possible."""
        victims: dict[str, Holding] = {}
        queue, ready = [self._options.costs[name][0] for name in names], self._options.eligible.empty_copy()
        heapify(queue)
        while queue and not ready.is_enough():
            cost = heappop(queue)
            name = cost[-1]
            current = self._options.costs.get(name)
            if current is None or current[0] != cost or ready.has_beside(name):
                continue  # its cost has changed, or another node of its domain was chosen
            stop = [self._options.state.holdings[attempt_id] for attempt_id in current[1]]
            if stop and not rights.take(stop):
                continue  # a ground no longer holds
            ready.add(name)
            for holding in stop:
                victims[holding.attempt_id] = holding
                self._options.leave(holding)
            for other in self._options.reevaluate(stop):
                if other != name and other in self._options.costs:
                    heappush(queue, self._options.costs[other][0])
        return victims

    def _others(self) -> Iterator[Holding]:
        """Yield each attempt that may stop and has not been chosen, in order of loss per device."""
        for attempt_id in self._options.cheapest():
            if attempt_id not in self._options.gone:
                yield self._options.state.holdings[attempt_id]

    def _start_nodes(self) -> list[str] | None:
        """Return where the job starts once all stopping attempts have gone; None: nowhere."""
        return self._options.ready_nodes().tightest(lambda name: (*self._options.freed_on(name).left(), name))

    def _spare_some(self, victims: dict[str, Holding], rights: EvictionRights) -> None:
        """Spare each attempt without which the job can start, the most expensive first."""
        ready = self._options.ready_nodes()
        dearest = sorted(
            victims.values(),
            key=lambda holding: (-self._options.loss_of(holding.attempt_id), holding.attempt_id),
        )
        for holding in dearest:
            self._options.stay(holding)
            ready_nodes = [task.node for task in holding.allocation if task.node in ready]
            lacking = [name for name in ready_nodes if not self._options.freed_on(name).fits()]
            for name in lacking:
                ready.discard(name)
            if ready.is_enough() and rights.spare(holding):
                del victims[holding.attempt_id]
                continue
            for name in lacking:
                ready.add(name)
            self._options.leave(holding)

    def _victim_set(self, victims: dict[str, Holding]) -> VictimSet:
        nodes, on_node = self._start_nodes() or [], self._options.state.preemption_costs.on_node
        spare = {
            name: remaining_after(
                self._options.freed_on(name).free(),
                self._options.need,
                self._options.state.capacity.nodes[name].whole,
            )
            for name in nodes
        }
        leaving = {
            attempt_id
            for name in nodes
            for attempt_id in on_node.get(name, ())
            if attempt_id in self._options.gone
        }
        return VictimSet(list(victims.values()), spare, tuple(sorted(leaving | victims.keys())))
