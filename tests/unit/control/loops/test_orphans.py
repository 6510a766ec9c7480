"""Tasks without a known supervisor: what is held, what is stopped for them, and what ends the wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from shoal.control.loops.watch import REPLACEMENT_PATIENCE_S, _compare
from shoal.control.memory.health import GONE_S
from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.engines.base import Observation
from shoal.engines.fake import FakeEngine
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.evidence import PER_CLUSTER, Evidence
from shoal.model.job import Job
from shoal.model.moves import OrphanCleared, RanksRestarted, TaskOrphaned, step
from shoal.model.node import NodeFacts, NodeState
from shoal.wire import EndKind, TaskOutcome
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of
from tests.unit.control.memory.test_fences_and_limits import FENCE_S, let_pass, reasons

GANG = {"nodes": 2, "cpus": 1, "gpus": 2}
RETRY = {"max": 3, "on": ["exit", "signal"]}
LOST = TaskOutcome(attempt_id="", epoch=0, node="n2", kind=EndKind.LOST, ended_at=2.0)
PAST_FENCE_S = FENCE_S + FENCE_MARGIN_S + 30.0


def a_gang(lab: ControlPlaneLab, **fields: object) -> Job:
    return lab.running_job(**{"resources": GANG, "retry": RETRY, "fence": f"{FENCE_S:.0f}s", **fields})


class Doubt:
    """What the cluster says of silent tasks, whatever becomes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evidence = Evidence.DOUBTFUL
        listed = FakeEngine.list_owned

        async def list_owned(engine: FakeEngine) -> list[Observation]:
            return [self._seen(observation) for observation in await listed(engine)]

        monkeypatch.setattr(FakeEngine, "list_owned", list_owned)

    def _seen(self, observation: Observation) -> Observation:
        if observation.evidence not in (Evidence.UNKNOWN, Evidence.CLEARED):
            return observation
        return msgspec.structs.replace(observation, evidence=self.evidence, raw="Kill task failed")


@pytest.fixture
def doubt(monkeypatch: pytest.MonkeyPatch) -> Doubt:
    return Doubt(monkeypatch)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_slowly_dying_task_is_replaced_and_its_attempt_goes_on(is_restarted: bool) -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.cluster.orphan(lab.attempt(job).attempt_id, "n2", 30)
    let_pass(lab, 15)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.orphans_left, attempt.rendezvous_round) == (
        AttemptState.RUNNING,
        ("n2",),
        0,
    )
    assert len(lab.cluster.running()) == 2, "no task is begun beside it, and none is stopped"
    if is_restarted:
        lab.restart()
    let_pass(lab, 30)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.rendezvous_round, attempt.orphaned_nodes) == (AttemptState.RUNNING, 1, ())
    assert {(task.identity.node, task.identity.replacement) for task in lab.cluster.running()} == {
        ("n1", 0),
        ("n2", 1),
    }
    assert (len(lab.attempts(job)), lab.stored_job(job).losses, lab.stored_job(job).failures) == (1, 0, 0)


def test_peers_that_fail_meanwhile_restart_and_go_on_with_the_replacement() -> None:
    """The loss explains their failures, even before it is recorded: they cost no retry. The next failure
    does.
    """
    lab = ControlPlaneLab()
    job = a_gang(lab, retry={**RETRY, "max": 1})
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 30)
    let_pass(lab, 10)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.rendezvous_round, attempt.orphans_left) == (
        AttemptState.RUNNING,
        1,
        ("n2",),
    )
    let_pass(lab, 30)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.rendezvous_round, attempt.restarts) == (AttemptState.RUNNING, 2, 0)
    assert {(task.identity.node, task.identity.replacement) for task in lab.cluster.running()} == {
        ("n1", 0),
        ("n2", 2),
    }
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.rendezvous_round, attempt.restarts) == (AttemptState.RUNNING, 3, 1)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 30)
    assert (lab.stored_job(job).outcome, lab.stored_job(job).failures, lab.stored_job(job).losses) == (
        "failed",
        2,
        0,
    )


