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


def test_a_half_leaves_the_only_node_that_a_large_job_fits_on() -> None:
    """A half costs more on an empty node of eight GPUs than on a node where one of eight is in use."""
    large = RequestShape(8000, 8, 1000)
    whole, broken = losses(learned(HALF, large), free(8, millicpus=64_000), free(7, millicpus=64_000))
    assert 0 < broken < whole


def cost_of(need: Need, node: NodeResources, *shapes: RequestShape) -> int:
    return learned(*shapes).losses(need, [node], [free_layout(node)])[0]


def test_whole_gpu_costs_other_jobs_something_unless_its_node_has_no_cpus_left() -> None:
    need = Need(0, 0, 0, 1, None)
    assert cost_of(need, free(2), HALF, WHOLE) > 0
    assert cost_of(need, free(2, millicpus=0), HALF, WHOLE) == 0


def test_whole_node_costs_all_that_is_free_on_it() -> None:
    both = free(2, 500)
    need = Need(1000, 0, 0, 1, None, is_exclusive=True)
    assert cost_of(need, both, HALF, WHOLE) > cost_of(Need(1000, 0, 0, 2, None), both, HALF, WHOLE)


def test_mig_slice_costs_no_whole_gpu() -> None:
    assert cost_of(Need(0, 0, 0, 1, "A100-1g.5gb"), free(2), HALF, WHOLE) == 0


def test_part_of_a_named_kind_is_taken_from_that_kind() -> None:
    """A half of the H100 is left. The A100 has none, so an A100 job breaks a new GPU, which costs more."""
    node = NodeResources(8000, 100, 0, 1, (("A100", 1),), (("H100", 500),))
    on_h100 = cost_of(NEED_HALF._replace(gpu_kind="H100"), node, HALF, WHOLE)
    assert 0 < on_h100 < cost_of(NEED_HALF._replace(gpu_kind="A100"), node, HALF, WHOLE)
