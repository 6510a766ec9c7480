"""What proves an answer: everything a supervisor obeys, in words that its own version knows."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest

from shoal.proof import VERSION, is_proven, prove
from shoal.wire import DrillAct, DrillOrder, Phase, Renewal, RenewalAnswer

OLD = Renewal(attempt_id="att_1", epoch=1, node="n1", phase=Phase.RUNNING, nonce="once")
RENEWAL = msgspec.structs.replace(OLD, proof_version=VERSION)
DRILL = DrillOrder(drill_id="drl_1", act=DrillAct.KILL_RANK, rank=1, for_s=2.0, generation=3)


def test_supervisor_that_knows_no_generations_of_drills_takes_the_answer_for_ours() -> None:
    answer = prove("key", OLD, RenewalAnswer(generation=3, master_port=29500, drill=DRILL))
    asked = ("att_1", 1, "n1", "once")
    drill = {"drill_id": "drl_1", "act": "kill_rank", "rank": 1, "for_s": 2.0}
    text = msgspec.json.encode(("shoal-renewal", *asked, False, False, 30.0, "", 3, 29500, drill))
    assert answer.proof == hmac.new(b"key", text, hashlib.sha256).hexdigest()


CHANGES: list[dict[str, object]] = [
    {"drill_id": "drl_2"},
    {"act": DrillAct.KILL_NODE},
    {"rank": 0},
    {"for_s": 9.0},
    {"generation": 4},
    {"generation": None},
]


@pytest.mark.parametrize("changes", CHANGES)
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


OTHERS: dict[str, object] = {
    "should_stop": True,
    "grace_s": 1.0,
    "because": "so",
    "is_stale": True,
    "generation": 1,
    "master_port": 1,
    "is_after_hang": True,
    "drill": DRILL,
    "should_sleep": False,
    "control_urls": ("http://127.0.0.1:1",),
    "proof": "",
}


@pytest.mark.parametrize("field", RenewalAnswer.__struct_fields__)
def test_every_field_of_an_answer_is_covered_by_its_proof(field: str) -> None:
    answer = prove("key", RENEWAL, RenewalAnswer())
    assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, **{field: OTHERS[field]}))


def test_every_field_of_a_drill_is_covered_by_the_proof() -> None:
    assert {name for change in CHANGES for name in change} == set(DrillOrder.__struct_fields__)


def test_answer_of_a_control_plane_that_knows_no_other_proof_counts_for_what_that_covers() -> None:
    answer = prove("key", OLD, RenewalAnswer(generation=3))
    assert is_proven("key", RENEWAL, answer)
    for field in ("is_after_hang", "drill", "control_urls"):
        assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, **{field: OTHERS[field]}))
    order = msgspec.structs.replace(DRILL, generation=None)
    told = prove("key", OLD, RenewalAnswer(drill=order))
    assert is_proven("key", RENEWAL, told)
    assert not is_proven("key", RENEWAL, msgspec.structs.replace(told, drill=DRILL))


def test_control_plane_that_is_older_than_a_proof_that_is_asked_for_gives_its_newest() -> None:
    newer = msgspec.structs.replace(RENEWAL, proof_version=VERSION + 1)
    assert is_proven("key", RENEWAL, prove("key", newer, RenewalAnswer(drill=DRILL)))


def test_supervisor_that_knows_no_other_control_planes_is_told_of_none_and_believes_the_rest() -> None:
    older = msgspec.structs.replace(OLD, proof_version=2)
    answer = prove("key", older, RenewalAnswer(generation=3, is_after_hang=True, control_urls=("http://a",)))
    assert answer.control_urls == ()
    asked = ("att_1", 1, "n1", "once")
    text = msgspec.json.encode(("shoal-renewal-2", *asked, False, False, 30.0, "", 3, None, True))
    assert answer.proof == hmac.new(b"key", text, hashlib.sha256).hexdigest()
