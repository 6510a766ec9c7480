"""Where nobody is known to keep a fence: what is held, what is stopped for it, and what ends the wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from shoal.control.absences import GONE_S
from shoal.control.leases import FENCE_MARGIN_S
from shoal.control.watch import REPLACED_S, _compare
from shoal.engines.base import Observation, Sight
from shoal.engines.fake import FakeEngine
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.moves import OrphanCleared, Orphaned, Regrouped, step
from shoal.model.node import NodeFacts, NodeState
from shoal.wire import EndKind, NodeOutcome
from tests.support.lab import ANA, Lab, now
from tests.unit.control.test_fences_and_limits import FENCE_S, let_pass, reasons

GANG = {"nodes": 2, "cpus": 1, "gpus": 2}
RETRY = {"max": 3, "on": ["exit", "signal"]}
LOST = NodeOutcome(attempt_id="", epoch=0, node="n2", kind=EndKind.LOST, ended_at=2.0)
PAST_FENCE_S = FENCE_S + FENCE_MARGIN_S + 30.0


def a_gang(lab: Lab, **fields: object) -> Job:
    return lab.running(**{"resources": GANG, "retry": RETRY, "fence": f"{FENCE_S:.0f}s", **fields})


class Doubt:
    """What the cluster says of silent shares, whatever becomes of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sight = Sight.DOUBTFUL
        self.is_hearsay = True
        self.is_cleared = False
        listed = FakeEngine.list_owned

        async def list_owned(engine: FakeEngine) -> list[Observation]:
            return [self._seen(one) for one in await listed(engine)]

        monkeypatch.setattr(FakeEngine, "list_owned", list_owned)

    def _seen(self, one: Observation) -> Observation:
        if one.sight is not Sight.UNKNOWN:
            return one
        return msgspec.structs.replace(
            one,
            sight=self.sight,
            is_hearsay=self.is_hearsay,
            is_cleared=self.is_cleared,
            raw="Kill task failed",
        )


@pytest.fixture
def doubt(monkeypatch: pytest.MonkeyPatch) -> Doubt:
    return Doubt(monkeypatch)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_dies_slowly_costs_a_share_and_not_its_attempt(is_restarted: bool) -> None:
    lab = Lab()
    job = a_gang(lab)
    lab.cluster.orphan(lab.attempt(job).attempt_id, "n2", 30)
    let_pass(lab, 15)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.orphans_left, attempt.generation) == (AttemptState.RUNNING, ("n2",), 0)
    assert len(lab.cluster.running()) == 2, "nothing is begun beside it, and nobody stopped"
    if is_restarted:
        lab.restart()
    let_pass(lab, 30)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.generation, attempt.orphaned_nodes) == (AttemptState.RUNNING, 1, ())
    assert {(one.node, one.incarnation) for one in lab.cluster.running()} == {("n1", 0), ("n2", 1)}
    assert (len(lab.attempts(job)), lab.job(job).losses, lab.job(job).failures) == (1, 0, 0)


def test_peers_that_fail_meanwhile_begin_anew_and_go_on_with_the_share_in_its_place() -> None:
    """The loss explains their failures, also before it is one: they cost no retry. The next failure does."""
    lab = Lab()
    job = a_gang(lab, retry={**RETRY, "max": 1})
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 30)
    let_pass(lab, 10)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.generation, attempt.orphans_left) == (AttemptState.RUNNING, 1, ("n2",))
    let_pass(lab, 30)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.generation, attempt.restarts) == (AttemptState.RUNNING, 2, 0)
    assert {(one.node, one.incarnation) for one in lab.cluster.running()} == {("n1", 0), ("n2", 2)}
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.generation, attempt.restarts) == (AttemptState.RUNNING, 3, 1)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 30)
    assert (lab.job(job).outcome, lab.job(job).failures, lab.job(job).losses) == ("failed", 2, 0)