def test_failures_while_a_task_is_awaited_cost_no_retry_for_a_minute_at_most(
    doubt: Doubt,
) -> None:
    """A doubt lasts, and a program that fails again and again ends all the same."""
    lab = ControlPlaneLab()
    job = a_gang(lab, retry={**RETRY, "max": 1}, fence="1h")
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.cut("n2")
    let_pass(lab, 10)
    for excused in (1, 2):
        lab.cluster.kill_rank(attempt_id, "n1")
        let_pass(lab, 10)
        assert (lab.attempt(job).num_excused, lab.attempt(job).restarts) == (excused, 0)
    let_pass(lab, REPLACEMENT_PATIENCE_S)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    assert (lab.attempt(job).num_excused, lab.attempt(job).restarts) == (2, 1)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    assert lab.status(job) == "stopping"


def test_failure_because_a_peers_machine_was_switched_off_costs_no_retry_once() -> None:
    """Their ranks fail before anything reports that the machine is gone. Ranks of a program that fails by
    itself do so later.
    """
    lab = ControlPlaneLab()
    job = a_gang(lab, retry={**RETRY, "max": 1}, fence="1h")
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.cut("n2")
    let_pass(lab, 10)
    for excused, restarts in ((1, 0), (1, 1)):
        lab.cluster.kill_rank(attempt_id, "n1")
        let_pass(lab, 10)
        assert (lab.attempt(job).num_excused, lab.attempt(job).restarts) == (excused, restarts)


def test_replacement_of_a_slowly_dying_task_has_its_own_fence() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.cluster.orphan(lab.attempt(job).attempt_id, "n2", 10)
    let_pass(lab, 30)
    assert lab.attempt(job).replacement_on("n2") == 1
    lab.cluster.cut("n2")
    let_pass(lab, PAST_FENCE_S)
    lab.cluster.heal("n2")
    assert lab.attempt(job).replacement_on("n2") == 2


@pytest.mark.parametrize("place", ["n2", "n3"])
def test_doubt_about_a_task_does_not_pass_to_its_replacement(place: str) -> None:
    lab = ControlPlaneLab()
    attempt, _ = step(
        lab.attempt(a_gang(lab)), TaskOrphaned("n2", "it does not die", evidence=Evidence.DOUBTFUL), 1.0
    )
    lost = TaskOutcome(
        attempt_id=attempt.attempt_id, epoch=attempt.epoch, node="n2", kind=EndKind.LOST, ended_at=2.0
    )
    task = msgspec.structs.replace(attempt.allocation[1], node=place)
    after, _ = step(attempt, RanksRestarted(0, lost, task), 2.0)
    assert (attempt.orphaned_nodes, after.orphaned_nodes) == (("n2",), ())
    assert (attempt.doubted_nodes, after.doubted_nodes) == (("n2",), ())


def test_peers_of_a_task_that_does_not_die_are_stopped_after_a_minute() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab, grace="10s")
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 1000)
    let_pass(lab, REPLACEMENT_PATIENCE_S - 10)
    assert lab.status(job) == "running"
    let_pass(lab, 20)
    assert lab.status(job) == "stopping"
    let_pass(lab, PAST_FENCE_S)
    assert (lab.status(job), lab.running_tasks()) == ("stopping", [(attempt_id, "n2")])
    let_pass(lab, 1000, step_s=30)
    assert reasons(lab, job) == [EndReason.LOST, None]


@pytest.mark.parametrize("place", ["n2", "n3"])
def test_stale_observation_of_a_replaced_task_stops_nothing(place: str) -> None:
    """The look, and what was read before it, may be seconds old: a peer's failure has caused another look."""
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", REPLACEMENT_PATIENCE_S + 20)
    let_pass(lab, REPLACEMENT_PATIENCE_S - 5)
    before, seen = (
        lab.attempt(job),
        {observation.node: observation for observation in result_of(lab.engine.list_owned())},
    )
    assert (before.orphans_left, seen["n2"].evidence) == (("n2",), Evidence.ORPHANED)
    lost = msgspec.structs.replace(LOST, attempt_id=attempt_id, epoch=before.epoch)
    task = msgspec.structs.replace(before.allocation[1], node=place)
    result_of(
        lab.store.write(
            lambda tx: lab.plane.core.records.recorder.advance(tx, attempt_id, RanksRestarted(0, lost, task))
        )
    )
    lab.clock.advance(10)
    result_of(
        _compare(
            lab.plane.core.upkeep, lab.plane.core.inputs, lab.stored_job(job), before, {attempt_id: seen}
        )
    )
    assert (lab.status(job), lab.attempt(job).orphaned_nodes) == ("running", ())


