"""What the scheduler sees, and what people read when it says no."""

from __future__ import annotations

import msgspec
import pytest

from shoal.api.views.render import render_node
from shoal.cli.nodes import state_of
from shoal.control.memory.health import LATE_S
from shoal.control.memory.leases import FENCE_MARGIN_S, QUIET_S
from shoal.control.memory.planner_input import node_view
from shoal.control.memory.queue import JobQueue, read_changes
from shoal.engines.base import CLUSTER_UNREACHABLE
from shoal.engines.fake import Act, Verb, always
from shoal.model.job import DependencyKind, Job
from shoal.model.node import Node, NodeState
from shoal.scheduler import Explanation, Planner, Policy, Snapshot, Stamps, WaitReason
from shoal.scheduler.explain.text import age
from shoal.wire import EndKind, TaskSpec
from tests.support.planes.bench import ControlPlaneLab, node_facts

NOW = 1_000_000.0
FAILS = always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1))


def read(lab: ControlPlaneLab) -> tuple[JobQueue, Snapshot]:
    """Return what a control plane that starts now would read and tell its planner."""
    planner = Planner(Policy())
    queue = JobQueue(planner, lab.core.backoff, Stamps())
    queue.apply(lab.read(lambda tx: read_changes(tx, None)))
    queue.wake(lab.clock.now())
    return queue, planner.snapshot()


def shown(lab: ControlPlaneLab) -> Snapshot:
    return read(lab)[1]


def ended(lab: ControlPlaneLab, how: str) -> Job:
    """A job called `prepare` that ended this way."""
    job = lab.running_job(name="prepare")
    if how == "cancelled":
        lab.stop(job)
    lab.clock.advance(1)
    lab.watch()
    assert lab.status(job) == how
    return job


@pytest.mark.parametrize(
    "how,on,sentence",
    [
        ("failed", "succeeded", "lab/1 prepare failed; this job was to start only after it succeeded"),
        (
            "cancelled",
            "succeeded",
            "lab/1 prepare was cancelled; this job was to start only after it succeeded",
        ),
        ("succeeded", "failed", "lab/1 prepare succeeded; this job was to start only after it failed"),
    ],
)
def test_a_job_that_can_never_start_is_doomed_with_a_reason(how: str, on: str, sentence: str) -> None:
    lab = ControlPlaneLab(script=FAILS if how == "failed" else always(Act(run_s=1.0)))
    ended(lab, how)
    job = lab.submit(after=[f"prepare:{on}"])
    assert read(lab)[0].doomed == [(lab.attempt(job).attempt_id, sentence)]
    lab.place()
    assert (lab.status(job), lab.stored_job(job).because) == ("cancelled", sentence)


@pytest.mark.parametrize(
    "how,on",
    [
        ("succeeded", "succeeded"),
        ("failed", "failed"),
        ("succeeded", "ended"),
        ("failed", "ended"),
        ("cancelled", "ended"),
    ],
)
def test_met_dependency_blocks_no_job(how: str, on: str) -> None:
    lab = ControlPlaneLab(script=FAILS if how == "failed" else always(Act(run_s=1.0)))
    ended(lab, how)
    lab.submit(after=[f"prepare:{on}"])
    queue, seen = read(lab)
    assert (queue.doomed, [c.unmet for c in seen.candidates]) == ([], [()])


def test_doom_spreads_along_a_chain_to_its_end() -> None:
    lab = ControlPlaneLab()
    first = lab.submit(name="a")
    lab.submit(name="b", after=["a"])
    last = lab.submit(name="c", after=["b"])
    lab.stop(first)
    lab.place()
    lab.place()
    assert lab.status(last) == "cancelled"
    assert lab.stored_job(last).because == (
        "lab/2 b was cancelled; this job was to start only after it succeeded"
    )


def test_a_dependency_that_is_open_again_is_waited_for_again() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0)))
    first = ended(lab, "cancelled")
    lab.retry(first)
    job = lab.submit(after=["prepare"])
    blocked = next(candidate for candidate in shown(lab).candidates if candidate.job_id == job.job_id)
    assert [(dep.label, dep.on) for dep in blocked.unmet] == [("lab/1 prepare", DependencyKind.SUCCEEDED)]


def test_jobs_start_by_priority_then_by_age() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    first = lab.running_job(resources={"cpus": 8})
    jobs = [lab.submit(priority=priority, resources={"cpus": 8}) for priority in (0, 5, 0, 5)]
    numbers = []
    for _ in jobs:
        lab.stop(first)
        lab.run_loops()
        first = next(job for job in jobs if lab.status(job) in ("starting", "running"))
        numbers.append(first.number)
    assert numbers == [3, 5, 2, 4]


def test_holdings_contain_no_waiting_attempt() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(resources={"gpus": 4}, time_limit="1h")
    lab.submit(resources={"gpus": 4})
    seen = shown(lab)
    assert [(h.job_id, h.time_limit_s) for h in seen.holdings] == [(job.job_id, 3600.0)]
    assert len(seen.candidates) == 1


