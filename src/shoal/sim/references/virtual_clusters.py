"""First in, first out in static virtual clusters: each project has its own nodes, and its head blocks the
rest.

A job that fits one node takes the fullest node that has room. A larger job takes whole free nodes, and leaves
what it does not need of the last.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from shoal.sim.loop import GpuNodes, SimulationState, Slots


class FifoInClusters:
    def __init__(self, nodes_of: Mapping[str, Sequence[int]]) -> None:
        """`nodes_of`: the nodes of each project, by index."""
        self._nodes_of = nodes_of
        self._queues: dict[str, deque[int]] = defaultdict(deque)

    def decide(self, state: SimulationState[GpuNodes]) -> Iterator[tuple[int, Slots]]:
        changed = dict.fromkeys(state.jobs[index].project for index in (*state.ended, *state.arrived))
        for index in state.arrived:
            self._queues[state.jobs[index].project or ""].append(index)
        for project in changed:
            queue = self._queues[project or ""]
            while queue:
                place = slots(
                    state.machine, self._nodes_of[project or ""], int(state.jobs[queue[0]].num_gpus)
                )
                if place is None:
                    break
                yield queue.popleft(), place


def slots(machine: GpuNodes, nodes: Sequence[int], num_gpus: int) -> Slots | None:
    """The place among these nodes, which are all of one size. None if it does not fit."""
    per_node = machine.gpus[nodes[0]]
    if num_gpus <= per_node:
        fitting = [(machine.free[node], node) for node in nodes if machine.free[node] >= num_gpus]
        return [(min(fitting)[1], num_gpus)] if fitting else None
    whole, rest = divmod(num_gpus, per_node)
    counts = [per_node] * whole + ([rest] if rest else [])
    empty = [node for node in nodes if machine.free[node] == per_node]
    return list(zip(empty, counts, strict=False)) if len(empty) >= len(counts) else None
