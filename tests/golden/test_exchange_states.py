"""The documented states of an exchange are those that the code has. `SHOAL_GOLDEN=write` renews the page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.serving.exchange.states import ExchangeState
from shoal.serving.exchange.table import TABLE
from tests.support.serving.exchange_page import render_page
from tests.support.serving.exchange_walk import Move, all_moves

PAGE = Path(__file__).parents[2] / "docs" / "inside" / "exchange-states.md"


@pytest.fixture(scope="module")
def moves() -> list[Move]:
    return all_moves()


def test_the_page_is_up_to_date(moves: list[Move]) -> None:
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.write_text(render_page(moves), encoding="utf-8")
    assert render_page(moves) == PAGE.read_text(encoding="utf-8")


def test_every_state_can_be_reached_and_only_the_last_is_final(moves: list[Move]) -> None:
    assert {move.next_state for move in moves} | {ExchangeState.READING} == set(ExchangeState)
    left = {move.state for move in moves if move.next_state is not move.state}
    assert left == set(ExchangeState) - {ExchangeState.ENDED}


def test_the_walk_tries_every_move_of_the_table(moves: list[Move]) -> None:
    tried = {(move.state, move.event) for move in moves}
    assert {key for key, handler in TABLE.items() if handler is not None} - tried == set()