@pytest.mark.parametrize(
    "state,is_alive,because,reason",
    [
        (NodeState.READY, True, "", None),
        (NodeState.READY, False, "", "not answering"),
        (NodeState.CORDONED, True, "", "cordoned by ana"),
        (NodeState.CORDONED, False, "", "cordoned by ana"),
        (NodeState.DRAINING, True, "bad NVLink", "being drained by ana"),
        (NodeState.DRAINED, True, "bad NVLink", "drained by ana"),
        (NodeState.DEAD, True, "burnt", "declared dead by ana"),
    ],
)
def test_closed_node_names_the_operator_the_time_and_the_reason(
    state: NodeState, is_alive: bool, because: str, reason: str | None
) -> None:
    facts = msgspec.structs.replace(node_facts("n1"), is_alive=is_alive)
    node = Node(facts=facts, engine="fake", state=state, because=because, by="ana", changed_at=NOW - 7300)
    view = node_view(node)
    assert view.closed_because == reason
    is_closed = state is not NodeState.READY
    assert (view.closed_at, view.closed_note) == ((NOW - 7300, because) if is_closed else (None, ""))


@pytest.mark.parametrize("is_alive,reason", [(True, None), (False, "drained in Slurm: bad fan")])
def test_node_closed_by_its_cluster_shows_the_clusters_reason(is_alive: bool, reason: str | None) -> None:
    facts = msgspec.structs.replace(node_facts("n1"), is_alive=is_alive, closed="drained in Slurm: bad fan")
    assert node_view(Node(facts=facts, engine="fake")).closed_because == reason


def test_element_of_an_array_that_a_job_waits_for_is_named_with_its_index() -> None:
    lab = ControlPlaneLab(script=FAILS)
    lab.submit_all(name="prepare", array=2)
    follower = lab.submit(after=["prepare"])
    assert [dep.label for dep in follower.after] == ["lab/1 prepare[0]", "lab/2 prepare[1]"]


@pytest.mark.parametrize("watts", ["lots", "-1", "inf", "nan", ""])
def test_node_with_an_invalid_power_label_is_closed_and_says_so(watts: str) -> None:
    facts = msgspec.structs.replace(node_facts("n1"), labels={"rack": "r1", "gpu_watts": watts})
    node = Node(facts=facts, engine="fake")
    reason = f"closed until its label `gpu_watts` is a number of watts, such as 700: it is `{watts}`"
    assert node_view(node).closed_because == reason
    assert not node.takes_work
    view = render_node(node, (), None)
    assert reason in view["remarks"]
    assert state_of(dict(view)) == "closed"


def test_node_whose_power_labels_are_numbers_takes_work() -> None:
    facts = msgspec.structs.replace(node_facts("n1"), labels={"idle_watts": "400.5", "gpu_watts": "0"})
    assert node_view(Node(facts=facts, engine="fake")).closed_because is None


@pytest.mark.parametrize(
    "seconds,text",
    [
        (-5, "0 s"),
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (7300, "2 h"),
        (200_000, "2 d"),
    ],
)
def test_duration_is_shown_in_words(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_job_that_was_not_planned_for_says_so() -> None:
    lab = ControlPlaneLab()
    job = lab.submit()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert explanation.why is WaitReason.BEHIND
    assert explanation.sentence.startswith("it is about to be looked at")


def test_running_job_that_renews_needs_no_explanation() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    assert lab.plane.explain(job, lab.attempts(job)) is None
    lab.stop(job)
    lab.watch()
    assert lab.plane.explain(job, lab.attempts(job)) is None


def test_a_silent_job_is_called_unreachable_and_not_dead() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence="10m")
    lab.cluster.cut("n1")
    lab.clock.advance(120)
    lab.watch()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert explanation.why is WaitReason.UNREACHABLE
    assert explanation.sentence == "no sign of life from n1 for 2 min; unreachable is not dead"
    assert explanation.details == (
        "nothing is started in its place without evidence, or before 11 min of silence",
    )
    assert explanation.hint == (
        "if you know that it is off: `shoal nodes declare-dead n1`, once its cluster has noticed, too: "
        "`shoal nodes` calls it silent then"
    )
    fence_s = 600.0 + FENCE_MARGIN_S
    facts = {"silent_s": 120.0, "fence_s": fence_s, "fence_left_s": fence_s - 120.0, "nodes": ["n1"]}
    assert explanation.facts == facts


def test_a_gang_ends_no_sooner_than_the_last_of_its_silent_nodes_is_fenced() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    job = lab.running_job(fence="10m", resources={"nodes": 2, "cpus": 1})
    lab.cluster.cut("n1")
    lab.clock.advance(300)
    lab.watch()
    lab.cluster.cut("n2")
    lab.clock.advance(60)
    lab.watch()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert (explanation.facts["silent_s"], explanation.facts["fence_left_s"]) == (
        360.0,
        600.0 + FENCE_MARGIN_S - 60.0,
    )


