"""The documented diagram of an attempt's states is the one the code has. `SHOAL_GOLDEN=write` renews it."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.model.attempt import AttemptState
from shoal.model.diagram import all_moves, render_page
from shoal.model.moves import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "inside" / "attempt-states.md"


def test_the_page_is_up_to_date() -> None:
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(render_page(), encoding="utf-8")
    assert render_page() == PAGE.read_text(encoding="utf-8")


def test_every_state_can_be_reached_and_only_the_last_is_final() -> None:
    reached = {move.next_state for move in all_moves()} | {AttemptState.QUEUED}
    assert reached == set(AttemptState)
    left = {move.state for move in all_moves() if move.next_state is not move.state}
    assert left == set(AttemptState) - {AttemptState.ENDED}


def test_no_move_is_shown_that_the_table_forbids() -> None:
    assert all(TABLE[move.state, move.event] is not None for move in all_moves())
