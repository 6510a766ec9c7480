"""Each source of evidence gives only the evidence that it can have, in every combination of facts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from shoal.engines.base import OBSERVABLE, Observation
from shoal.engines.fake import VirtualClock
from shoal.engines.fake.engine import EVIDENCE
from shoal.engines.fake.task import FakeTaskStage
from shoal.engines.ray.parse import restarted_observation, task_observation, unknown_observation
from shoal.engines.remote.cluster_observation import NO_TRACE, PROVABLE, ClusterObservation, ClusterTaskState
from shoal.engines.remote.mailbox import Mailbox
from shoal.engines.remote.task_observer import HEARD_S, LATE_S, TaskObserver
from shoal.engines.slurm.states import (
    OVER,
    QUEUED,
    RUNNING,
    SUSPENDED,
    UNCONFIRMED_ENDS,
    SlurmJob,
    forgotten_observation,
    job_observation,
)
from shoal.model.evidence import End, Evidence
from tests.unit.engines.remote.test_mailbox_terms import ORDER, fetch, told

SLURM_STATES = sorted({*OVER, *QUEUED, *RUNNING, *SUSPENDED, *UNCONFIRMED_ENDS, "SOMETHING_NEW"})
BOOLS = (False, True)
PROCESS = "a" * 32


@pytest.mark.parametrize("state", SLURM_STATES)
def test_slurm_proves_an_end_only_by_a_restart_or_a_settled_end_without_leftovers(state: str) -> None:
    job = SlurmJob(job_id="1", state=state, name="x")
    for is_settled, rebooted, is_clear, unkilled in product(BOOLS, BOOLS, BOOLS, ("", "it is stuck")):
        seen = job_observation(
            job, is_settled=is_settled, rebooted=rebooted, now=0.0, unkilled=unkilled, is_clear=is_clear
        )
        is_end = rebooted or (state in OVER and is_settled and not unkilled)
        assert seen.evidence in PROVABLE
        assert (seen.evidence is Evidence.ENDED) is is_end
        if not is_end:
            leftovers = Evidence.ORPHANED_PER_CLUSTER if state in OVER else Evidence.DOUBTFUL
            none_known = Evidence.CLEARED if is_clear else Evidence.UNKNOWN
            assert seen.evidence is (leftovers if unkilled else none_known)


@pytest.mark.parametrize(
    ("rebooted", "unkilled", "is_clear", "evidence"),
    [
        *((True, unkilled, is_clear, Evidence.ENDED) for unkilled in ("", "stuck") for is_clear in BOOLS),
        *((False, "stuck", is_clear, Evidence.DOUBTFUL) for is_clear in BOOLS),
        (False, "", True, Evidence.CLEARED),
        (False, "", False, Evidence.UNKNOWN),
    ],
)
def test_job_that_slurm_has_forgotten_has_ended_only_if_its_node_was_restarted(
    rebooted: bool, unkilled: str, is_clear: bool, evidence: Evidence
) -> None:
    seen = forgotten_observation(rebooted=rebooted, unkilled=unkilled, is_clear=is_clear)
    assert (seen.evidence, seen.evidence in PROVABLE) == (evidence, True)


@pytest.mark.parametrize("state", ["running", "over", "gone", "left", "hidden"])
@pytest.mark.parametrize("reported", ["one", "two", ""])
@pytest.mark.parametrize("assigned", ["one", ""])
def test_ray_agent_proves_an_end_only_of_the_process_that_has_the_task_spec(
    state: str, reported: str, assigned: str
) -> None:
    report = {"state": state, "pid": 7, "said": "", "process": reported}
    seen = task_observation("n0", report, assigned)
    assert seen.evidence in PROVABLE
    assert (seen.evidence is Evidence.ENDED) is (state == "over" and reported == assigned == "one")
    is_left = state == "left" and reported in ("", assigned)
    assert (seen.evidence is Evidence.ORPHANED_PER_CLUSTER) is is_left


def test_ray_proves_a_restart_and_nothing_of_a_node_that_does_not_answer() -> None:
    assert restarted_observation("n0").evidence is Evidence.ENDED
    assert unknown_observation("no such node").evidence is Evidence.UNKNOWN


def test_fake_engine_gives_evidence_of_every_stage_of_a_task() -> None:
    assert set(EVIDENCE) == set(FakeTaskStage)
    assert set(EVIDENCE.values()) <= set(OBSERVABLE)


def test_no_engine_gives_evidence_that_has_to_be_checked_again() -> None:
    assert {evidence for evidence in OBSERVABLE if evidence.rule.end is not End.NO} == {Evidence.ENDED}
    assert set(PROVABLE) <= set(OBSERVABLE)


class Facts(NamedTuple):
    """What the observer knows of one task."""

    silence_s: float
    is_restarted: bool
    """The control plane was restarted since the last report, so it has to wait for another."""
    is_assigned: bool
    leftovers: str
    cluster: ClusterTaskState
    evidence: Evidence


ALL_FACTS = [
    Facts(*facts)
    for facts in product(
        (LATE_S - 0.1, LATE_S, HEARD_S), BOOLS, BOOLS, ("", "it is stuck"), ClusterTaskState, PROVABLE
    )
    if facts[2] or not facts[3]  # a node agent that has no task spec reports nothing
]


def observe(home: Path, facts: Facts) -> Observation:
    clock = VirtualClock()
    mailbox = Mailbox(home, clock)
    mailbox.add((ORDER,), None)
    if facts.is_assigned:
        mailbox.assign(fetch(PROCESS))
        mailbox.receive(msgspec.structs.replace(told(PROCESS), leftovers=facts.leftovers), b"")
    mailbox = Mailbox(home, clock) if facts.is_restarted else mailbox
    observer = TaskObserver(mailbox, clock, lambda attempt_id: attempt_id)
    observer.observe(mailbox.tasks(), {}, NO_TRACE)
    clock.advance(facts.silence_s)
    seen = ClusterObservation(state=facts.cluster, evidence=facts.evidence)
    [observation] = observer.observe(mailbox.tasks(), {("att_1", "n1"): seen}, NO_TRACE)
    return observation


def expected(facts: Facts) -> Evidence:
    """The evidence, by the first rule that applies."""
    if not facts.is_assigned:
        is_queued = facts.cluster in (ClusterTaskState.QUEUED, ClusterTaskState.AWAY)
        return Evidence.QUEUED if is_queued else Evidence.PENDING
    if facts.evidence is Evidence.ENDED and facts.silence_s >= LATE_S:
        return Evidence.ENDED
    if facts.leftovers:
        return Evidence.ORPHANED
    if facts.silence_s < HEARD_S and not facts.is_restarted:
        return Evidence.ALIVE
    if facts.cluster is ClusterTaskState.SUSPENDED:
        return Evidence.SUSPENDED
    return facts.evidence if facts.silence_s >= LATE_S else facts.evidence.if_early


def test_observer_of_a_mailbox_gives_the_weakest_evidence_that_its_sources_support(tmp_path: Path) -> None:
    for number, facts in enumerate(ALL_FACTS):
        observation = observe(tmp_path / str(number), facts)
        assert observation.evidence is expected(facts), facts
        assert observation.evidence in OBSERVABLE
        assert (observation.outcome is not None) is (observation.evidence is Evidence.ENDED), facts
