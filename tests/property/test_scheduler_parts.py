"""Whatever parts, slices and whole nodes are asked for, nothing is given twice and what is left is known."""

from __future__ import annotations

from collections import Counter
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Need
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.fit import Finders, share_of
from shoal.scheduler.snapshot import GpuView, NodeView
from shoal.scheduler.typical import shape_asked

KINDS = ("A100", "H100", "H100-1g.10gb")
NODES = st.lists(st.lists(st.sampled_from(KINDS), max_size=4), min_size=1, max_size=4)
NEEDS = st.one_of(
    st.builds(Need, st.sampled_from([100, 900]), st.just(1), st.just(0), st.integers(0, 2), st.none()),
    st.builds(
        Need,
        st.sampled_from([100, 900]),
        st.just(1),
        st.just(0),
        st.just(1),
        st.sampled_from([None, "A100", "A100|H100"]),
        st.sampled_from([10, 330, 500, 990]),
    ),
    st.builds(Need, st.just(500), st.just(1), st.just(0), st.just(1), st.just("H100-1g.10gb")),
    st.just(Need(100, 1, 0, 0, None, is_exclusive=True)),
)


@given(NODES, st.lists(st.tuples(NEEDS, st.booleans()), max_size=20))
def test_what_is_free_is_what_was_not_given(kinds: list[list[str]], asked: list[tuple[Need, bool]]) -> None:
    views = [
        NodeView(
            name=f"n{number}",
            cpus=4.0,
            memory_bytes=20,
            gpus=tuple(GpuView(index, kind) for index, kind in enumerate(devices)),
        )
        for number, devices in enumerate(kinds)
    ]
    capacity = Capacity(views)
    finders = Finders(capacity)
    held: list[NodeShare] = []
    for need, should_end in asked:
        capacity.packing.learn(capacity.typical.profile())
        names = finders.of(need).ranked(frozenset(), 1)
        if names:
            share = share_of(need, capacity.nodes[names[0]])
            assert len(share.gpu_ids) >= need.num_gpus
            held.append(share)
            capacity.take(share, inf)
        else:
            capacity.typical.count(shape_asked(need), 1)
        if should_end and held:
            capacity.give(held.pop(0), inf)
        _check(views, held, capacity)
    rebuilt = Capacity(views)
    for share in held:
        rebuilt.take(share, inf)
    assert {name: node.free for name, node in rebuilt.nodes.items()} == {
        name: node.free for name, node in capacity.nodes.items()
    }


def _check(views: list[NodeView], held: list[NodeShare], capacity: Capacity) -> None:
    for view in views:
        here = [share for share in held if share.node == view.name]
        used: Counter[int] = Counter()
        for share in here:
            used.update(dict.fromkeys(share.gpu_ids, share.gpu_milli))
        assert all(milli <= 1000 for milli in used.values())
        assert round(sum(share.cpus for share in here), 6) <= view.cpus
        free = capacity.nodes[view.name].free
        assert sum(count for _, count in free.gpus) == len(view.gpus) - len(used)
        assert min(free[:3]) >= 0
