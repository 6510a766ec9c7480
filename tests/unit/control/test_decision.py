"""Decisions too large for one event are written down in several, and come out again."""

from __future__ import annotations

import msgspec
import pytest

from shoal.cli.event_words import told
from shoal.control.decision import split
from shoal.sim.history.facts import Decision, facts_of
from shoal.sim.history.replay import Replay
from shoal.store import EventFilter
from tests.support.lab import Lab

LARGE = {
    "starts": [{"on": f"n{n}"} for n in range(500)],
    "stamps": {f"att_{n}": [1.5, n] for n in range(500)},
}


def test_what_fits_is_one_part() -> None:
    assert split(LARGE, 1 << 20) == [LARGE]


def test_parts_keep_their_size_and_are_together_what_was_given() -> None:
    parts = split(LARGE, 2000)
    assert len(parts) > 5
    assert all(len(msgspec.json.encode(part)) <= 2000 for part in parts)
    assert [start for part in parts for start in part["starts"]] == LARGE["starts"]
    assert {one: stamp for part in parts for one, stamp in part["stamps"].items()} == LARGE["stamps"]


def test_an_entry_that_is_too_large_has_a_part_for_itself() -> None:
    parts = split({"starts": ["a", "b" * 3000, "c"]}, 2000)
    assert [part["starts"] for part in parts] == [["a"], ["b" * 3000], ["c"]]


def test_decision_in_several_events_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.decision.MAX_EVENT_BYTES", 1024)
    lab = Lab(num_nodes=2)
    lab.heal()
    for _ in range(40):
        lab.submit(resources={"cpus": 1})
    lab.place()
    events = msgspec.to_builtins(lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30)))
    plans = [event for event in events if event["kind"].startswith("plan.")]
    assert len(plans) > 3
    assert all(len(msgspec.json.encode(event["data"])) <= 1024 + 100 for event in plans)
    assert told(plans[0]) == "plan, a part of the next event"
    assert told(plans[-1]) == "plan made: 16 placed, 24 waiting"
    (decision,) = [fact for _, fact in facts_of(events) if isinstance(fact, Decision)]
    assert len(decision.placed) == 16
    assert len(decision.stamps) == 40
    assert all(verdict.is_equal for verdict in Replay().verdicts(facts_of(events)))
