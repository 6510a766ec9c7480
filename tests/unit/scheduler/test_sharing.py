"""What people read when a project's quota or limit keeps their job waiting."""

from __future__ import annotations

import pytest

from shoal.model.people import Devices
from shoal.scheduler import Why
from shoal.scheduler.devices import Amount, ProjectView
from shoal.scheduler.sharing import explain_refusal, sentence
from shoal.scheduler.tree import Refusal, Tree
from tests.support.clusters import job, request

TREE = (
    ProjectView(name="research", limit=Devices(gpus=16)),
    ProjectView(name="vision", parent="research", quota=Devices(gpus=4), borrow=Devices(gpus=4)),
    ProjectView(name="speech", parent="research", quota=Devices(gpus=4, cpus=32.0), borrow=Devices(cpus=0.0)),
)


def refusal(project: str, asked: Amount, **held: Amount) -> Refusal:
    tree = Tree(TREE)
    for name, amount in held.items():
        tree.take(name, amount)
    found = tree.refusal(project, asked)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "found, said",
    [
        (
            refusal("vision", Amount(2_000, 0), vision=Amount(7_000, 0)),
            "needs 2 GPUs; project `vision` holds 7 of 8: its quota of 4, and 4 that it may borrow",
        ),
        (
            refusal("vision", Amount(1_000, 0), speech=Amount(16_000, 0)),
            "needs 1 GPU; project `research`, which `vision` is part of, holds 16 of its limit of 16",
        ),
        (
            refusal("speech", Amount(0, 500), speech=Amount(0, 31_600)),
            "needs 0.5 CPUs; project `speech` holds 31.6 of the 32 of its quota, and may borrow none",
        ),
        (
            refusal("speech", Amount(17_000, 0)),
            "needs 17 GPUs; project `research`, which `speech` is part of, may have at most 16, its limit",
        ),
        (
            refusal("vision", Amount(9_000, 0)),
            "needs 9 GPUs; project `vision` may have at most 8: its quota of 4, and 4 that it may borrow",
        ),
    ],
)
def test_a_refusal_says_whose_ceiling_it_is_and_what_is_held(found: Refusal, said: str) -> None:
    assert sentence(found) == said


def test_an_explanation_carries_the_numbers_and_something_to_type() -> None:
    one = job(1, request(gpus=2))
    told = explain_refusal(one, refusal("vision", Amount(2_000, 0), vision=Amount(7_000, 0)))
    assert (told.attempt_id, told.job_id, told.why) == (one.attempt_id, one.job_id, Why.QUOTA)
    assert told.facts == {
        "project": "vision",
        "device": "gpus",
        "asked": 2,
        "in_use": 7,
        "limit": None,
        "quota": 4,
        "borrow": 4,
    }
    assert told.hint is not None
    assert told.hint.endswith("`shoal project show vision`")


def test_a_limit_is_told_apart_from_a_quota_and_names_no_sibling() -> None:
    told = explain_refusal(
        job(1, request(gpus=2)), refusal("vision", Amount(1_000, 0), speech=Amount(16_000, 0))
    )
    assert told.why is Why.LIMIT
    assert "speech" not in told.sentence


def test_cpus_are_told_whole() -> None:
    told = explain_refusal(
        job(1, request(gpus=2)), refusal("speech", Amount(0, 500), speech=Amount(0, 31_600))
    )
    assert (told.facts["asked"], told.facts["in_use"], told.facts["quota"]) == (0.5, 31.6, 32.0)
