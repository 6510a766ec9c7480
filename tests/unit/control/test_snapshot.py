"""What the scheduler is shown, and what people are told when it says no."""

from __future__ import annotations

import msgspec
import pytest

from shoal.api.render import render_node
from shoal.cli.nodes import state_of
from shoal.control.leases import FENCE_MARGIN_S, QUIET_S
from shoal.control.outage import LATE_S
from shoal.control.queue import Queue, look
from shoal.control.snapshot import node_view
from shoal.engines.base import CANNOT_ASK
from shoal.engines.fake import Act, Verb, always
from shoal.model.job import DependencyKind, Job
from shoal.model.node import Node, NodeState
from shoal.scheduler import Explanation, Planner, Policy, Snapshot, Stamps, Why
from shoal.scheduler.words import age
from shoal.wire import EndKind, Order
from tests.support.lab import Lab, node_facts

NOW = 1_000_000.0
FAILS = always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1))


def read(lab: Lab) -> tuple[Queue, Snapshot]:
    """What a control plane that starts now would read, and what its planner would be told."""
    planner = Planner(Policy())
    queue = Queue(planner, lab.core.backoff, Stamps())
    queue.take_in(lab.read(lambda tx: look(tx, None)))
    queue.wake(lab.clock.now())
    return queue, planner.snapshot()


def shown(lab: Lab) -> Snapshot:
    return read(lab)[1]


def ended(lab: Lab, how: str) -> Job:
    """A job called `prepare` that ended this way."""
    job = lab.running(name="prepare")
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
    lab = Lab(script=FAILS if how == "failed" else always(Act(run_s=1.0)))
    ended(lab, how)
    job = lab.submit(after=[f"prepare:{on}"])
    assert read(lab)[0].doomed == [(lab.attempt(job).attempt_id, sentence)]
    lab.place()
    assert (lab.status(job), lab.job(job).because) == ("cancelled", sentence)


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
def test_a_dependency_that_ended_as_it_should_is_in_nobodys_way(how: str, on: str) -> None:
    lab = Lab(script=FAILS if how == "failed" else always(Act(run_s=1.0)))
    ended(lab, how)
    lab.submit(after=[f"prepare:{on}"])
    queue, seen = read(lab)
    assert (queue.doomed, [c.unmet for c in seen.candidates]) == ([], [()])


def test_doom_spreads_along_a_chain_to_its_end() -> None:
    lab = Lab()
    first = lab.submit(name="a")
    lab.submit(name="b", after=["a"])
    last = lab.submit(name="c", after=["b"])
    lab.stop(first)
    lab.place()
    lab.place()
    assert lab.status(last) == "cancelled"
    assert lab.job(last).because == ("lab/2 b was cancelled; this job was to start only after it succeeded")


def test_a_dependency_that_is_open_again_is_waited_for_again() -> None:
    lab = Lab(script=always(Act(run_s=1.0)))
    first = ended(lab, "cancelled")
    lab.retry(first)
    job = lab.submit(after=["prepare"])
    blocked = next(one for one in shown(lab).candidates if one.job_id == job.job_id)
    assert [(dep.label, dep.on) for dep in blocked.unmet] == [("lab/1 prepare", DependencyKind.SUCCEEDED)]


def test_jobs_start_by_priority_then_by_age() -> None:
    lab = Lab(num_nodes=1)
    first = lab.running(resources={"cpus": 8})
    jobs = [lab.submit(priority=priority, resources={"cpus": 8}) for priority in (0, 5, 0, 5)]
    order = []
    for _ in jobs:
        lab.stop(first)
        lab.turn()
        first = next(job for job in jobs if lab.status(job) in ("starting", "running"))
        order.append(first.number)
    assert order == [3, 5, 2, 4]


def test_what_holds_resources_is_shown_and_what_waits_is_not_among_it() -> None:
    lab = Lab(num_nodes=1)
    job = lab.running(resources={"gpus": 4}, time_limit="1h")
    lab.submit(resources={"gpus": 4})
    seen = shown(lab)
    assert [(h.job_id, h.time_limit_s) for h in seen.holdings] == [(job.job_id, 3600.0)]
    assert len(seen.candidates) == 1


