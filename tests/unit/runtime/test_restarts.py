"""Which ranks are started again in place, by how they ended and how long they had lived."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from shoal.runtime.ending import Ending
from shoal.runtime.restarts import LIVED_AGAIN_S, LIVED_S, OTHERS_FAILED, Restarts
from shoal.wire import MAX_EARLY, EndKind
from tests.support.shares import an_order

EXITED = Ending(kind=EndKind.EXITED, exit_code=1, rank=0)
RENEWER: Any = object()


def of_signal(number: int) -> Ending:
    return Ending(kind=EndKind.SIGNALED, signal=number, rank=0)


def of_one_node(**order: Any) -> Restarts:
    return Restarts(an_order(**{"max_restarts": 9, **order}), None)


def of_two_nodes() -> Restarts:
    return Restarts(an_order(nodes=("node-1", "node-2"), max_restarts=9), RENEWER)


def again(restarts: Restarts) -> None:
    """Its next group runs."""
    restarts.generation = type(restarts.generation)(number=restarts.generation.number + 1)


@pytest.mark.parametrize("end", [EXITED, of_signal(signal.SIGSEGV), of_signal(signal.SIGABRT)])
def test_program_that_ends_itself_at_once_is_not_started_again_in_place(end: Ending) -> None:
    assert not of_one_node().may_follow(end, LIVED_S - 1, has_stepped=False)
    assert of_one_node().may_follow(end, LIVED_S + 1, has_stepped=False)
    assert of_one_node().may_follow(end, LIVED_S - 1, has_stepped=True), "a step shows that it works"


def test_program_that_ends_itself_again_after_a_restart_is_given_up_sooner() -> None:
    """A restart has not helped it: one that takes 7 s to fail would burn all retries without a pause."""
    restarts = of_one_node()
    assert restarts.may_follow(EXITED, 7.0, has_stepped=False)
    again(restarts)
    assert not restarts.may_follow(EXITED, 7.0, has_stepped=False)
    assert restarts.may_follow(EXITED, LIVED_AGAIN_S + 1, has_stepped=False)


def test_attempt_after_a_failed_one_gives_up_as_soon() -> None:
    assert not of_one_node(epoch=2).may_follow(EXITED, 7.0, has_stepped=False)


def test_ranks_that_somebody_kills_are_started_again_a_few_times() -> None:
    restarts = of_one_node()
    killed = of_signal(signal.SIGKILL)
    for _ in range(MAX_EARLY):
        assert restarts.may_follow(killed, 0.1, has_stepped=False)
    assert not restarts.may_follow(killed, 0.1, has_stepped=False)
    assert restarts.may_follow(killed, 30.0, has_stepped=False), "one that lived begins the count again"


def test_several_nodes_count_the_groups_that_end_early_whoever_failed_first() -> None:
    restarts = of_two_nodes()
    assert restarts.may_follow(OTHERS_FAILED, 0.1, has_stepped=False)
    assert (restarts.num_early, restarts.gives_up) == (1, False)
    assert restarts.may_follow(EXITED, 0.1, has_stepped=False), "the control plane has the last word"
    assert (restarts.num_early, restarts.gives_up) == (2, True)
