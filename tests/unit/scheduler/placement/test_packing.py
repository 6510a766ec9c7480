"""What placements cost other jobs, and which shapes are typical, on nodes small enough to follow by hand."""

from __future__ import annotations

from shoal.scheduler.facts.amounts import Need, NodeResources
from shoal.scheduler.placement.packing import Packing, RequestShape, ShapeCounts, free_layout

WHOLE = RequestShape(1000, 1, 1000)
HALF = RequestShape(1000, 1, 500)
NEED_HALF = Need(1000, 0, 0, 1, None, 500)


def free(num_gpus: int, *parts: int, millicpus: int = 8000) -> NodeResources:
    return NodeResources(
        millicpus, 100, 0, num_gpus, (("A100", num_gpus),), tuple(("A100", left) for left in parts)
    )


def losses(packing: Packing, *nodes: NodeResources) -> list[int]:
    return packing.losses(NEED_HALF, nodes, [free_layout(node) for node in nodes])


def learned(*shapes: RequestShape) -> Packing:
    shape_counts, packing = ShapeCounts(), Packing()
    for shape in shapes:
        shape_counts.count(shape, 1)
    packing.learn(shape_counts.profile())
    return packing


def test_a_half_costs_least_beside_a_half() -> None:
    beside, alone = losses(learned(HALF, WHOLE), free(1, 500), free(2))
    assert 0 < beside < alone


def test_gpus_without_cpus_cost_nothing() -> None:
    stranded, usable = losses(learned(HALF, WHOLE), free(1, millicpus=0), free(1, millicpus=2000))
    assert stranded == 0 < usable


def test_every_placement_costs_zero_if_no_job_shares_gpus() -> None:
    assert losses(learned(WHOLE), free(1, 500), free(2)) == [0, 0]


def test_a_node_that_shrank_under_its_holdings_is_worth_nothing() -> None:
    assert losses(learned(HALF), free(0, millicpus=-3000)) == [0]


def test_one_more_of_a_common_shape_changes_no_profile() -> None:
    shape_counts = ShapeCounts()
    shape_counts.count(HALF, 20)
    before = shape_counts.profile()
    shape_counts.count(HALF, 1)
    shape_counts.count(RequestShape(1000, 0, 1000), 5)
    assert shape_counts.profile() == before
    shape_counts.count(HALF, 50)
    assert shape_counts.profile() != before


def test_removed_shapes_leave_no_counts() -> None:
    shape_counts = ShapeCounts()
    shape_counts.count(HALF, 2)
    shape_counts.count(HALF, -2)
    assert shape_counts.profile() == ()
