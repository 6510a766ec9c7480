"""Whatever parts, slices and whole nodes are asked for, nothing is given twice and what is left is known."""

from __future__ import annotations

from collections import Counter
from math import inf

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import MILLI, Need
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.fit import Finders, share_of
from shoal.scheduler.snapshot import GpuView, NodeView
from shoal.scheduler.typical import shape_asked

KINDS = ("A100", "H100", "H100-1g.10gb")
NODES = st.lists(st.lists(st.sampled_from(KINDS), max_size=4), min_size=1, max_size=4)


@st.composite
def needs(draw: st.DrawFn) -> Need:
    """Such as a request can be: a part is of one GPU, and never of a slice."""
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


class Given:
    """Nodes, and what was given of them."""

    def __init__(self, kinds: list[list[str]]) -> None:
        self.views = [
            NodeView(
                name=f"n{number}",
                cpus=4.0,
                memory_bytes=20,
                gpus=tuple(GpuView(index, kind) for index, kind in enumerate(devices)),
            )
            for number, devices in enumerate(kinds)
        ]
        self.capacity = Capacity(self.views)
        self.finders = Finders(self.capacity)
        self.held: list[NodeShare] = []

    def ask(self, need: Need) -> None:
        capacity = self.capacity
        capacity.packing.learn(capacity.typical.profile())
        names = self.finders.of(need).ranked(frozenset(), 1)
        if not names:
            capacity.typical.count(shape_asked(need), 1)
            return
        share = share_of(need, capacity.nodes[names[0]])
        assert len(share.gpu_ids) == (
            len(capacity.nodes[names[0]].view.gpus) if need.is_exclusive else need.num_gpus
        )
        self.held.append(share)
        capacity.take(share, inf)
        assert min(capacity.nodes[share.node].free[:4]) >= 0

    def shrink(self, is_less: bool) -> None:
        """The first node loses half of what it had, or has it again."""
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
        for share in self.held:
            used.update({(share.node, index): share.gpu_milli for index in share.gpu_ids})
        return used


@settings(max_examples=150)
@given(NODES, st.lists(st.one_of(needs(), st.sampled_from(["end", "shrink", "grow"])), max_size=20))
def test_what_is_free_is_what_was_not_given(kinds: list[list[str]], steps: list[Need | str]) -> None:
    given = Given(kinds)
    for step in steps:
        if isinstance(step, Need):
            given.ask(step)
        elif step != "end":
            given.shrink(step == "shrink")
        elif given.held:
            given.capacity.give(given.held.pop(0), inf)
        given.check()
    rebuilt = Capacity(node.view for node in given.capacity.nodes.values())
    for share in given.held:
        rebuilt.take(share, inf)
    assert {name: node.free for name, node in rebuilt.nodes.items()} == {
        name: node.free for name, node in given.capacity.nodes.items()
    }
