"""The proof of a reply covers everything that a supervisor obeys, in a version that it knows."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest

from shoal.proof import VERSION, is_proven, prove
from shoal.wire import DrillAct, DrillCommand, Renewal, RenewalReply, TaskPhase

OLD = Renewal(attempt_id="att_1", epoch=1, node="n1", phase=TaskPhase.RUNNING, nonce="once")
RENEWAL = msgspec.structs.replace(OLD, proof_version=VERSION)
DRILL = DrillCommand(drill_id="drl_1", act=DrillAct.KILL_RANK, rank=1, for_s=2.0, rendezvous_round=3)


def test_supervisor_with_proof_version_1_accepts_the_reply() -> None:
    answer = prove("key", OLD, RenewalReply(rendezvous_round=3, master_port=29500, drill=DRILL))
    question = ("att_1", 1, "n1", "once")
    drill = {"drill_id": "drl_1", "act": "kill_rank", "rank": 1, "for_s": 2.0}
    text = msgspec.json.encode(("shoal-renewal", *question, False, False, 30.0, "", 3, 29500, drill))
    assert answer.proof == hmac.new(b"key", text, hashlib.sha256).hexdigest()


CHANGES: list[dict[str, object]] = [
    {"drill_id": "drl_2"},
    {"act": DrillAct.KILL_NODE},
    {"rank": 0},
    {"for_s": 9.0},
    {"rendezvous_round": 4},
    {"rendezvous_round": None},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_drill_that_was_changed_in_transit_is_refused(changes: dict[str, object]) -> None:
    answer = prove("key", RENEWAL, RenewalReply(drill=DRILL))
    assert is_proven("key", RENEWAL, answer)
    changed = msgspec.structs.replace(DRILL, **changes)
    assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, drill=changed))


@pytest.mark.parametrize("should_sleep", [True, False, None])
def test_sleep_request_that_was_changed_in_transit_is_refused(should_sleep: bool | None) -> None:
    answer = prove("key", RENEWAL, RenewalReply(should_sleep=should_sleep))
    assert is_proven("key", RENEWAL, answer)
    for other in {True, False, None} - {should_sleep}:
        assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, should_sleep=other))


OTHERS: dict[str, object] = {
    "should_stop": True,
    "grace_s": 1.0,
    "because": "so",
    "is_stale": True,
    "rendezvous_round": 1,
    "master_port": 1,
    "is_after_hang": True,
    "drill": DRILL,
    "should_sleep": False,
    "control_urls": ("http://127.0.0.1:1",),
    "proof": "",
}


@pytest.mark.parametrize("field", RenewalReply.__struct_fields__)
def test_every_field_of_an_answer_is_covered_by_its_proof(field: str) -> None:
    answer = prove("key", RENEWAL, RenewalReply())
    assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, **{field: OTHERS[field]}))


def test_every_field_of_a_drill_is_covered_by_the_proof() -> None:
    assert {name for change in CHANGES for name in change} == set(DrillCommand.__struct_fields__)


def test_reply_with_an_older_proof_is_accepted_for_the_fields_that_it_covers() -> None:
    answer = prove("key", OLD, RenewalReply(rendezvous_round=3))
    assert is_proven("key", RENEWAL, answer)
    for field in ("is_after_hang", "drill", "control_urls"):
        assert not is_proven("key", RENEWAL, msgspec.structs.replace(answer, **{field: OTHERS[field]}))
    order = msgspec.structs.replace(DRILL, rendezvous_round=None)
    reply = prove("key", OLD, RenewalReply(drill=order))
    assert is_proven("key", RENEWAL, reply)
    assert not is_proven("key", RENEWAL, msgspec.structs.replace(reply, drill=DRILL))


def test_control_plane_that_is_older_than_a_proof_that_is_asked_for_gives_its_newest() -> None:
    newer = msgspec.structs.replace(RENEWAL, proof_version=VERSION + 1)
    assert is_proven("key", RENEWAL, prove("key", newer, RenewalReply(drill=DRILL)))


def test_supervisor_with_proof_version_2_gets_no_control_urls() -> None:
    older = msgspec.structs.replace(OLD, proof_version=2)
    answer = prove(
        "key", older, RenewalReply(rendezvous_round=3, is_after_hang=True, control_urls=("http://a",))
    )
    assert answer.control_urls == ()
    question = ("att_1", 1, "n1", "once")
    text = msgspec.json.encode(("shoal-renewal-2", *question, False, False, 30.0, "", 3, None, True))
    assert answer.proof == hmac.new(b"key", text, hashlib.sha256).hexdigest()