def test_whether_peers_wait_is_decided_on_the_present_attempt() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 1000)
    let_pass(lab, 5)
    seen = {observation.node: observation for observation in result_of(lab.engine.list_owned())}
    old = msgspec.structs.replace(lab.attempt(job), orphaned_nodes=("n1", "n2"))  # n1 renews again
    result_of(
        _compare(lab.plane.core.upkeep, lab.plane.core.inputs, lab.stored_job(job), old, {attempt_id: seen})
    )
    assert lab.status(job) == "running"


def test_task_that_began_after_the_read_is_judged_next_time() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt = lab.attempt(job)
    [seen] = [observation for observation in result_of(lab.engine.list_owned()) if observation.node == "n2"]
    seen = msgspec.structs.replace(seen, evidence=Evidence.ORPHANED, replacement=1)
    result_of(
        _compare(
            lab.plane.core.upkeep,
            lab.plane.core.inputs,
            lab.stored_job(job),
            attempt,
            {attempt.attempt_id: {"n1": seen, "n2": seen}},
        )
    )
    assert (lab.status(job), lab.attempt(job).orphaned_nodes) == ("running", ())


@pytest.mark.parametrize("fields", [{"retry": {"max": 0}}, {"resources": {"nodes": 1, "cpus": 1}}])
def test_peers_do_not_wait_if_no_task_could_take_its_place(fields: dict[str, object]) -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab, **fields)
    lab.cluster.orphan(lab.attempt(job).attempt_id, lab.attempt(job).node_names[-1], 1000)
    let_pass(lab, 1)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.stop_reason) == (AttemptState.STOPPING, EndReason.LOST)
    assert lab.stored_job(job).stop_asked_by is None


def test_attempt_does_not_wait_if_no_task_has_a_supervisor() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    for node in ("n1", "n2"):
        assert lab.status(job) == "running"
        lab.cluster.orphan(lab.attempt(job).attempt_id, node, 1000)
        let_pass(lab, 1)
    assert lab.status(job) == "stopping"


@pytest.mark.parametrize("resources", [GANG, {"nodes": 1, "cpus": 1}])
def test_on_a_doubt_no_fence_passes_and_nothing_is_stopped(doubt: Doubt, resources: dict[str, int]) -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab, resources=resources, fence="1h")
    last = lab.attempt(job).node_names[-1]
    lab.cluster.cut(last)
    let_pass(lab, 10 * REPLACEMENT_PATIENCE_S)
    assert (lab.status(job), lab.attempt(job).orphans_left) == ("running", (last,))
    lab.cluster.heal(last)
    let_pass(lab, 5)
    assert (lab.status(job), lab.attempt(job).orphaned_nodes) == ("running", ())
    assert len(lab.running_tasks()) == resources["nodes"], "it was healthy all the time"


@pytest.mark.parametrize("evidence", PER_CLUSTER)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_fence_counts_from_when_a_doubt_was_withdrawn(
    doubt: Doubt, evidence: Evidence, is_restarted: bool
) -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{FENCE_S:.0f}s")
    lab.cluster.cut("n1")
    doubt.evidence = evidence
    let_pass(lab, 3 * PAST_FENCE_S)
    doubt.evidence = Evidence.UNKNOWN  # and no node confirms or denies it
    if is_restarted:
        lab.restart()
    let_pass(lab, 3 * PAST_FENCE_S)
    assert reasons(lab, job) == [None]
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert explanation.why == "orphaned"
    assert is_restarted or "n1: Kill task failed" in explanation.details
    doubt.evidence = Evidence.CLEARED
    let_pass(lab, FENCE_S + FENCE_MARGIN_S)
    assert (reasons(lab, job), lab.attempt(job).orphaned_nodes) == ([None], ())
    let_pass(lab, 30)
    assert reasons(lab, job)[0] in (EndReason.FENCED, EndReason.LOST)