@pytest.mark.parametrize(
    "state,is_alive,because,told",
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
def test_a_closed_node_says_who_closed_it_when_and_why(
    state: NodeState, is_alive: bool, because: str, told: str | None
) -> None:
    facts = msgspec.structs.replace(node_facts("n1"), is_alive=is_alive)
    node = Node(facts=facts, engine="fake", state=state, because=because, by="ana", changed_at=NOW - 7300)
    view = node_view(node)
    assert view.closed_because == told
    is_closed = state is not NodeState.READY
    assert (view.closed_at, view.closed_note) == ((NOW - 7300, because) if is_closed else (None, ""))


@pytest.mark.parametrize("is_alive,told", [(True, None), (False, "drained in Slurm: bad fan")])
def test_node_that_its_cluster_has_closed_says_so_in_the_cluster_s_words(
    is_alive: bool, told: str | None
) -> None:
    facts = msgspec.structs.replace(node_facts("n1"), is_alive=is_alive, closed="drained in Slurm: bad fan")
    assert node_view(Node(facts=facts, engine="fake")).closed_because == told


def test_element_of_an_array_that_a_job_waits_for_is_named_with_its_index() -> None:
    lab = Lab(script=FAILS)
    lab.submit_all(name="prepare", array=2)
    follower = lab.submit(after=["prepare"])
    assert [dep.label for dep in follower.after] == ["lab/1 prepare[0]", "lab/2 prepare[1]"]


@pytest.mark.parametrize("said", ["lots", "-1", "inf", "nan", ""])
def test_node_whose_power_label_is_no_number_of_watts_is_closed_and_says_so(said: str) -> None:
    facts = msgspec.structs.replace(node_facts("n1"), labels={"rack": "r1", "gpu_watts": said})
    node = Node(facts=facts, engine="fake")
    told = f"closed until its label `gpu_watts` is a number of watts, such as 700: it is `{said}`"
    assert node_view(node).closed_because == told
    assert not node.takes_work
    view = render_node(node, (), None)
    assert told in view["remarks"]
    assert state_of(dict(view)) == "closed"


def test_node_whose_power_labels_are_numbers_takes_work() -> None:
    facts = msgspec.structs.replace(node_facts("n1"), labels={"idle_watts": "400.5", "gpu_watts": "0"})
    assert node_view(Node(facts=facts, engine="fake")).closed_because is None


@pytest.mark.parametrize(
    "seconds,told",
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
def test_a_duration_is_said_as_people_say_it(seconds: float, told: str) -> None:
    assert age(seconds) == told


def test_a_job_nobody_has_planned_for_yet_says_so() -> None:
    lab = Lab()
    job = lab.submit()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert told.why is Why.BEHIND
    assert told.sentence.startswith("it is about to be looked at")


def test_a_job_that_runs_and_is_heard_from_needs_no_explanation() -> None:
    lab = Lab()
    job = lab.running()
    assert lab.plane.explain(job, lab.attempts(job)) is None
    lab.stop(job)
    lab.watch()
    assert lab.plane.explain(job, lab.attempts(job)) is None


def test_a_silent_job_is_called_unreachable_and_not_dead() -> None:
    lab = Lab(num_nodes=1)
    job = lab.running(fence="10m")
    lab.cluster.cut("n1")
    lab.clock.advance(120)
    lab.watch()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert told.why is Why.UNREACHABLE
    assert told.sentence == "no sign of life from n1 for 2 min; unreachable is not dead"
    assert told.details == ("nothing is started in its place without evidence, or before 11 min of silence",)
    assert told.hint == (
        "if you know that it is off: `shoal nodes declare-dead n1`, once its cluster has noticed, too: "
        "`shoal nodes` calls it silent then"
    )
    fence_s = 600.0 + FENCE_MARGIN_S
    facts = {"silent_s": 120.0, "fence_s": fence_s, "fence_left_s": fence_s - 120.0, "nodes": ["n1"]}
    assert told.facts == facts


def test_a_gang_ends_no_sooner_than_the_last_of_its_silent_nodes_is_fenced() -> None:
    lab = Lab(num_nodes=2)
    job = lab.running(fence="10m", resources={"nodes": 2, "cpus": 1})
    lab.cluster.cut("n1")
    lab.clock.advance(300)
    lab.watch()
    lab.cluster.cut("n2")
    lab.clock.advance(60)
    lab.watch()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert (told.facts["silent_s"], told.facts["fence_left_s"]) == (360.0, 600.0 + FENCE_MARGIN_S - 60.0)


def test_only_the_silent_nodes_of_a_gang_are_named() -> None:
    """The hint tells people to declare a node dead: it must never name one that is heard from."""
    lab = Lab(num_nodes=3)
    job = lab.running(resources={"nodes": 3, "cpus": 1})
    lab.cluster.cut("n2")
    lab.clock.advance(30)
    lab.watch()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert told.sentence.startswith("no sign of life from n2 for 30 s")
    assert told.hint == (
        "if you know that it is off: `shoal nodes declare-dead n2`, once its cluster has noticed, too: "
        "`shoal nodes` calls it silent then"
    )
    assert told.facts["nodes"] == ["n2"]


def test_what_the_engine_says_about_a_job_that_does_not_begin_is_told() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    lab.engine.lose(Verb.SUBMIT)
    job = lab.submit()
    lab.place()
    lab.watch()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert (told.why, told.sentence) == (Why.NOT_BEGUN, "it was placed on n1 and has not begun yet")
    assert told.details == ("submit: no connection to the fake cluster",)
    lab.clock.advance(30)
    lab.watch()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert told.details[0] == "it has not begun: submit: no connection to the fake cluster"


def test_a_job_that_was_never_handed_over_says_that_its_cluster_does_not_answer() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    lab.engine.lose_all()
    lab.turn()
    lab.clock.advance(60)
    lab.turn()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert (told.why, told.sentence) == (
        Why.NOT_BEGUN,
        "not handed to the Fake yet: it does not answer",
    )
    words = ("it is handed over when the Fake answers",)
    assert told.details == words, "the cluster's words are for operators"
    assert "declare-dead" not in (told.hint or "")
    assert told.facts == {"in_short": "cluster away"}
    attempt_id = lab.attempt(job).attempt_id
    lab.core.leases.trouble(attempt_id, "n1", CANNOT_ASK)
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert not told.sentence.startswith("not handed"), "its engine may have it"
    assert "no connection" not in str(told), "nor are they told then"


def test_a_job_that_is_being_handed_to_a_cluster_whose_answer_is_late_says_so() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    found: list[Explanation | None] = []

    def hang() -> None:
        with lab.core.outages.asking():
            for passed_s in (0.0, LATE_S, QUIET_S):
                lab.clock.advance(passed_s)
                found.append(lab.plane.explain(job, lab.attempts(job)))

    lab.engine.meanwhile("before submit", hang)
    lab.place()
    in_time, *late = found
    assert in_time is None
    for told in late:
        assert told is not None
        assert told.sentence == "not handed to the Fake yet: it does not answer"
        assert told.facts == {"in_short": "cluster away"}
    assert lab.plane.explain(job, lab.attempts(job)) is None, "it was handed over"


def test_what_a_cluster_lets_a_job_wait_for_is_told_in_short() -> None:
    lab = Lab(script=lambda _: Act(claim_s=5.0, run_s=None), num_nodes=1)
    job = lab.running()
    attempt_id = lab.attempt(job).attempt_id
    said = {
        "Slurm job 5 is PENDING (Resources), Slurm expects it soon": "fake: PENDING (Resources)",
        CANNOT_ASK: "cluster away",
        "something else": None,
    }
    for words, in_short in said.items():
        lab.core.leases.trouble(attempt_id, "n1", words, is_queued=True)
        told = lab.plane.explain(lab.job(job), lab.attempts(job))
        assert told is not None
        assert (told.details, told.facts.get("in_short")) == ((f"n1: {words}",), in_short)
    lab.core.leases.trouble(attempt_id, "n1", "Slurm job 5 is RUNNING")
    assert lab.core.leases.waits(attempt_id) == (), "Slurm has started it"


def test_a_job_that_is_tried_again_says_how_the_last_attempt_ended() -> None:
    lab = Lab(num_nodes=1)
    job = lab.running()
    for _ in range(2):
        lab.turn()
        lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n1")
        lab.watch()
    lab.place()
    told = lab.plane.explain(job, lab.attempts(job))
    assert told is not None
    assert told.why is Why.BACKOFF
    assert told.details == ("attempt 2 ended: lost: n1: its supervisor is gone",)


def test_one_healthy_node_does_not_hide_what_keeps_another_of_its_gang() -> None:
    def script(order: Order) -> Act:
        return Act(claim_s=5.0 if order.node == "n1" else 0.0, run_s=None)

    lab = Lab(script=script)
    job = lab.running(resources={"nodes": 2, "cpus": 1})
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert (told.why, told.details) == (Why.NOT_BEGUN, ("n1: sent",))
    lab.clock.advance(5)
    lab.watch()
    assert lab.plane.explain(lab.job(job), lab.attempts(job)) is None
