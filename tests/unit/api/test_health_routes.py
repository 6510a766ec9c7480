"""Whether the server is well: who is told what."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from shoal.control.outage import Outage
from shoal.model.node import Node, NodeFacts, NodeState
from tests.support.world import World, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("health")) as opened:
        yield opened


def test_server_whose_loops_fail_is_degraded_and_says_why_to_operators_alone(world: World) -> None:
    assert world.call("GET", "/healthz").json() == {"status": "ok", "role": "leader"}
    turns = world.plane.core.turns
    turns.failed("clean", OSError("no space left on device"))
    try:
        assert world.call("GET", "/healthz").json() == {"status": "degraded", "role": "leader"}
        (told,) = world.call("GET", "/v1/status", role="admin").json()["failing"]
        assert (told["loop"], told["times"]) == ("clean", 1)
        assert told["why"] == "OSError: no space left on device"
        (told,) = world.call("GET", "/v1/status", role="member").json()["failing"]
        assert (told["loop"], told["why"]) == ("clean", None)
    finally:
        turns.went_well("clean")
    assert world.call("GET", "/healthz").json() == {"status": "ok", "role": "leader"}


def test_nodes_that_their_cluster_has_closed_are_not_silent(world: World) -> None:
    core = world.plane.core
    facts = NodeFacts(
        name="shut", cpus=8, memory_bytes=1, disk_bytes=1, is_alive=False, closed="drained in Slurm: bad fan"
    )
    node = Node(facts=facts, engine=core.engine.name)
    world.portal.call(core.store.write, lambda tx: tx.nodes.put(node))
    try:
        counts = world.call("GET", "/v1/status", role="member").json()["nodes"]
        assert (counts["silent"], counts["closed"]) == (0, 1)
        told = world.call("GET", "/v1/nodes/shut", role="admin").json()
        assert (told["closed"], told["takes_work"]) == ("drained in Slurm: bad fan", False)
        wrong = msgspec.structs.replace(facts, is_alive=True, closed="", labels={"gpu_watts": "many"})
        node = msgspec.structs.replace(node, facts=wrong, version=2)
        world.portal.call(core.store.write, lambda tx: tx.nodes.put(node))
        counts = world.call("GET", "/v1/status", role="member").json()["nodes"]
        assert (counts["silent"], counts["closed"]) == (0, 1), "as `shoal nodes` has it"
    finally:
        world.portal.call(core.store.write, lambda tx: tx.nodes.remove("shut"))


def test_cluster_that_does_not_answer_is_told_with_since_when_and_its_words_to_operators_alone(
    world: World,
) -> None:
    def told(role: str) -> object:
        return world.call("GET", "/v1/status", role=role).json()["unanswered"]

    def of_nodes() -> list[object]:
        items = world.call("GET", "/v1/nodes", role="member").json()["items"]
        alone = world.call("GET", f"/v1/nodes/{items[0]['name']}", role="member").json()
        return [node["unanswered"] for node in (items[0], alone)]

    outages = world.plane.core.outages
    assert (told("admin"), of_nodes()) == (None, [None, None])
    outages.present = Outage(since=7.0, has_answered=False, why="ssh to n1: refused")
    try:
        since = {"since": 7.0, "has_answered": False}
        assert told("admin") == {**since, "why": "ssh to n1: refused"}
        assert told("member") == {**since, "why": None}
        assert of_nodes() == [since, since]
    finally:
        outages.answered()


def test_nodes_that_are_gone_are_in_no_other_count(world: World) -> None:
    def counts() -> dict[str, int]:
        told: dict[str, int] = world.call("GET", "/v1/status", role="member").json()["nodes"]
        return told

    before, core = counts(), world.plane.core
    facts = NodeFacts(name="away", cpus=8, memory_bytes=1, disk_bytes=1, is_alive=False)
    node = Node(facts=facts, engine=core.engine.name, state=NodeState.CORDONED, is_gone=True)
    world.portal.call(core.store.write, lambda tx: tx.nodes.put(node))
    try:
        assert counts() == {**before, "gone": 1}
    finally:
        world.portal.call(core.store.write, lambda tx: tx.nodes.remove("away"))
