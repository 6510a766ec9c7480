"""Whether a job ends after an attempt or is retried, and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.model.attempt import CLUSTER_REASONS, Attempt, AttemptState, EndReason, NodeTask, TaskReplacement
from shoal.model.job import Job, JobOutcome, ResourceRequest, RetryPolicy
from shoal.model.retry import (
    LONG_LIFE_S,
    MAX_BACKOFF_S,
    MAX_LOSSES,
    RetryDecision,
    decide_retry,
    may_restart_in_place,
)
from shoal.wire import MAX_EARLY_ENDS, EndKind, RuleAction, TaskOutcome

NOW = 100.0


def job(**fields: Any) -> Job:
    given = {
        "job_id": "job",
        "project": "vision",
        "number": 1,
        "name": "train",
        "owner": "usr",
        "owner_name": "ana",
        "request": ResourceRequest(),
        "spec_json": "{}",
        "submitted_at": 0.0,
    }
    return Job(**{**given, **fields})


def ended(reason: EndReason, *rules: RuleAction, **fields: Any) -> Attempt:
    outcome = TaskOutcome(
        attempt_id="att", epoch=1, node="node-03", kind=EndKind.EXITED, ended_at=NOW, rules_hit=rules
    )
    given = {"message": "node-03: rank 0 exited with 3", "exit_code": 3, "outcomes": (outcome,)}
    return Attempt(
        attempt_id="att",
        job_id="job",
        project="vision",
        epoch=1,
        queued_at=0.0,
        state=AttemptState.ENDED,
        reason=reason,
        **{**given, **fields},
    )


def retries(count: int, *on: str, backoff_s: float = 5.0) -> RetryPolicy:
    return RetryPolicy(max_retries=count, on=frozenset(on or ("exit",)), backoff_s=backoff_s)


def outcome(verdict: RetryDecision) -> JobOutcome | None:
    assert (verdict.backoff_s is None) == (verdict.job.outcome is not None)
    return verdict.job.outcome


def test_a_job_that_succeeded_is_over() -> None:
    verdict = decide_retry(job(), ended(EndReason.SUCCEEDED, exit_code=0), NOW)
    assert outcome(verdict) is JobOutcome.SUCCEEDED
    assert (verdict.job.exit_code, verdict.job.ended_at) == (0, NOW)


def test_success_counts_even_after_a_request_to_stop() -> None:
    verdict = decide_retry(job(stop_asked_by="ana"), ended(EndReason.SUCCEEDED), NOW)
    assert outcome(verdict) is JobOutcome.SUCCEEDED


def test_without_retries_the_first_failure_ends_the_job_and_says_why() -> None:
    verdict = decide_retry(job(), ended(EndReason.EXIT), NOW)
    assert outcome(verdict) is JobOutcome.FAILED
    assert verdict.job.because == "node-03: rank 0 exited with 3"
    assert verdict.job.exit_code == 3


def test_a_job_is_tried_as_often_as_it_allows_with_growing_backoff() -> None:
    current = job(retry=retries(3))
    waits = []
    while (verdict := decide_retry(current, ended(EndReason.EXIT), NOW)).backoff_s is not None:
        waits.append(verdict.backoff_s)
        assert verdict.job.epoch == current.epoch + 1
        current = verdict.job
    assert waits == [5.0, 10.0, 20.0]
    assert outcome(verdict) is JobOutcome.FAILED
    assert verdict.job.failures == 4


def test_backoff_never_grows_beyond_an_hour() -> None:
    tired = job(retry=retries(10_000, backoff_s=60.0), failures=5000)
    assert decide_retry(tired, ended(EndReason.EXIT), NOW).backoff_s == MAX_BACKOFF_S


@pytest.mark.parametrize("reason", [EndReason.OOM, EndReason.SETUP, EndReason.TIME_LIMIT, EndReason.SIGNAL])
def test_only_the_ends_a_job_names_are_tried_again(reason: EndReason) -> None:
    assert outcome(decide_retry(job(retry=retries(3, "exit")), ended(reason), NOW)) is JobOutcome.FAILED
    assert outcome(decide_retry(job(retry=retries(3, str(reason))), ended(reason), NOW)) is None


def test_a_refusal_by_the_engine_ends_the_job() -> None:
    assert outcome(decide_retry(job(retry=retries(3)), ended(EndReason.REFUSED), NOW)) is JobOutcome.FAILED


@pytest.mark.parametrize("reason", sorted(CLUSTER_REASONS))
def test_what_the_cluster_lost_is_repeated_for_free(reason: EndReason) -> None:
    verdict = decide_retry(job(retry=retries(0)), ended(reason), NOW)
    assert outcome(verdict) is None
    assert verdict.job.failures == 0
    assert verdict.job.epoch == 2


def test_preemption_costs_neither_a_retry_nor_a_wait_nor_a_loss() -> None:
    verdict = decide_retry(job(), ended(EndReason.PREEMPTED), NOW)
    assert (verdict.backoff_s, verdict.job.losses) == (0.0, 0)


def test_losses_wait_longer_each_time_and_end_some_time() -> None:
    current, waits = job(), []
    while (verdict := decide_retry(current, ended(EndReason.LOST), NOW)).backoff_s is not None:
        waits.append(verdict.backoff_s)
        current = verdict.job
    assert len(waits) == MAX_LOSSES - 1
    assert waits == sorted(waits)
    assert (*waits[:3], max(waits)) == (0.0, 0.5, 1.0, 2048.0)
    assert outcome(verdict) is JobOutcome.FAILED
    assert verdict.job.because.startswith(f"lost {MAX_LOSSES} times")


def lost_after(lived_s: float, **fields: Any) -> Attempt:
    return ended(EndReason.LOST, started_at=NOW - lived_s, ended_at=NOW, **fields)


def test_a_job_that_is_lost_each_day_restarts_at_once_for_any_number_of_days() -> None:
    current = job()
    for _ in range(3 * MAX_LOSSES):
        verdict = decide_retry(current, lost_after(86_400.0), NOW)
        assert (verdict.backoff_s, verdict.job.losses) == (0.0, 1)
        current = verdict.job


def test_a_long_life_ends_a_row_of_losses_and_a_short_one_after_it_is_the_next() -> None:
    tired = job(losses=MAX_LOSSES - 1)
    assert outcome(decide_retry(tired, lost_after(LONG_LIFE_S - 1.0), NOW)) is JobOutcome.FAILED
    rested = decide_retry(tired, lost_after(LONG_LIFE_S), NOW)
    assert (rested.backoff_s, rested.job.losses) == (0.0, 1)
    again = decide_retry(rested.job, lost_after(1.0), NOW)
    assert (again.backoff_s, again.job.losses) == (0.5, 2)


def test_silence_before_the_end_is_no_life() -> None:
    """Otherwise a program that takes its machine down each time would live as long as Shoal waits for it."""
    lost = lost_after(LONG_LIFE_S + 60.0)
    assert decide_retry(job(losses=5), lost, NOW, silent_s=61.0).job.losses == 6
    assert decide_retry(job(losses=5), lost, NOW, silent_s=60.0).job.losses == 1


def test_an_attempt_that_never_ran_has_not_lived_however_long_it_took() -> None:
    lost = ended(EndReason.LOST, placed_at=NOW - 10 * LONG_LIFE_S, ended_at=NOW)
    assert decide_retry(job(losses=5), lost, NOW).job.losses == 6


def anew(
    node: str, ago_s: float, generation: int = 1, *, was: str = "", is_unasked: bool = False
) -> TaskReplacement:
    kind = EndKind.STOPPED if is_unasked else EndKind.LOST
    lost = TaskOutcome(
        attempt_id="att",
        epoch=1,
        node=was or node,
        kind=kind,
        ended_at=NOW - ago_s,
        is_external_stop=is_unasked,
    )
    return TaskReplacement(rendezvous_round=generation, at=NOW - ago_s, lost=lost, node=node)


def gang_lost_after(lived_s: float, *replacements: TaskReplacement, begun: tuple[str, ...] = ()) -> Attempt:
    shares = tuple(NodeTask(node=node, cpus=1.0, memory_bytes=0) for node in ("n1", "n2"))
    return lost_after(lived_s, allocation=shares, replacements=replacements, started_nodes=begun)


def test_a_replaced_task_has_a_life_of_its_own() -> None:
    """Otherwise a program that takes its supervisor down each minute would live as long as its task is
    replaced.
    """
    lost = gang_lost_after(10 * LONG_LIFE_S, anew("n1", 60.0), begun=("n1", "n2"))
    assert decide_retry(job(losses=5), lost, NOW).job.losses == 6
    before = msgspec.structs.replace(lost, replacements=(anew("n1", LONG_LIFE_S),))
    assert decide_retry(job(losses=5), before, NOW).job.losses == 1


@pytest.mark.parametrize("begun", [(), ("n1",), ("n2",), ("n1", "n2")])
def test_a_gang_that_the_cluster_stops_has_lived_until_then(begun: tuple[str, ...]) -> None:
    """Each node reports a loss of its own and gets another task, which begins if no other user
    has the node.
    """
    stops = anew("n1", 61.0, is_unasked=True), anew("n2", 60.0, 2, is_unasked=True)
    assert (
        decide_retry(job(losses=5), gang_lost_after(LONG_LIFE_S + 61.0, *stops, begun=begun), NOW).job.losses
        == 1
    )
    short = gang_lost_after(LONG_LIFE_S + 59.0, *stops, begun=begun)
    assert decide_retry(job(losses=5), short, NOW).job.losses == 6


def test_a_task_that_never_began_takes_nothing_from_the_life_before_it() -> None:
    """This happens if the cluster kills processes that do not stop in time, because no report says that they
    were stopped.
    """
    in_vain = anew("n1", 60.0)
    assert decide_retry(job(losses=5), gang_lost_after(LONG_LIFE_S + 60.0, in_vain), NOW).job.losses == 1
    short = gang_lost_after(LONG_LIFE_S + 59.0, in_vain)
    assert decide_retry(job(losses=5), short, NOW).job.losses == 6


def test_waiting_for_a_task_that_never_begins_is_no_life() -> None:
    lost = gang_lost_after(LONG_LIFE_S + 60.0, anew("n1", LONG_LIFE_S), begun=("n2",))
    assert decide_retry(job(losses=5), lost, NOW).job.losses == 6


def test_a_node_that_a_task_has_left_is_not_waited_for() -> None:
    moves = anew("n3", 2 * LONG_LIFE_S), anew("n1", LONG_LIFE_S, 2, was="n3")
    lost = gang_lost_after(2 * LONG_LIFE_S, *moves, begun=("n1", "n2"))
    assert decide_retry(job(losses=5), lost, NOW).job.losses == 1


def test_silence_before_a_task_is_stopped_is_no_life_either() -> None:
    stop = anew("n1", 0.0, is_unasked=True)
    lost = gang_lost_after(LONG_LIFE_S + 60.0, stop, begun=("n2",))
    assert decide_retry(job(losses=5), lost, NOW, silent_s=61.0).job.losses == 6


@pytest.mark.parametrize("reason", [reason for reason in EndReason if reason is not EndReason.SUCCEEDED])
def test_a_job_that_a_user_stopped_is_never_retried(reason: EndReason) -> None:
    every = retries(5, *EndReason)
    verdict = decide_retry(job(retry=every, stop_asked_by="ana"), ended(reason), NOW)
    assert outcome(verdict) is JobOutcome.CANCELLED
    assert verdict.job.because == "stopped by ana"


def test_a_dependency_that_cannot_be_met_cancels_the_job() -> None:
    verdict = decide_retry(job(), ended(EndReason.DEPENDENCY, message="vision/1 failed"), NOW)
    assert outcome(verdict) is JobOutcome.CANCELLED
    assert verdict.job.because == "vision/1 failed"


@pytest.mark.parametrize("reason", [EndReason.EXIT, EndReason.LOST])
def test_a_log_rule_can_forbid_another_try(reason: EndReason) -> None:
    verdict = decide_retry(job(retry=retries(5)), ended(reason, RuleAction.STOP_RETRIES), NOW)
    assert outcome(verdict) is JobOutcome.FAILED
    assert "a log rule stops further retries" in verdict.job.because


def test_a_log_rule_excludes_the_node_it_was_hit_on_from_the_next_attempts() -> None:
    before = job(retry=retries(5), excluded_nodes=("node-09",))
    verdict = decide_retry(before, ended(EndReason.EXIT, RuleAction.EXCLUDE_NODE), NOW)
    assert verdict.job.excluded_nodes == ("node-03", "node-09")
    assert decide_retry(before, ended(EndReason.EXIT), NOW).job.excluded_nodes == ("node-09",)


def test_only_the_next_attempt_avoids_the_node_where_the_cluster_stopped_the_last() -> None:
    (stopped,) = ended(EndReason.LOST).outcomes
    unasked = msgspec.structs.replace(stopped, kind=EndKind.STOPPED, is_external_stop=True)
    after = decide_retry(job(), ended(EndReason.LOST, outcomes=(unasked,)), NOW).job
    assert (after.avoided_nodes, after.excluded_nodes) == (("node-03",), ())
    for reason in (EndReason.LOST, EndReason.EXIT, EndReason.PREEMPTED):
        assert decide_retry(after, ended(reason), NOW).job.avoided_nodes == ()


@pytest.mark.parametrize("reason", EndReason)
@pytest.mark.parametrize("stop_asked_by", [None, "ana"])
def test_a_verdict_is_one_change_of_the_same_job(reason: EndReason, stop_asked_by: str | None) -> None:
    before = job(retry=retries(1, *EndReason), stop_asked_by=stop_asked_by, version=4)
    verdict = decide_retry(before, ended(reason), NOW)
    assert verdict.job.version == 5
    fixed = ("job_id", "project", "number", "request", "retry", "spec_json", "submitted_at", "owner")
    assert all(getattr(verdict.job, name) == getattr(before, name) for name in fixed)
    assert verdict.job.epoch == before.epoch + (outcome(verdict) is None)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=RetryDecision) == verdict


FAILED_RANK = TaskOutcome(attempt_id="att", epoch=1, node="node-03", kind=EndKind.EXITED, ended_at=NOW)


def may_restart(cause: TaskOutcome = FAILED_RANK, attempt: Attempt | None = None, **fields: Any) -> bool:
    policy = fields.pop("retry", retries(3))
    running = attempt or ended(EndReason.EXIT)
    return may_restart_in_place(job(retry=policy, **fields), running, EndReason.EXIT, cause)


def test_ranks_restart_in_place_while_retries_are_left() -> None:
    assert may_restart()
    assert may_restart(failures=2)
    assert not may_restart(failures=3)
    assert not may_restart(failures=1, attempt=ended(EndReason.EXIT, rendezvous_round=2))


def test_ranks_do_not_restart_in_place_against_the_policy_or_after_a_stop() -> None:
    assert not may_restart(retry=msgspec.structs.replace(retries(3), in_place=False))
    assert not may_restart(retry=retries(3, "signal"))
    assert not may_restart(stop_asked_by="ana")


def test_program_that_gives_up_is_not_restarted_in_place() -> None:
    assert not may_restart(msgspec.structs.replace(FAILED_RANK, gives_up=True))
    assert may_restart(msgspec.structs.replace(FAILED_RANK, num_early=MAX_EARLY_ENDS))
    assert not may_restart(msgspec.structs.replace(FAILED_RANK, num_early=MAX_EARLY_ENDS + 1))
