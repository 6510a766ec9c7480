"""What placements cost others, and what is typical, on nodes small enough to follow by hand."""

from __future__ import annotations

from shoal.scheduler.amounts import Amounts, Need
from shoal.scheduler.packing import Packing, look_of
from shoal.scheduler.typical import Shape, Typical

WHOLE = Shape(1000, 1, 1000)
HALF = Shape(1000, 1, 500)
NEED_HALF = Need(1000, 0, 0, 1, None, 500)


def free(num_gpus: int, *parts: int, millicpus: int = 8000) -> Amounts:
    return Amounts(
        millicpus, 100, 0, num_gpus, (("A100", num_gpus),), tuple(("A100", left) for left in parts)
    )


def losses(packing: Packing, *nodes: Amounts) -> list[int]:
    return packing.losses(NEED_HALF, nodes, [look_of(node) for node in nodes])


def learned(*shapes: Shape) -> Packing:
    typical, packing = Typical(), Packing()
    for shape in shapes:
        typical.count(shape, 1)
    packing.learn(typical.profile())
    return packing


def test_a_half_costs_least_beside_a_half() -> None:
    beside, alone = losses(learned(HALF, WHOLE), free(1, 500), free(2))
    assert 0 < beside < alone


def test_what_cannot_be_used_for_lack_of_cpus_costs_nothing() -> None:
    stranded, usable = losses(learned(HALF, WHOLE), free(1, millicpus=0), free(1, millicpus=2000))
    assert stranded == 0 < usable


def test_nothing_costs_anything_where_nobody_shares() -> None:
    assert losses(learned(WHOLE), free(1, 500), free(2)) == [0, 0]


def test_a_node_that_shrank_under_its_holdings_is_worth_nothing() -> None:
    assert losses(learned(HALF), free(0, millicpus=-3000)) == [0]


def test_one_more_of_a_common_shape_changes_no_profile() -> None:
    typical = Typical()
    typical.count(HALF, 20)
    before = typical.profile()
    typical.count(HALF, 1)
    typical.count(Shape(1000, 0, 1000), 5)
    assert typical.profile() == before
    typical.count(HALF, 50)
    assert typical.profile() != before


def test_shapes_that_are_gone_leave_nothing_behind() -> None:
    typical = Typical()
    typical.count(HALF, 2)
    typical.count(HALF, -2)
    assert typical.profile() == ()