def test_ranks_that_fail_where_a_share_is_waited_for_do_so_for_nothing_for_a_minute_at_most(
    doubt: Doubt,
) -> None:
    """A doubt lasts: a program that fails again and again ends all the same."""
    lab = Lab()
    job = a_gang(lab, retry={**RETRY, "max": 1}, fence="1h")
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.cut("n2")
    let_pass(lab, 10)
    for excused in (1, 2):
        lab.cluster.kill_rank(attempt_id, "n1")
        let_pass(lab, 10)
        assert (lab.attempt(job).excused, lab.attempt(job).restarts) == (excused, 0)
    let_pass(lab, REPLACED_S)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    assert (lab.attempt(job).excused, lab.attempt(job).restarts) == (2, 1)
    lab.cluster.kill_rank(attempt_id, "n1")
    let_pass(lab, 10)
    assert lab.status(job) == "stopping"


def test_ranks_whose_peers_machine_was_switched_off_fail_for_nothing_once() -> None:
    """They fail before anybody says that it is gone; those of a program that fails by itself do so later."""
    lab = Lab()
    job = a_gang(lab, retry={**RETRY, "max": 1}, fence="1h")
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.cut("n2")
    let_pass(lab, 10)
    for excused, restarts in ((1, 0), (1, 1)):
        lab.cluster.kill_rank(attempt_id, "n1")
        let_pass(lab, 10)
        assert (lab.attempt(job).excused, lab.attempt(job).restarts) == (excused, restarts)


def test_a_share_in_place_of_one_that_died_slowly_has_a_fence_of_its_own() -> None:
    lab = Lab()
    job = a_gang(lab)
    lab.cluster.orphan(lab.attempt(job).attempt_id, "n2", 10)
    let_pass(lab, 30)
    assert lab.attempt(job).incarnation("n2") == 1
    lab.cluster.cut("n2")
    let_pass(lab, PAST_FENCE_S)
    lab.cluster.heal("n2")
    assert lab.attempt(job).incarnation("n2") == 2


@pytest.mark.parametrize("place", ["n2", "n3"])
def test_what_was_doubted_of_a_share_is_not_doubted_of_the_one_in_its_place(place: str) -> None:
    lab = Lab()
    attempt, _ = step(lab.attempt(a_gang(lab)), Orphaned("n2", "it does not die", is_hearsay=True), 1.0)
    lost = NodeOutcome(
        attempt_id=attempt.attempt_id, epoch=attempt.epoch, node="n2", kind=EndKind.LOST, ended_at=2.0
    )
    share = msgspec.structs.replace(attempt.allocation[1], node=place)
    after, _ = step(attempt, Regrouped(0, lost, share), 2.0)
    assert (attempt.orphaned_nodes, after.orphaned_nodes) == (("n2",), ())
    assert (attempt.doubted_nodes, after.doubted_nodes) == (("n2",), ())


def test_others_wait_a_minute_for_what_does_not_die_and_are_stopped_then() -> None:
    lab = Lab()
    job = a_gang(lab, grace="10s")
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 1000)
    let_pass(lab, REPLACED_S - 10)
    assert lab.status(job) == "running"
    let_pass(lab, 20)
    assert lab.status(job) == "stopping"
    let_pass(lab, PAST_FENCE_S)
    assert (lab.status(job), lab.runs()) == ("stopping", [(attempt_id, "n2")])
    let_pass(lab, 1000, step_s=30)
    assert reasons(lab, job) == [EndReason.LOST, None]


@pytest.mark.parametrize("place", ["n2", "n3"])
def test_what_was_seen_of_a_share_stops_nobody_once_another_has_its_place(place: str) -> None:
    """The look, and what was read before it, may be seconds old: a peer's failure has made another look."""
    lab = Lab(num_nodes=3)
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", REPLACED_S + 20)
    let_pass(lab, REPLACED_S - 5)
    before, seen = lab.attempt(job), {one.node: one for one in now(lab.engine.list_owned())}
    assert (before.orphans_left, seen["n2"].sight) == (("n2",), Sight.ORPHANED)
    lost = msgspec.structs.replace(LOST, attempt_id=attempt_id, epoch=before.epoch)
    share = msgspec.structs.replace(before.allocation[1], node=place)
    now(
        lab.store.write(lambda tx: lab.plane.core.recorder.advance(tx, attempt_id, Regrouped(0, lost, share)))
    )
    lab.clock.advance(10)
    now(_compare(lab.plane.core, lab.job(job), before, {attempt_id: seen}))
    assert (lab.status(job), lab.attempt(job).orphaned_nodes) == ("running", ())


