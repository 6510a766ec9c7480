"""What each kind of evidence allows: every value against every question."""

from __future__ import annotations

import pytest

from shoal.model.attempt import Attempt, AttemptState, NodeTask
from shoal.model.evidence import PER_CLUSTER, RULES, UNSTARTED, UNSUPERVISED, End, Evidence, Silence, Source
from shoal.model.evidence_page import SOURCES
from shoal.model.moves import OrphanCleared, TaskOrphaned, step

ENDS = (Evidence.FENCED, Evidence.DECLARED_DEAD, Evidence.ENDED)
RUNNING = Attempt(
    attempt_id="att_1",
    job_id="job_1",
    project="vision",
    epoch=1,
    queued_at=0.0,
    state=AttemptState.RUNNING,
    allocation=(NodeTask(node="n1", cpus=1.0, memory_bytes=1),),
)
ALL = pytest.mark.parametrize("evidence", Evidence)


def test_every_evidence_has_a_rule_and_every_source_a_description() -> None:
    assert list(RULES) == list(Evidence)
    assert set(SOURCES) == set(Source)


@ALL
def test_only_a_fence_a_declaration_and_an_observed_end_end_a_task(evidence: Evidence) -> None:
    assert (evidence.rule.end is not End.NO) is (evidence in ENDS)
    assert (evidence.rule.silence is Silence.OVER) is (evidence in ENDS)


@ALL
def test_an_end_that_can_be_contradicted_is_checked_again(evidence: Evidence) -> None:
    checks = {Source.LEASES: End.WHILE_SILENT, Source.OPERATOR: End.WHILE_DECLARED}
    assert evidence.rule.end is checks.get(
        evidence.rule.source, End.YES if evidence is Evidence.ENDED else End.NO
    )


@ALL
def test_hearsay_ends_nothing(evidence: Evidence) -> None:
    assert not (evidence.rule.is_hearsay and evidence.rule.end is not End.NO)


@ALL
def test_no_fence_passes_if_there_may_be_no_supervisor_to_keep_it(evidence: Evidence) -> None:
    assert (evidence.rule.silence is Silence.PROVES_NOTHING) is (evidence in UNSUPERVISED)


@ALL
def test_silence_fences_only_a_task_of_which_nothing_is_known(evidence: Evidence) -> None:
    unknown = (Evidence.UNKNOWN, Evidence.CLEARED)
    assert (evidence.rule.silence is Silence.COUNTS) is (evidence in unknown)


@ALL
def test_a_doubt_stops_nothing(evidence: Evidence) -> None:
    orphaned = (Evidence.ORPHANED_PER_CLUSTER, Evidence.ORPHANED)
    assert evidence.rule.stops_attempt is (evidence in orphaned)


@ALL
def test_only_the_supervisor_itself_contradicts_what_its_node_reported(evidence: Evidence) -> None:
    withdraws = set(evidence.rule.withdraws)
    assert (Evidence.ORPHANED in withdraws) is (evidence is Evidence.ALIVE)
    assert bool(withdraws) is (evidence in (Evidence.ALIVE, Evidence.CLEARED))
    assert withdraws <= set(UNSUPERVISED)


@ALL
def test_early_evidence_is_never_stronger_and_never_ends_a_task_that_may_speak(evidence: Evidence) -> None:
    strength = list(Evidence)
    early = evidence.if_early
    assert strength.index(early) <= strength.index(evidence)
    assert early.if_early is early
    assert early.rule.end in (End.NO, End.WHILE_SILENT, End.WHILE_DECLARED)
    assert early.rule.silence in (evidence.rule.silence, Silence.COUNTS)


def test_evidence_of_an_end_is_the_strongest() -> None:
    assert tuple(Evidence)[-len(ENDS) :] == ENDS


def test_cluster_raises_the_doubts_that_it_can_withdraw() -> None:
    assert {evidence for evidence in UNSUPERVISED if evidence.rule.is_hearsay} == set(PER_CLUSTER)
    assert set(Evidence.CLEARED.rule.withdraws) == set(PER_CLUSTER)
    assert not {evidence for evidence in UNSTARTED if evidence.rule.withdraws}


@pytest.mark.parametrize("doubt", UNSUPERVISED)
@ALL
def test_attempt_forgets_a_doubt_exactly_if_the_evidence_withdraws_it(
    doubt: Evidence, evidence: Evidence
) -> None:
    orphaned, _ = step(RUNNING, TaskOrphaned("n1", "it does not die", evidence=doubt), 1.0)
    assert orphaned.orphaned_nodes == ("n1",)
    after, _ = step(orphaned, OrphanCleared("n1", evidence=evidence), 2.0)
    assert (after.orphaned_nodes == ()) is (doubt in evidence.rule.withdraws)
