"""A node that was declared dead or drained, and no longer is when a loop acts on it.

A renewal from the node, or an operator who withdraws the declaration, counts until the end is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shoal.control.commands.nodes import set_node_state
from shoal.control.loops.heal import heal
from shoal.control.memory.leases import QUIET_S
from shoal.engines.fake import Act, always
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.store import Tx
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of
from tests.unit.control.commands.test_fence_races import (
    ALONE,
    GANG,
    of,
    on_disk,
    pass_by,
    speak_while_it_ends,
)

MANY = {"max": 3, "on": ["exit", "signal"]}


def resume(lab: ControlPlaneLab, name: str) -> None:
    result_of(lab.plane.set_node_state(ANA, name, NodeState.READY))


def declared_dead(resources: dict[str, int]) -> tuple[ControlPlaneLab, Job]:
    """A job on n1, which is silent and was declared dead. No loop has acted on that."""
    lab = ControlPlaneLab(num_nodes=resources.get("nodes", 1))
    job = lab.running_job(resources=resources)
    lab.cluster.cut("n1")
    pass_by(lab, QUIET_S + 1)
    lab.heal()
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.DEAD))
    return lab, job


@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_task_told_to_go_on_since_the_look_is_not_reaped(resources: dict[str, int]) -> None:
    lab, job = declared_dead(resources)
    before = lab.attempt(job)
    lab.store.meanwhile("before write", lambda: result_of(lab.plane.renew(of(before))))
    lab.heal()
    assert lab.attempts(job) == [before]
    pass_by(lab, QUIET_S + 1)
    lab.heal()
    assert lab.attempts(job)[0] != before, "it has said nothing since"


@pytest.mark.parametrize("when", ["after read", "before write", "after write"])
@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_task_is_not_reaped_while_its_renewal_is_answered(resources: dict[str, int], when: str) -> None:
    lab, job = declared_dead(resources)
    before = lab.attempt(job)
    lab.store.meanwhile(when, lab.heal)
    result_of(lab.plane.renew(of(before)))
    lab.store.meanwhile(when, lambda: None)
    assert lab.attempts(job) == [before]


@pytest.mark.parametrize("resources", [ALONE, GANG])
def test_nothing_is_reaped_after_the_declaration_was_withdrawn(resources: dict[str, int]) -> None:
    lab, job = declared_dead(resources)
    before = lab.attempt(job)
    lab.store.meanwhile("before write", lambda: resume(lab, "n1"))
    lab.heal()
    assert lab.attempts(job) == [before]


def test_nothing_is_reaped_that_the_cluster_has_seen_since_the_look() -> None:
    lab, job = declared_dead(ALONE)
    before = lab.attempt(job)

    def is_seen() -> None:
        def change(tx: Tx) -> None:
            node = tx.nodes.get("n1")
            assert node is not None
            facts = msgspec.structs.replace(node.facts, is_alive=True)
            tx.nodes.put(msgspec.structs.replace(node, facts=facts, version=node.version + 1))

        result_of(lab.store.inner.write(change))

    lab.store.meanwhile("before write", is_seen)
    lab.heal()
    assert lab.attempts(job) == [before]


def give_away(lab: ControlPlaneLab) -> Job:
    """A gang whose task on n2 the next plan is to move to n3, because n2 was declared dead."""
    job = lab.running_job(resources=GANG, retry=MANY)
    lab.cluster.cut("n2")
    pass_by(lab, QUIET_S + 1)
    lab.heal()
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.DEAD))
    lab.heal()
    assert lab.attempt(job).node_names == ("n1", "n2")
    return job


@pytest.mark.parametrize("change", ["nothing", "a word", "another decision"])
def test_task_of_a_node_that_is_no_longer_dead_is_not_replaced(change: str) -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = give_away(lab)
    before = lab.attempt(job)
    happening: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a word": lambda: result_of(lab.plane.renew(of(before, "n2"))),
        "another decision": lambda: resume(lab, "n2"),
    }
    lab.store.meanwhile("before write", happening[change])
    lab.place()
    assert lab.attempt(job).node_names == (("n1", "n3") if change == "nothing" else ("n1", "n2"))


@pytest.mark.parametrize("is_resumed", [True, False])
def test_job_on_a_node_resumed_since_the_look_is_not_stopped(is_resumed: bool) -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=None, stop_s=5.0)))
    job = lab.running_job()
    (name,) = lab.attempt(job).node_names
    result_of(lab.plane.set_node_state(ANA, name, NodeState.DRAINING))
    if is_resumed:
        lab.store.meanwhile("before write", lambda: resume(lab, name))
    lab.heal()
    assert lab.status(job) == ("running" if is_resumed else "stopping")


def test_a_gang_that_has_left_the_node_since_the_look_is_not_stopped_for_its_drain() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = give_away(lab)
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.DRAINING))
    before = lab.attempt(job)

    def move() -> None:
        result_of(lab.plane.set_node_state(ANA, "n2", NodeState.DEAD))
        lab.place()
        result_of(lab.plane.set_node_state(ANA, "n2", NodeState.DRAINING))

    lab.store.meanwhile("before write", move)
    lab.heal()
    assert before.node_names == ("n1", "n2")
    assert (lab.status(job), lab.attempt(job).node_names) == ("running", ("n1", "n3"))


@pytest.mark.anyio
async def test_no_renewal_is_answered_from_a_read_while_its_task_is_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is decided and not committed: a read still finds an attempt that runs."""
    core, _, _, attempt = await on_disk(tmp_path, silent_s=QUIET_S + 1)
    await heal(core.upkeep)
    await set_node_state(core.upkeep, ANA, "n1", NodeState.DEAD, "", None)
    await speak_while_it_ends(core, attempt, lambda core: heal(core.upkeep), monkeypatch)
    ended = await core.records.store.read(lambda tx: tx.attempts.get(attempt.attempt_id))
    assert ended is not None
    assert ended.reason is EndReason.LOST
    await core.records.store.close()
