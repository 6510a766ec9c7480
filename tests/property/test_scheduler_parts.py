"""Whatever parts, slices and whole nodes are asked for, nothing is given twice and the rest is known."""

from __future__ import annotations

from collections import Counter
from math import inf

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model.attempt import NodeTask
from shoal.scheduler.facts.amounts import MILLI, Need
from shoal.scheduler.facts.capacity import Capacity
from shoal.scheduler.facts.snapshot import GpuInfo, NodeInfo
from shoal.scheduler.placement.fit import NodeFinders, task_on
from shoal.scheduler.placement.packing import needed_shape

KINDS = ("A100", "H100", "H100-1g.10gb")
NODES = st.lists(st.lists(st.sampled_from(KINDS), max_size=4), min_size=1, max_size=4)


@st.composite
def needs(draw: st.DrawFn) -> Need:
    """Only needs that a request can have: a part is of one GPU, and never of a slice."""
    need = Need(draw(st.sampled_from([0, 100, 900])), draw(st.sampled_from([1, None])), 0, 1, None)
    match draw(st.sampled_from(["whole", "part", "slice", "node"])):
        case "part":
            kind = draw(st.sampled_from([None, "A100", "A100|H100"]))
            return need._replace(gpu_kind=kind, gpu_milli=draw(st.sampled_from([10, 330, 500, 990])))
        case "slice":
            return need._replace(gpu_kind="H100-1g.10gb")
        case "node":
            return need._replace(num_gpus=0, is_exclusive=True)
        case _:
            return need._replace(num_gpus=draw(st.integers(0, 2)))


class AllocatedNodes:
    """Nodes, and the tasks that hold parts of them."""

    def __init__(self, kinds: list[list[str]]) -> None:
        self.views = [
            NodeInfo(
                name=f"n{number}",
                cpus=4.0,
                memory_bytes=20,
                gpus=tuple(GpuInfo(index, kind) for index, kind in enumerate(devices)),
            )
            for number, devices in enumerate(kinds)
        ]
        self.capacity = Capacity(self.views)
        self.finders = NodeFinders(self.capacity)
        self.held: list[NodeTask] = []

    def ask(self, need: Need) -> None:
        capacity = self.capacity
        capacity.packing.learn(capacity.shape_counts.profile())
        names = self.finders.of(need).ranked(frozenset(), 1)
        if not names:
            capacity.shape_counts.count(needed_shape(need), 1)
            return
        task = task_on(need, capacity.nodes[names[0]])
        assert len(task.gpu_ids) == (
            len(capacity.nodes[names[0]].view.gpus) if need.is_exclusive else need.num_gpus
        )
        self.held.append(task)
        capacity.take(task, inf)
        assert min(capacity.nodes[task.node].free[:4]) >= 0

    def shrink(self, is_less: bool) -> None:
        """The first node loses half of its capacity, or has it again."""
        view = self.views[0]
        less = msgspec.structs.replace(view, cpus=1.0, memory_bytes=4, gpus=view.gpus[::2])
        self.capacity.set_node(less if is_less else view)

    def check(self) -> None:
        used = self._used()
        assert all(milli <= MILLI for milli in used.values())
        for name, node in self.capacity.nodes.items():
            unused = [gpu for gpu in node.view.gpus if (name, gpu.index) not in used]
            assert sum(count for _, count in node.free.gpus) == len(unused)
            assert all(0 < left < MILLI for _, left in node.free.parts)

    def _used(self) -> Counter[tuple[str, int]]:
        used: Counter[tuple[str, int]] = Counter()
        for task in self.held:
            used.update({(task.node, index): task.gpu_milli for index in task.gpu_ids})
        return used


@settings(max_examples=150)
@given(NODES, st.lists(st.one_of(needs(), st.sampled_from(["end", "shrink", "grow"])), max_size=20))
def test_free_amounts_are_the_capacity_less_what_was_given(
    kinds: list[list[str]], steps: list[Need | str]
) -> None:
    allocated = AllocatedNodes(kinds)
    for step in steps:
        if isinstance(step, Need):
            allocated.ask(step)
        elif step != "end":
            allocated.shrink(step == "shrink")
        elif allocated.held:
            allocated.capacity.give(allocated.held.pop(0), inf)
        allocated.check()
    rebuilt = Capacity(node.view for node in allocated.capacity.nodes.values())
    for task in allocated.held:
        rebuilt.take(task, inf)
    assert {name: node.free for name, node in rebuilt.nodes.items()} == {
        name: node.free for name, node in allocated.capacity.nodes.items()
    }
