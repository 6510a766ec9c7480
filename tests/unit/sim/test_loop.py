"""The simulation loop: what a decider sees, and what the loop refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.errors import Bug
from shoal.sim.loop import EventBatching, GpuNodes, Processors, SimulationState, simulate
from tests.support.sim_jobs import trace_job

Seen = tuple[float, list[int], list[int]]


class Eager:
    """Starts every job that fits, in order of arrival, and records what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.releases: list[list[tuple[float, int]]] = []

    def decide(self, state: SimulationState[Processors]) -> Iterator[tuple[int, None]]:
        self.seen.append((state.now, list(state.arrived), list(state.ended)))
        for index, one in list(state.waiting.items()):
            if one.num_processors <= state.machine.free:
                yield index, None
        self.releases.append(list(state.releases))


def test_all_events_of_an_instant_are_one_decision() -> None:
    decider = Eager()
    schedule = simulate([trace_job(0, 5), trace_job(5, 1), trace_job(5, 1)], Processors(1), decider)
    assert decider.seen == [(0, [0], []), (5, [1, 2], [0]), (6, [], [1]), (7, [], [2])]
    assert schedule.starts == [0, 5, 6]


def test_one_by_one_arrivals_come_before_ends_of_the_same_instant() -> None:
    decider = Eager()
    simulate(
        [trace_job(0, 5), trace_job(5, 1), trace_job(5, 1)],
        Processors(1),
        decider,
        events=EventBatching.ONE_BY_ONE,
    )
    assert decider.seen[:4] == [(0, [0], []), (5, [1], []), (5, [2], []), (5, [], [0])]


def test_a_decider_sees_its_own_starts_and_expected_ends_not_true_ones() -> None:
    decider = Eager()
    simulate(
        [trace_job(0, 5, limit_s=100), trace_job(0, 8, limit_s=20), trace_job(0, 1)], Processors(2), decider
    )
    assert decider.releases[0] == [(20, 1), (100, 0)]


def test_a_start_that_does_not_fit_is_a_bug() -> None:
    class Greedy:
        def decide(self, state: SimulationState[Processors]) -> list[tuple[int, None]]:
            return [(index, None) for index in state.waiting]

    with pytest.raises(Bug, match="3 processors; 2 are free"):
        simulate([trace_job(0, 5, 3)], Processors(2), Greedy())


def test_a_start_of_a_job_that_does_not_wait_is_a_bug() -> None:
    class Twice:
        def decide(self, state: SimulationState[Processors]) -> list[tuple[int, None]]:
            return [(0, None), (0, None)]

    with pytest.raises(Bug, match="does not wait"):
        simulate([trace_job(0, 5)], Processors(2), Twice())


def test_a_job_left_for_ever_is_a_bug() -> None:
    with pytest.raises(Bug, match="1 jobs never start"):
        simulate([trace_job(0, 5, 3)], Processors(2), Eager())


def test_a_trace_out_of_order_is_a_bug() -> None:
    with pytest.raises(Bug, match="sort the trace first"):
        simulate([trace_job(5, 1), trace_job(0, 1)], Processors(2), Eager())


def test_nodes_refuse_more_gpus_than_they_have_free() -> None:
    machine = GpuNodes([8, 8])
    machine.take(trace_job(0, 1, gpus=6), [(0, 6)])
    with pytest.raises(Bug, match="4 GPUs of node 0; 2 are free"):
        machine.take(trace_job(0, 1, gpus=4), [(0, 4)])
    with pytest.raises(Bug, match="asks for 4 GPUs"):
        machine.take(trace_job(0, 1, gpus=4), [(1, 2)])
    machine.give(trace_job(0, 1, gpus=6), [(0, 6)])
    assert machine.free == [8, 8]