def test_only_the_silent_nodes_of_a_gang_are_named() -> None:
    """The hint tells people to declare a node dead, so it must never name a node that renews."""
    lab = ControlPlaneLab(num_nodes=3)
    job = lab.running_job(resources={"nodes": 3, "cpus": 1})
    lab.cluster.cut("n2")
    lab.clock.advance(30)
    lab.watch()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert explanation.sentence.startswith("no sign of life from n2 for 30 s")
    assert explanation.hint == (
        "if you know that it is off: `shoal nodes declare-dead n2`, once its cluster has noticed, too: "
        "`shoal nodes` calls it silent then"
    )
    assert explanation.facts["nodes"] == ["n2"]


def test_engine_reason_of_a_job_that_does_not_begin_is_shown() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    lab.engine.lose_connection(Verb.SUBMIT)
    job = lab.submit()
    lab.place()
    lab.watch()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert (explanation.why, explanation.sentence) == (
        WaitReason.NOT_BEGUN,
        "it was placed on n1 and has not begun yet",
    )
    assert explanation.details == ("submit: no connection to the fake cluster",)
    lab.clock.advance(30)
    lab.watch()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert explanation.details[0] == "it has not begun: submit: no connection to the fake cluster"


def test_job_that_was_never_submitted_says_that_its_cluster_does_not_answer() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    lab.engine.lose_cluster()
    lab.run_loops()
    lab.clock.advance(60)
    lab.run_loops()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert (explanation.why, explanation.sentence) == (
        WaitReason.NOT_BEGUN,
        "not handed to the Fake yet: it does not answer",
    )
    details = ("it is handed over when the Fake answers",)
    assert explanation.details == details, "the cluster's words are for operators"
    assert "declare-dead" not in (explanation.hint or "")
    assert explanation.facts == {"in_short": "cluster away"}
    attempt_id = lab.attempt(job).attempt_id
    lab.core.running.leases.note_trouble(attempt_id, "n1", CLUSTER_UNREACHABLE)
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert not explanation.sentence.startswith("not handed"), "its engine may have it"
    assert "no connection" not in str(explanation), "the reason is not shown then"


def test_job_under_submission_to_a_late_cluster_says_so() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    explanations: list[Explanation | None] = []

    def hang() -> None:
        with lab.core.link.outages.asking():
            for passed_s in (0.0, LATE_S, QUIET_S):
                lab.clock.advance(passed_s)
                explanations.append(lab.plane.explain(job, lab.attempts(job)))

    lab.engine.meanwhile("before submit", hang)
    lab.place()
    in_time, *late = explanations
    assert in_time is None
    for explanation in late:
        assert explanation is not None
        assert explanation.sentence == "not handed to the Fake yet: it does not answer"
        assert explanation.facts == {"in_short": "cluster away"}
    assert lab.plane.explain(job, lab.attempts(job)) is None, "it was handed over"


def test_cluster_queue_reason_is_shown_in_short() -> None:
    lab = ControlPlaneLab(script=lambda _: Act(claim_s=5.0, run_s=None), num_nodes=1)
    job = lab.running_job()
    attempt_id = lab.attempt(job).attempt_id
    examples = {
        "Slurm job 5 is PENDING (Resources), Slurm expects it soon": "fake: PENDING (Resources)",
        CLUSTER_UNREACHABLE: "cluster away",
        "something else": None,
    }
    for raw, in_short in examples.items():
        lab.core.running.leases.note_trouble(attempt_id, "n1", raw, is_queued=True)
        explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
        assert explanation is not None
        assert (explanation.details, explanation.facts.get("in_short")) == ((f"n1: {raw}",), in_short)
    lab.core.running.leases.note_trouble(attempt_id, "n1", "Slurm job 5 is RUNNING")
    assert lab.core.running.leases.queue_reasons(attempt_id) == (), "Slurm has started it"


def test_retried_job_says_how_the_last_attempt_ended() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    for _ in range(2):
        lab.run_loops()
        lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n1")
        lab.watch()
    lab.place()
    explanation = lab.plane.explain(job, lab.attempts(job))
    assert explanation is not None
    assert explanation.why is WaitReason.BACKOFF
    assert explanation.details == ("attempt 2 ended: lost: n1: its supervisor is gone",)


def test_healthy_node_does_not_hide_the_trouble_of_another() -> None:
    def script(task_spec: TaskSpec) -> Act:
        return Act(claim_s=5.0 if task_spec.identity.node == "n1" else 0.0, run_s=None)

    lab = ControlPlaneLab(script=script)
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert (explanation.why, explanation.details) == (WaitReason.NOT_BEGUN, ("n1: sent",))
    lab.clock.advance(5)
    lab.watch()
    assert lab.plane.explain(lab.stored_job(job), lab.attempts(job)) is None