def test_whether_others_wait_is_decided_of_the_attempt_as_it_is() -> None:
    lab = Lab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 1000)
    let_pass(lab, 5)
    seen = {one.node: one for one in now(lab.engine.list_owned())}
    old = msgspec.structs.replace(lab.attempt(job), orphaned_nodes=("n1", "n2"))  # n1 is heard from again
    now(_compare(lab.plane.core, lab.job(job), old, {attempt_id: seen}))
    assert lab.status(job) == "running"


def test_a_share_that_began_after_the_attempt_was_read_is_looked_at_next_time() -> None:
    lab = Lab()
    job = a_gang(lab)
    attempt = lab.attempt(job)
    [seen] = [one for one in now(lab.engine.list_owned()) if one.node == "n2"]
    seen = msgspec.structs.replace(seen, sight=Sight.ORPHANED, incarnation=1)
    now(_compare(lab.plane.core, lab.job(job), attempt, {attempt.attempt_id: {"n1": seen, "n2": seen}}))
    assert (lab.status(job), lab.attempt(job).orphaned_nodes) == ("running", ())


@pytest.mark.parametrize("fields", [{"retry": {"max": 0}}, {"resources": {"nodes": 1, "cpus": 1}}])
def test_where_no_share_could_take_its_place_nobody_waits(fields: dict[str, object]) -> None:
    lab = Lab()
    job = a_gang(lab, **fields)
    lab.cluster.orphan(lab.attempt(job).attempt_id, lab.attempt(job).node_names[-1], 1000)
    let_pass(lab, 1)
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.stop_reason) == (AttemptState.STOPPING, EndReason.LOST)
    assert lab.job(job).stop_asked_by is None


def test_where_nothing_of_it_is_supervised_any_more_nobody_waits() -> None:
    lab = Lab()
    job = a_gang(lab)
    for node in ("n1", "n2"):
        assert lab.status(job) == "running"
        lab.cluster.orphan(lab.attempt(job).attempt_id, node, 1000)
        let_pass(lab, 1)
    assert lab.status(job) == "stopping"


@pytest.mark.parametrize("resources", [GANG, {"nodes": 1, "cpus": 1}])
def test_on_a_doubt_no_fence_passes_and_nothing_is_stopped(doubt: Doubt, resources: dict[str, int]) -> None:
    lab = Lab()
    job = a_gang(lab, resources=resources, fence="1h")
    last = lab.attempt(job).node_names[-1]
    lab.cluster.cut(last)
    let_pass(lab, 10 * REPLACED_S)
    assert (lab.status(job), lab.attempt(job).orphans_left) == ("running", (last,))
    lab.cluster.heal(last)
    let_pass(lab, 5)
    assert (lab.status(job), lab.attempt(job).orphaned_nodes) == ("running", ())
    assert len(lab.runs()) == resources["nodes"], "it was healthy all the time"


@pytest.mark.parametrize("sight", [Sight.DOUBTFUL, Sight.ORPHANED])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_fence_counts_from_when_a_doubt_was_withdrawn(
    doubt: Doubt, sight: Sight, is_restarted: bool
) -> None:
    lab = Lab(num_nodes=1)
    job = lab.running(fence=f"{FENCE_S:.0f}s")
    lab.cluster.cut("n1")
    doubt.sight = sight
    let_pass(lab, 3 * PAST_FENCE_S)
    doubt.sight = Sight.UNKNOWN  # and nobody says anything for it, or against it
    if is_restarted:
        lab.restart()
    let_pass(lab, 3 * PAST_FENCE_S)
    assert reasons(lab, job) == [None]
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert told.why == "orphaned"
    assert is_restarted or "n1: Kill task failed" in told.details
    doubt.is_cleared = True
    let_pass(lab, FENCE_S + FENCE_MARGIN_S)
    assert (reasons(lab, job), lab.attempt(job).orphaned_nodes) == ([None], ())
    let_pass(lab, 30)
    assert reasons(lab, job)[0] in (EndReason.FENCED, EndReason.LOST)


