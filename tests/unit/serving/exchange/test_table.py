"""A request in the data plane, in every state, under every event: nothing is lost or done twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import shoal.serving
from shoal.serving.exchange.states import ExchangeEnd, ExchangeEvent, ExchangeState
from shoal.serving.exchange.table import ROWS, TABLE
from tests.support.serving.exchange_walk import (
    SITUATIONS,
    Situation,
    Visit,
    Walker,
    follow,
    new_replica,
    walk,
)

EACH_SITUATION = pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.title)


def test_table_names_every_event_in_every_state() -> None:
    assert list(TABLE) == list(product(ExchangeState, ExchangeEvent))


def test_only_one_place_changes_the_state() -> None:
    folder = Path(shoal.serving.__file__).parent / "exchange"
    assigned = [
        f"{file.name}: {ast.unparse(target)}"
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr in {"state", "_row"}
    ]
    assert set(assigned) == {"exchange.py: self.state", "exchange.py: self._row"}


def outstanding(walker: Walker) -> int:
    return sum(replica.outstanding for replica in walker.service.replicas.values())


def check_open(walker: Walker) -> None:
    exchange, hedge = walker.exchange, walker.exchange.hedge
    num_slots = (exchange.slot is not None) + (hedge is not None and hedge._slot is not None)
    num_wanted = num_slots + (exchange.state is ExchangeState.QUEUED)
    assert outstanding(walker) + walker.service.waiting.count == num_wanted + walker.num_rivals
    assert (exchange.account.admitted, exchange.account.bound) == (1, num_slots)
    assert walker.client.ends == []


def check_given_back(walker: Walker) -> None:
    exchange = walker.exchange
    assert outstanding(walker) + walker.service.waiting.count == walker.num_rivals
    assert (exchange.account.admitted, exchange.account.bound) == (0, 0)
    assert list(exchange.account.waiting) == []
    assert walker.client.held.bytes == 0
    assert (exchange.slot, exchange.up) == (None, None)


def check_ended(walker: Walker) -> None:
    check_given_back(walker)
    replicas = walker.service.replicas.values()
    tallies = {id(tally): tally for tally in walker.service.tallies.values()}
    tallies |= {id(replica.tally): replica.tally for replica in replicas}
    assert sum(tally.requests for tally in tallies.values()) == 1
    is_told = walker.exchange.how_ended is not ExchangeEnd.CALLER_GONE
    assert len(walker.client.ends) == is_told


def check_sent(walker: Walker) -> None:
    """A request that may have had an effect is sent once; another at most once more, and once as a hedge."""
    num_sent = sum(bool(transport.sent) for transport in walker.sent)
    assert num_sent <= (3 if walker.exchange.entry.is_safe else 1)


@EACH_SITUATION
async def test_everything_is_given_back_once_the_caller_learns_once_and_no_effect_happens_twice(
    situation: Situation,
) -> None:
    for visit in walk(situation):
        is_ended = visit.walker.exchange.state is ExchangeState.ENDED
        try:
            (check_ended if is_ended else check_open)(visit.walker)
            check_sent(visit.walker)
        except AssertionError:
            print([f"{step.event} {step.title}" for step in visit.path])
            raise


def first_of_each_state(situation: Situation) -> Iterator[Visit]:
    seen = set()
    for visit in walk(situation):
        state = visit.walker.exchange.state
        if state not in seen:
            seen.add(state)
            yield visit


@EACH_SITUATION
async def test_event_that_cannot_come_closes_everything_and_is_reported(
    situation: Situation, impossible_moves: list[str]
) -> None:
    for visit in first_of_each_state(situation):
        state = visit.walker.exchange.state
        for event in ExchangeEvent:
            if TABLE[state, event] is not None:
                continue
            walker = follow(situation, visit.path)
            late = walker.connection(new_replica())
            ROWS[state][event](walker.exchange, late)
            [report] = impossible_moves
            impossible_moves.clear()
            assert f"`{state}`" in report
            assert f"`{event}`" in report
            assert walker.client.ends[-1] == "abort"
            check_given_back(walker)
            assert late.transport.is_closing()
