"""What keepers say at the desk, and what of it is kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.desk import Desk
from shoal.errors import StateError
from shoal.runtime import spool
from shoal.wire import MAX_OUTCOME_MESSAGE, EndKind, NodeOutcome
from tests.unit.engines.test_desk_terms import ORDER, desk, fetch, told

END = NodeOutcome(attempt_id="att_1", epoch=1, node="n1", kind=EndKind.SUCCEEDED, ended_at=1_800_000_001.0)


@pytest.fixture
def taken(tmp_path: Path) -> Desk:
    made = desk(tmp_path, 1)
    made.add((ORDER,), None)
    made.take(fetch("one"))
    return made


@pytest.mark.parametrize("wrong", [{"attempt_id": "att_2"}, {"epoch": 2}, {"node": "n2"}, {"incarnation": 1}])
def test_an_outcome_of_another_share_is_refused_and_not_kept(taken: Desk, wrong: dict[str, object]) -> None:
    outcome = msgspec.structs.replace(END, **wrong)
    with pytest.raises(StateError, match="not about the share"):
        taken.hear(msgspec.structs.replace(told("one"), outcome=outcome), b"")
    share = taken.find("att_1")["n1"]
    assert (share.outcome, spool.read_outcome(share.files)) == (None, None)


@pytest.mark.parametrize("wrong", [{"epoch": 2}, {"incarnation": 1}])
def test_a_word_for_another_share_is_refused(taken: Desk, wrong: dict[str, object]) -> None:
    with pytest.raises(StateError, match="not about the share"):
        taken.hear(msgspec.structs.replace(told("one"), **wrong), b"line\n")


def test_an_outcome_says_no_more_than_its_limit(taken: Desk) -> None:
    outcome = msgspec.structs.replace(END, message="x" * (MAX_OUTCOME_MESSAGE + 1))
    assert taken.hear(msgspec.structs.replace(told("one"), outcome=outcome), b"").is_recorded
    kept = spool.read_outcome(taken.find("att_1")["n1"].files)
    assert kept is not None
    assert len(kept.message) == MAX_OUTCOME_MESSAGE
