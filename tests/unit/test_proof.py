"""What proves an answer: everything a supervisor obeys, in words that its own version knows."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest

from shoal.proof import is_proven, prove
from shoal.wire import DrillAct, DrillOrder, Phase, Renewal, RenewalAnswer

RENEWAL = Renewal(attempt_id="att_1", epoch=1, node="n1", phase=Phase.RUNNING, nonce="once")
DRILL = DrillOrder(drill_id="drl_1", act=DrillAct.KILL_RANK, rank=1, for_s=2.0, generation=3)


def test_supervisor_that_knows_no_generations_of_drills_takes_the_answer_for_ours() -> None:
    answer = prove("key", RENEWAL, RenewalAnswer(generation=3, master_port=29500, drill=DRILL))
    asked = ("att_1", 1, "n1", "once")
    drill = {"drill_id": "drl_1", "act": "kill_rank", "rank": 1, "for_s": 2.0}
    text = msgspec.json.encode(("shoal-renewal", *asked, False, False, 30.0, "", 3, 29500, drill))
    assert answer.proof == hmac.new(b"key", text, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    "changes", [{"drill_id": "drl_2"}, {"act": DrillAct.KILL_NODE}, {"rank": 0}, {"for_s": 9.0}]
)
def test_order_of_a_drill_that_was_changed_on_the_way_is_nobodys(changes: dict[str, object]) -> None:
    answer = prove("key", RENEWAL, RenewalAnswer(drill=DRILL))
    assert is_proven("key", RENEWAL, answer)
    changed = msgspec.structs.replace(DRILL, **changes)
    assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, drill=changed))


@pytest.mark.parametrize("should_sleep", [True, False, None])
def test_order_to_sleep_that_was_changed_on_the_way_is_nobodys(should_sleep: bool | None) -> None:
    answer = prove("key", RENEWAL, RenewalAnswer(should_sleep=should_sleep))
    assert is_proven("key", RENEWAL, answer)
    for other in {True, False, None} - {should_sleep}:
        assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, should_sleep=other))
