"""Which ranks start again in place, by how they ended and how long they had lived."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from shoal.runtime.supervisor.endings import Ending
from shoal.runtime.supervisor.restarts import LIVED_AGAIN_S, LIVED_S, OTHERS_FAILED, Restarts
from shoal.wire import MAX_EARLY_ENDS, EndKind, TaskSpec
from tests.support.runtime.tasks import a_task_spec

EXITED = Ending(kind=EndKind.EXITED, exit_code=1, rank=0)
RENEWER: Any = object()


def of_signal(number: int) -> Ending:
    return Ending(kind=EndKind.SIGNALED, signal=number, rank=0)


def of_one_node(**task_spec: Any) -> Restarts:
    return restarts_of(a_task_spec(**{"max_restarts": 9, **task_spec}), None)


def of_two_nodes() -> Restarts:
    return restarts_of(a_task_spec(nodes=("node-1", "node-2"), max_restarts=9), RENEWER)


def restarts_of(task_spec: TaskSpec, renewer: Any) -> Restarts:
    return Restarts(task_spec.identity, task_spec.ranks, renewer)


def again(restarts: Restarts) -> None:
    """Start the next group."""
    restarts.rendezvous = type(restarts.rendezvous)(number=restarts.rendezvous.number + 1)


@pytest.mark.parametrize("end", [EXITED, of_signal(signal.SIGSEGV), of_signal(signal.SIGABRT)])
def test_program_that_ends_itself_at_once_is_not_started_again_in_place(end: Ending) -> None:
    assert not of_one_node().may_follow(end, LIVED_S - 1, has_stepped=False)
    assert of_one_node().may_follow(end, LIVED_S + 1, has_stepped=False)
    assert of_one_node().may_follow(end, LIVED_S - 1, has_stepped=True), "a step shows that the program works"


def test_program_that_ends_itself_again_after_a_restart_is_given_up_sooner() -> None:
    """A restart has not helped it. A program that fails after 7 s would use all retries without a pause."""
    restarts = of_one_node()
    assert restarts.may_follow(EXITED, 7.0, has_stepped=False)
    again(restarts)
    assert not restarts.may_follow(EXITED, 7.0, has_stepped=False)
    assert restarts.may_follow(EXITED, LIVED_AGAIN_S + 1, has_stepped=False)


def test_attempt_after_a_failed_one_gives_up_as_early() -> None:
    assert not of_one_node(epoch=2).may_follow(EXITED, 7.0, has_stepped=False)


def test_killed_ranks_are_started_again_a_few_times() -> None:
    restarts = of_one_node()
    killed = of_signal(signal.SIGKILL)
    for _ in range(MAX_EARLY_ENDS):
        assert restarts.may_follow(killed, 0.1, has_stepped=False)
    assert not restarts.may_follow(killed, 0.1, has_stepped=False)
    assert restarts.may_follow(killed, 30.0, has_stepped=False), "a group that lived starts the count again"


def test_groups_that_end_early_count_whichever_node_failed_first() -> None:
    restarts = of_two_nodes()
    assert restarts.may_follow(OTHERS_FAILED, 0.1, has_stepped=False)
    assert (restarts.num_early, restarts.gives_up) == (1, False)
    assert restarts.may_follow(EXITED, 0.1, has_stepped=False), "the control plane decides"
    assert (restarts.num_early, restarts.gives_up) == (2, True)