@pytest.mark.parametrize("word", ["cleared", "suspended"])
@pytest.mark.parametrize("is_doubted_too", [False, True])
def test_what_who_is_there_has_said_is_not_withdrawn_by_the_cluster(
    doubt: Doubt, word: str, is_doubted_too: bool
) -> None:
    """A keeper, before it was killed, too. Perhaps to a version that left no other trace than the mark."""
    lab = Lab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.cut("n2")
    if is_doubted_too:
        let_pass(lab, 5)
        assert lab.attempt(job).doubted_nodes == ("n2",)
    doubt.sight, doubt.is_hearsay = Sight.ORPHANED, False
    let_pass(lab, 5)
    assert (lab.attempt(job).orphans_left, lab.attempt(job).doubted_nodes) == (("n2",), ())
    doubt.sight, doubt.is_hearsay, doubt.is_cleared = Sight.UNKNOWN, False, True
    if word == "suspended":
        doubt.sight, doubt.is_hearsay, doubt.is_cleared = Sight.ALIVE, True, False
    lab.restart()
    let_pass(lab, 30)
    doubt.sight, doubt.is_hearsay, doubt.is_cleared = Sight.UNKNOWN, False, True
    let_pass(lab, 3 * PAST_FENCE_S)
    assert (lab.attempt(job).orphans_left, len(lab.attempts(job))) == (("n2",), 1)
    lab.cluster.heal("n2")
    let_pass(lab, 5)
    assert (lab.attempt(job).attempt_id, lab.attempt(job).orphaned_nodes) == (attempt_id, ())


def test_a_mark_that_does_not_say_whose_it_is_is_not_the_clusters() -> None:
    """As records of earlier versions have them."""
    lab = Lab()
    attempt = lab.attempt(a_gang(lab))
    told = msgspec.json.encode(Orphaned("n2", "it does not die"))
    attempt, _ = step(attempt, msgspec.json.decode(told, type=Orphaned), 1.0)
    assert attempt.orphaned_nodes == ("n2",)
    assert step(attempt, OrphanCleared("n2", is_hearsay=True), 2.0) == (attempt, ())
    after, _ = step(attempt, OrphanCleared("n2"), 2.0)
    assert after.orphaned_nodes == ()


def test_why_says_what_helps(doubt: Doubt, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(num_nodes=1)
    job = lab.running()
    lab.cluster.cut("n1")
    let_pass(lab, 5)
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert told.hint is not None
    assert told.hint.endswith("a restart ends them")
    monkeypatch.setattr(FakeEngine, "how_to_clear", lambda _, node: f"`resume {node}`", raising=False)
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert told.hint is not None
    assert told.hint.endswith("a restart ends them; `resume n1`")
    monkeypatch.setattr(FakeEngine, "how_to_clear", lambda *_: "")
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert told.hint is not None
    assert told.hint.endswith("a restart ends them")


def test_why_names_the_only_way_out_where_the_machine_is_scrapped(
    doubt: Doubt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What held it keeps it from being `gone`, and who does not list it never says that all is well there."""
    lab = Lab()
    job = a_gang(lab)
    lab.cluster.cut("n2")
    let_pass(lab, 5)
    monkeypatch.setattr(FakeEngine, "nodes", not_listing(FakeEngine.nodes, "n2"))
    for _ in range(3):
        let_pass(lab, GONE_S, step_s=30)
        lab.heal()
        lab.place()
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert told.hint is not None
    assert told.hint.endswith("; a restart ends them; if it is off for good: `shoal nodes declare-dead n2`")
    now(lab.plane.set_node_state(ANA, "n2", NodeState.DEAD, because="scrapped"))
    lab.heal()
    lab.place()
    assert lab.attempt(job).orphans_left == ()


def not_listing(nodes: Callable[..., Awaitable[list[NodeFacts]]], name: str) -> Callable[..., object]:
    async def others(engine: FakeEngine) -> list[NodeFacts]:
        return [facts for facts in await nodes(engine) if facts.name != name]

    return others