@pytest.mark.parametrize("evidence", [Evidence.CLEARED, Evidence.SUSPENDED])
@pytest.mark.parametrize("is_doubted_too", [False, True])
def test_cluster_does_not_withdraw_what_the_node_itself_reported(
    doubt: Doubt, evidence: Evidence, is_doubted_too: bool
) -> None:
    """The report of a node agent counts, even from before it was killed, and even if an older version
    recorded only the mark.
    """
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.cut("n2")
    if is_doubted_too:
        let_pass(lab, 5)
        assert lab.attempt(job).doubted_nodes == ("n2",)
    doubt.evidence = Evidence.ORPHANED
    let_pass(lab, 5)
    assert (lab.attempt(job).orphans_left, lab.attempt(job).doubted_nodes) == (("n2",), ())
    doubt.evidence = evidence
    lab.restart()
    let_pass(lab, 30)
    doubt.evidence = Evidence.CLEARED
    let_pass(lab, 3 * PAST_FENCE_S)
    assert (lab.attempt(job).orphans_left, len(lab.attempts(job))) == (("n2",), 1)
    lab.cluster.heal("n2")
    let_pass(lab, 5)
    assert (lab.attempt(job).attempt_id, lab.attempt(job).orphaned_nodes) == (attempt_id, ())


def test_orphan_mark_without_a_source_is_not_the_clusters() -> None:
    """Records of earlier versions have marks without a source."""
    lab = ControlPlaneLab()
    attempt = lab.attempt(a_gang(lab))
    event = msgspec.json.encode(TaskOrphaned("n2", "it does not die"))
    attempt, _ = step(attempt, msgspec.json.decode(event, type=TaskOrphaned), 1.0)
    assert attempt.orphaned_nodes == ("n2",)
    assert step(attempt, OrphanCleared("n2", evidence=Evidence.CLEARED), 2.0) == (attempt, ())
    after, _ = step(attempt, OrphanCleared("n2"), 2.0)
    assert after.orphaned_nodes == ()


def test_why_of_an_orphan_says_what_helps(doubt: Doubt, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.cluster.cut("n1")
    let_pass(lab, 5)
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert explanation.hint is not None
    assert explanation.hint.endswith("a restart ends them")
    monkeypatch.setattr(FakeEngine, "how_to_clear", lambda _, node: f"`resume {node}`", raising=False)
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert explanation.hint is not None
    assert explanation.hint.endswith("a restart ends them; `resume n1`")
    monkeypatch.setattr(FakeEngine, "how_to_clear", lambda *_: "")
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert explanation.hint is not None
    assert explanation.hint.endswith("a restart ends them")


def test_why_names_declare_dead_if_the_machine_is_scrapped(
    doubt: Doubt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the node held keeps it from being `gone`, and an engine that does not list it never says that all
    is well there.
    """
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.cluster.cut("n2")
    let_pass(lab, 5)
    monkeypatch.setattr(FakeEngine, "nodes", not_listing(FakeEngine.nodes, "n2"))
    for _ in range(3):
        let_pass(lab, GONE_S, step_s=30)
        lab.heal()
        lab.place()
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert explanation.hint is not None
    assert explanation.hint.endswith(
        "; a restart ends them; if it is off for good: `shoal nodes declare-dead n2`"
    )
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.DEAD, because="scrapped"))
    lab.heal()
    lab.place()
    assert lab.attempt(job).orphans_left == ()


def not_listing(nodes: Callable[..., Awaitable[list[NodeFacts]]], name: str) -> Callable[..., object]:
    async def others(engine: FakeEngine) -> list[NodeFacts]:
        return [facts for facts in await nodes(engine) if facts.name != name]

    return others
