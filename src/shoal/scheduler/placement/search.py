"""Find the tasks with which one candidate would start now, beside everything that comes before it.

Waiting jobs and replacements of lost tasks ask the same question here, so the same rules hold for both: the
quota and limits of the project, reservations, windows, power caps and the choice of nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.model.attempt import Allocation
from shoal.scheduler.facts.amounts import Demand, DeviceAmount, held_devices
from shoal.scheduler.facts.cluster_state import ClusterState
from shoal.scheduler.placement.fit import task_on
from shoal.scheduler.placement.gang import choose_nodes
from shoal.scheduler.placement.power import choose_within_power
from shoal.scheduler.placement.reservations import Blockers, CapacityReservations


class PlacementSearch:
    """Lives as long as its reservations. It takes nothing: the caller does."""

    def __init__(
        self,
        state: ClusterState,
        reservations: CapacityReservations,
        is_left_for_others: Callable[[str, DeviceAmount], bool],
    ) -> None:
        """`is_left_for_others`: whether a project may start this amount beside the candidates for which
        others are stopping.
        """
        self._state = state
        self._reservations = reservations
        self._is_left_for_others = is_left_for_others
        self._hopeless: set[tuple[Demand, Blockers]] = set()
        """Demands that found no nodes, and what blocked them. Within a cycle nodes only fill up, so they find
        none later."""

    def tasks_for(self, project: str, demand: Demand, now: float, ends_at: float) -> Allocation:
        """Return the tasks of a start at `now` that may last until `ends_at`; empty if it cannot start."""
        state = self._state
        if state.tree.has_ceilings:
            if state.refusal(project, demand) is not None:
                return ()
            demand = state.allowed(project, demand)
        blockers = self._reservations.blockers(project, now, ends_at)
        attempted = demand, blockers
        if attempted in self._hopeless:
            return ()
        names = self._choose(demand, blockers)
        if not names:
            self._hopeless.add(attempted)
            return ()
        tasks = tuple(task_on(demand.need, state.capacity.nodes[name]) for name in names)
        while state.tree.has_ceilings and tasks and not self._is_allowed(project, held_devices(tasks)):
            tasks = tasks[:-1]
        return tasks if len(tasks) >= demand.min_nodes else ()

    def _is_allowed(self, project: str, amount: DeviceAmount) -> bool:
        is_refused = self._state.tree.refusal(project, amount) is not None
        return not is_refused and self._is_left_for_others(project, amount)

    def _choose(self, demand: Demand, blockers: Blockers) -> list[str]:
        state, finder = self._state, self._state.finders.of(demand.need)
        barred = self._reservations.barred(demand.need, blockers)
        if not state.has_caps:
            return choose_nodes(demand, finder, state.capacity, barred)
        power, left = state.power, self._reservations.power_left(blockers)
        barred = barred | power.full(demand.need, left)
        names = choose_nodes(demand, finder, state.capacity, barred)
        if len(power.within(names, demand.need, left)) == len(names):
            return names
        return choose_within_power(
            demand, finder.ranked(barred | demand.excluded), state.capacity.nodes, power, left
        )
