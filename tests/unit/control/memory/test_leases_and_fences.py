"""Which renewals are accepted, and when an attempt that the engine cannot see may be replaced: without
chance, event by event.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.control.commands.renewals import renew
from shoal.control.commands.submit import SubmitRequest
from shoal.control.memory.attempt_table import AttemptMemories
from shoal.control.memory.leases import FENCE_MARGIN_S, Leases
from shoal.errors import StateError
from shoal.model.attempt import Attempt
from shoal.spec import parse_job
from shoal.wire import EndKind, Renewal, TaskOutcome, TaskPhase
from tests.sim.driver import run_now
from tests.sim.world import USER, SimWorld

FENCE_S = 60.0


@pytest.fixture
def world() -> SimWorld:
    calm = SimWorld(0, num_nodes=2, faults=0.0)
    turn(calm, "heal")
    return calm


def turn(world: SimWorld, *loops: str) -> None:
    for loop in loops:
        world.wake(loop)
        world.driver.drain()


def accept(world: SimWorld, **fields: Any) -> str:
    """Submit a job that runs for ever unless its fields say otherwise. Return its id."""
    spec = {"name": "k", "run": "train", "resources": {"gpus": 4}, "fence": f"{FENCE_S}s", "workdir": None}
    world.requests["k"] = SubmitRequest(spec=parse_job({**spec, **fields}), project="lab", owner=USER)
    world.submit("k")
    world.driver.drain()
    return world.accepted["k"][0]


def newest(world: SimWorld, job_id: str) -> Attempt:
    attempt = run_now(world.disk.inner.read(lambda tx: tx.attempts.newest(job_id)))
    assert isinstance(attempt, Attempt)
    return attempt


def place_on_cut_nodes(world: SimWorld) -> Attempt:
    """Place the job without handing it over, because no node answers."""
    job_id = accept(world)
    for node in world.nodes:
        world.cluster.cut(node)
    turn(world, "place")
    attempt = newest(world, job_id)
    assert attempt.state == "starting"
    assert not world.cluster.running()
    return attempt


def test_attempt_submitted_late_has_its_whole_fence(world: SimWorld) -> None:
    attempt = place_on_cut_nodes(world)
    turn(world, "watch")
    world.clock.advance(FENCE_S + FENCE_MARGIN_S - 5)
    for node in world.nodes:
        world.cluster.heal(node)
    turn(world, "watch")
    for node in world.nodes:
        world.cluster.cut(node)
    world.clock.advance(FENCE_S / 2)
    turn(world, "watch")
    assert [task_spec.identity.attempt_id for task_spec in world.cluster.running()] == [attempt.attempt_id]
    assert newest(world, attempt.job_id).attempt_id == attempt.attempt_id
    world.clock.advance(FENCE_S + FENCE_MARGIN_S)
    turn(world, "watch")
    assert newest(world, attempt.job_id).epoch == attempt.epoch + 1


def test_attempt_that_cannot_be_submitted_within_its_fence_is_tried_elsewhere(world: SimWorld) -> None:
    attempt = place_on_cut_nodes(world)
    turn(world, "watch")
    assert newest(world, attempt.job_id).attempt_id == attempt.attempt_id
    world.clock.advance(FENCE_S + FENCE_MARGIN_S + 1)
    turn(world, "watch")
    again = newest(world, attempt.job_id)
    assert again.epoch == attempt.epoch + 1
    assert not world.cluster.running()
    assert attempt.attempt_id not in world.cluster.native_ids


def running(world: SimWorld) -> Attempt:
    attempt = newest(world, accept(world))
    turn(world, "place")
    world.clock.advance(10)
    turn(world, "watch")
    attempt = newest(world, attempt.job_id)
    assert attempt.state == "running"
    return attempt


def renewal_of(attempt: Attempt, **changes: Any) -> Renewal:
    first = Renewal(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=attempt.node_names[0],
        phase=TaskPhase.RUNNING,
    )
    return msgspec.structs.replace(first, **changes)


def carry(world: SimWorld, renewal: Renewal) -> object:
    answers: list[object] = []
    world.driver.spawn(
        "renew", renew(world.core.upkeep, world.core.inputs, world.core.services, renewal), answers.append
    )
    world.driver.drain()
    return answers[0]


@pytest.mark.parametrize("change", [{"epoch": 0}, {"epoch": 2}, {"node": "n9"}, {"attempt_id": "att_0"}])
def test_renewal_for_anything_but_the_living_attempt_is_refused(
    world: SimWorld, change: dict[str, Any]
) -> None:
    attempt = running(world)
    assert not isinstance(carry(world, renewal_of(attempt)), Exception)
    assert isinstance(carry(world, renewal_of(attempt, **change)), StateError)


def test_outcome_of_a_stale_epoch_ends_nothing(world: SimWorld) -> None:
    attempt = running(world)
    node = attempt.node_names[0]
    for epoch in (0, 2):
        outcome = TaskOutcome(
            attempt_id=attempt.attempt_id, epoch=epoch, node=node, kind=EndKind.LOST, ended_at=0.0
        )
        for carried in (attempt.epoch, epoch):
            answer = carry(world, renewal_of(attempt, epoch=carried, phase=TaskPhase.ENDED, outcome=outcome))
            assert isinstance(answer, StateError)
    assert newest(world, attempt.job_id).state == "running"


def test_cluster_reason_for_every_node_of_a_gang_is_shown_once() -> None:
    leases = Leases(SystemClock(), AttemptMemories())
    for node in ("n1", "n2", "n3"):
        leases.note_trouble("att_1", node, "Slurm job 12 is PENDING (Resources)", is_queued=True)
    leases.note_trouble("att_1", "n4", "no task spec so far")
    assert leases.troubles("att_1") == (
        "n1, n2 and n3: Slurm job 12 is PENDING (Resources)",
        "n4: no task spec so far",
    )
