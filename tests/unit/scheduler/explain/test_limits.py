"""What people read when a project's quota or limit keeps their job waiting."""

from __future__ import annotations

import pytest

from shoal.model.people import DeviceAmounts
from shoal.scheduler import WaitReason
from shoal.scheduler.explain.limits import explain_refusal, refusal_sentence
from shoal.scheduler.facts.amounts import DeviceAmount, ProjectInfo
from shoal.scheduler.order.project_tree import ProjectTree, QuotaRefusal
from tests.support.clusters import candidate, request

TREE = (
    ProjectInfo(name="research", limit=DeviceAmounts(gpus=16)),
    ProjectInfo(name="vision", parent="research", quota=DeviceAmounts(gpus=4), borrow=DeviceAmounts(gpus=4)),
    ProjectInfo(
        name="speech",
        parent="research",
        quota=DeviceAmounts(gpus=4, cpus=32.0),
        borrow=DeviceAmounts(cpus=0.0),
    ),
)


def refusal(project: str, requested: DeviceAmount, **held: DeviceAmount) -> QuotaRefusal:
    tree = ProjectTree(TREE)
    for name, amount in held.items():
        tree.take(name, amount)
    quota_refusal = tree.refusal(project, requested)
    assert quota_refusal is not None
    return quota_refusal


@pytest.mark.parametrize(
    "quota_refusal, sentence",
    [
        (
            refusal("vision", DeviceAmount(2_000, 0), vision=DeviceAmount(7_000, 0)),
            "needs 2 GPUs; project `vision` holds 7 of 8: its quota of 4, and 4 that it may borrow",
        ),
        (
            refusal("vision", DeviceAmount(1_000, 0), speech=DeviceAmount(16_000, 0)),
            "needs 1 GPU; project `research`, which `vision` is part of, holds 16 of its limit of 16",
        ),
        (
            refusal("speech", DeviceAmount(0, 500), speech=DeviceAmount(0, 31_600)),
            "needs 0.5 CPUs; project `speech` holds 31.6 of the 32 of its quota, and may borrow none",
        ),
        (
            refusal("speech", DeviceAmount(17_000, 0)),
            "needs 17 GPUs; project `research`, which `speech` is part of, may have at most 16, its limit",
        ),
        (
            refusal("vision", DeviceAmount(9_000, 0)),
            "needs 9 GPUs; project `vision` may have at most 8: its quota of 4, and 4 that it may borrow",
        ),
    ],
)
def test_a_refusal_names_the_ceiling_and_what_is_held(quota_refusal: QuotaRefusal, sentence: str) -> None:
    assert refusal_sentence(quota_refusal) == sentence


def test_a_refusal_explanation_has_the_numbers_and_a_command() -> None:
    waiting = candidate(1, request(gpus=2))
    explanation = explain_refusal(
        waiting, refusal("vision", DeviceAmount(2_000, 0), vision=DeviceAmount(7_000, 0))
    )
    assert (explanation.attempt_id, explanation.job_id, explanation.why) == (
        waiting.attempt_id,
        waiting.job_id,
        WaitReason.QUOTA,
    )
    assert explanation.facts == {
        "project": "vision",
        "device": "gpus",
        "asked": 2,
        "in_use": 7,
        "limit": None,
        "quota": 4,
        "borrow": 4,
    }
    assert explanation.hint is not None
    assert explanation.hint.endswith("`shoal project show vision`")


def test_a_limit_refusal_differs_from_a_quota_refusal_and_names_no_sibling() -> None:
    explanation = explain_refusal(
        candidate(1, request(gpus=2)),
        refusal("vision", DeviceAmount(1_000, 0), speech=DeviceAmount(16_000, 0)),
    )
    assert explanation.why is WaitReason.LIMIT
    assert "speech" not in explanation.sentence


def test_refusal_shows_cpus_in_whole_units() -> None:
    explanation = explain_refusal(
        candidate(1, request(gpus=2)), refusal("speech", DeviceAmount(0, 500), speech=DeviceAmount(0, 31_600))
    )
    assert (explanation.facts["asked"], explanation.facts["in_use"], explanation.facts["quota"]) == (
        0.5,
        31.6,
        32.0,
    )
