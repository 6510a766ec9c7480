"""What the control plane knows of the process groups of a running job."""

from __future__ import annotations

from shoal.control.worlds import WorldBook
from shoal.model.attempt import Attempt, NodeShare
from shoal.wire import EndKind, NodeOutcome, Phase, Renewal, World

WHOLE, SPLIT = World(size=4, ranks=4, is_whole=True), World(size=2, ranks=4, is_whole=False)
NODES = ("node-1", "node-2")


def an_attempt(*outcomes: NodeOutcome) -> Attempt:
    shares = tuple(NodeShare(node=node, cpus=1.0, memory_bytes=1) for node in NODES)
    return Attempt(
        attempt_id="att_1",
        job_id="job_1",
        project="demo",
        epoch=1,
        queued_at=0.0,
        allocation=shares,
        outcomes=outcomes,
    )


def renewal(node: str, world: World | None) -> Renewal:
    return Renewal(attempt_id="att_1", epoch=1, node=node, phase=Phase.RUNNING, world=world)


def outcome(node: str, world: World | None) -> NodeOutcome:
    return NodeOutcome(
        attempt_id="att_1", epoch=1, node=node, kind=EndKind.SUCCEEDED, ended_at=1.0, world=world
    )


def test_one_node_that_misses_others_is_what_counts() -> None:
    book = WorldBook()
    assert book.of(an_attempt()) is None
    book.heard(renewal("node-1", WHOLE))
    assert book.of(an_attempt()) == WHOLE
    book.heard(renewal("node-2", SPLIT))
    assert book.of(an_attempt()) == SPLIT


def test_ranks_that_began_again_have_formed_nothing_yet() -> None:
    book = WorldBook()
    book.heard(renewal("node-1", SPLIT))
    book.heard(renewal("node-1", None))
    assert book.of(an_attempt()) is None


def test_outcome_is_known_when_the_attempt_is_over() -> None:
    book = WorldBook()
    book.heard(renewal("node-1", SPLIT))
    book.keep_only(())
    assert book.of(an_attempt(outcome("node-1", WHOLE), outcome("node-2", WHOLE))) == WHOLE
    assert book.of(an_attempt(outcome("node-1", SPLIT), outcome("node-2", WHOLE))) == SPLIT
