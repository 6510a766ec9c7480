"""Decisions too large for one event are recorded in several, and can be read again."""

from __future__ import annotations

import msgspec
import pytest

from shoal.cli.event_text import describe_event
from shoal.control.loops.decision import split_lists
from shoal.sim.history.facts import RecordedDecision, facts_of
from shoal.sim.history.replay import DecisionReplay
from shoal.store import EventFilter
from tests.support.planes.bench import ControlPlaneLab

LARGE = {
    "starts": [{"on": f"n{n}"} for n in range(500)],
    "stamps": {f"att_{n}": [1.5, n] for n in range(500)},
}


def test_decision_that_fits_is_one_part() -> None:
    assert split_lists(LARGE, 1 << 20) == [LARGE]


def test_parts_keep_their_size_and_add_up_to_the_input() -> None:
    parts = split_lists(LARGE, 2000)
    assert len(parts) > 5
    assert all(len(msgspec.json.encode(part)) <= 2000 for part in parts)
    assert [start for part in parts for start in part["starts"]] == LARGE["starts"]
    assert {attempt_id: stamp for part in parts for attempt_id, stamp in part["stamps"].items()} == LARGE[
        "stamps"
    ]


def test_an_entry_that_is_too_large_has_a_part_for_itself() -> None:
    parts = split_lists({"starts": ["a", "b" * 3000, "c"]}, 2000)
    assert [part["starts"] for part in parts] == [["a"], ["b" * 3000], ["c"]]


def test_decision_in_several_events_is_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.loops.decision.MAX_EVENT_BYTES", 1024)
    lab = ControlPlaneLab(num_nodes=2)
    lab.heal()
    for _ in range(40):
        lab.submit(resources={"cpus": 1})
    lab.place()
    events = msgspec.to_builtins(lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30)))
    plans = [event for event in events if event["kind"].startswith("plan.")]
    assert len(plans) > 3
    assert all(len(msgspec.json.encode(event["data"])) <= 1024 + 100 for event in plans)
    assert describe_event(plans[0]) == "plan, a part of the next event"
    assert describe_event(plans[-1]) == "plan made: 16 placed, 24 waiting"
    (decision,) = [fact for _, fact in facts_of(events) if isinstance(fact, RecordedDecision)]
    assert len(decision.placed) == 16
    assert len(decision.stamps) == 40
    assert all(verdict.is_equal for verdict in DecisionReplay().verdicts(facts_of(events)))
