"""What the control plane knows of the process groups of a running job."""

from __future__ import annotations

from shoal.control.memory.attempt_table import AttemptMemories
from shoal.control.memory.supervisor_reports import ReportedWorlds
from shoal.model.attempt import Attempt, NodeTask
from shoal.wire import EndKind, Renewal, TaskOutcome, TaskPhase, World

WHOLE, SPLIT = World(size=4, ranks=4, is_whole=True), World(size=2, ranks=4, is_whole=False)
NODES = ("node-1", "node-2")


def an_attempt(*outcomes: TaskOutcome) -> Attempt:
    tasks = tuple(NodeTask(node=node, cpus=1.0, memory_bytes=1) for node in NODES)
    return Attempt(
        attempt_id="att_1",
        job_id="job_1",
        project="demo",
        epoch=1,
        queued_at=0.0,
        allocation=tasks,
        outcomes=outcomes,
    )


def renewal(node: str, world: World | None) -> Renewal:
    return Renewal(attempt_id="att_1", epoch=1, node=node, phase=TaskPhase.RUNNING, world=world)


def outcome(node: str, world: World | None) -> TaskOutcome:
    return TaskOutcome(
        attempt_id="att_1", epoch=1, node=node, kind=EndKind.SUCCEEDED, ended_at=1.0, world=world
    )


def test_world_of_the_node_that_misses_others_counts() -> None:
    worlds = ReportedWorlds(AttemptMemories())
    assert worlds.of(an_attempt()) is None
    worlds.note_renewal(renewal("node-1", WHOLE))
    assert worlds.of(an_attempt()) == WHOLE
    worlds.note_renewal(renewal("node-2", SPLIT))
    assert worlds.of(an_attempt()) == SPLIT


def test_restarted_ranks_have_formed_no_world() -> None:
    worlds = ReportedWorlds(AttemptMemories())
    worlds.note_renewal(renewal("node-1", SPLIT))
    worlds.note_renewal(renewal("node-1", None))
    assert worlds.of(an_attempt()) is None


def test_outcome_is_known_when_the_attempt_is_over() -> None:
    attempts = AttemptMemories()
    worlds = ReportedWorlds(attempts)
    worlds.note_renewal(renewal("node-1", SPLIT))
    attempts.drop(lambda _, __: True)
    assert worlds.of(an_attempt(outcome("node-1", WHOLE), outcome("node-2", WHOLE))) == WHOLE
    assert worlds.of(an_attempt(outcome("node-1", SPLIT), outcome("node-2", WHOLE))) == SPLIT
