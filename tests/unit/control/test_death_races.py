"""A node that was declared dead or drained, and is not any more when that is acted upon.

Whoever speaks there, or an operator who takes his word back, is heard until the end is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shoal.control.heal import heal
from shoal.control.leases import QUIET_S
from shoal.control.nodes import set_node_state
from shoal.engines.fake import Act, always
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.store import Tx
from tests.support.lab import ANA, Lab, now
from tests.unit.control.test_fence_races import (
    ALONE,
    GANG,
    of,
    on_disk,
    pass_by,
    speak_while_it_ends,
)

MANY = {"max": 3, "on": ["exit", "signal"]}


def resume(lab: Lab, name: str) -> None:
    now(lab.plane.set_node_state(ANA, name, NodeState.READY))


def declared_dead(resources: dict[str, int]) -> tuple[Lab, Job]:
    """A job on n1, which is silent and was declared dead; nobody has acted upon that."""
    lab = Lab(num_nodes=resources.get("nodes", 1))
    job = lab.running(resources=resources)
    lab.cluster.cut("n1")
    pass_by(lab, QUIET_S + 1)
    lab.heal()
    now(lab.plane.set_node_state(ANA, "n1", NodeState.DEAD))
    return lab, job


@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_who_was_told_to_go_on_since_the_look_is_not_buried(resources: dict[str, int]) -> None:
    lab, job = declared_dead(resources)
    before = lab.attempt(job)
    lab.store.meanwhile("before write", lambda: now(lab.plane.renew(of(before))))
    lab.heal()
    assert lab.attempts(job) == [before]
    pass_by(lab, QUIET_S + 1)
    lab.heal()
    assert lab.attempts(job)[0] != before, "it has said nothing since"


@pytest.mark.parametrize("when", ["after read", "before write", "after write"])
@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_who_speaks_is_not_buried_before_it_is_answered(resources: dict[str, int], when: str) -> None:
    lab, job = declared_dead(resources)
    before = lab.attempt(job)
    lab.store.meanwhile(when, lab.heal)
    now(lab.plane.renew(of(before)))
    lab.store.meanwhile(when, lambda: None)
    assert lab.attempts(job) == [before]


@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_nothing_is_buried_after_the_operator_has_taken_his_word_back(resources: dict[str, int]) -> None:
    lab, job = declared_dead(resources)
    before = lab.attempt(job)
    lab.store.meanwhile("before write", lambda: resume(lab, "n1"))
    lab.heal()
    assert lab.attempts(job) == [before]


def test_nothing_is_buried_that_its_cluster_has_seen_since_the_look() -> None:
    lab, job = declared_dead(ALONE)
    before = lab.attempt(job)

    def is_seen() -> None:
        def change(tx: Tx) -> None:
            node = tx.nodes.get("n1")
            assert node is not None
            facts = msgspec.structs.replace(node.facts, is_alive=True)
            tx.nodes.put(msgspec.structs.replace(node, facts=facts, version=node.version + 1))

        now(lab.store.inner.write(change))

    lab.store.meanwhile("before write", is_seen)
    lab.heal()
    assert lab.attempts(job) == [before]


def give_away(lab: Lab) -> Job:
    """A gang whose share on n2 is to be given to n3 by the next plan, as n2 was declared dead."""
    job = lab.running(resources=GANG, retry=MANY)
    lab.cluster.cut("n2")
    pass_by(lab, QUIET_S + 1)
    lab.heal()
    now(lab.plane.set_node_state(ANA, "n2", NodeState.DEAD))
    lab.heal()
    assert lab.attempt(job).node_names == ("n1", "n2")
    return job


@pytest.mark.parametrize("what", ["nothing", "a word", "another decision"])
def test_the_share_of_a_node_that_is_not_dead_any_more_is_not_given_to_another(what: str) -> None:
    lab = Lab(num_nodes=3)
    job = give_away(lab)
    before = lab.attempt(job)
    happening: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a word": lambda: now(lab.plane.renew(of(before, "n2"))),
        "another decision": lambda: resume(lab, "n2"),
    }
    lab.store.meanwhile("before write", happening[what])
    lab.place()
    assert lab.attempt(job).node_names == (("n1", "n3") if what == "nothing" else ("n1", "n2"))


@pytest.mark.parametrize("is_resumed", [True, False])
def test_what_runs_on_a_node_that_was_resumed_since_the_look_is_not_stopped(is_resumed: bool) -> None:
    lab = Lab(script=always(Act(run_s=None, stop_s=5.0)))
    job = lab.running()
    (name,) = lab.attempt(job).node_names
    now(lab.plane.set_node_state(ANA, name, NodeState.DRAINING))
    if is_resumed:
        lab.store.meanwhile("before write", lambda: resume(lab, name))
    lab.heal()
    assert lab.status(job) == ("running" if is_resumed else "stopping")


def test_a_gang_that_has_left_the_node_since_the_look_is_not_stopped_for_its_drain() -> None:
    lab = Lab(num_nodes=3)
    job = give_away(lab)
    now(lab.plane.set_node_state(ANA, "n2", NodeState.DRAINING))
    before = lab.attempt(job)

    def move() -> None:
        now(lab.plane.set_node_state(ANA, "n2", NodeState.DEAD))
        lab.place()
        now(lab.plane.set_node_state(ANA, "n2", NodeState.DRAINING))

    lab.store.meanwhile("before write", move)
    lab.heal()
    assert before.node_names == ("n1", "n2")
    assert (lab.status(job), lab.attempt(job).node_names) == ("running", ("n1", "n3"))


@pytest.mark.anyio
async def test_what_is_read_while_it_is_being_buried_tells_nobody_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is decided and not committed yet: a read still finds an attempt that runs."""
    core, _, _, attempt = await on_disk(tmp_path, silent_s=QUIET_S + 1)
    await heal(core)
    await set_node_state(core, ANA, "n1", NodeState.DEAD, "", None)
    await speak_while_it_ends(core, attempt, heal, monkeypatch)
    ended = await core.store.read(lambda tx: tx.attempts.get(attempt.attempt_id))
    assert ended is not None
    assert ended.reason is EndReason.LOST
    await core.store.close()
