"""The server's health: what each role sees."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from shoal.control.memory.health import EngineOutage
from shoal.model.node import Node, NodeFacts, NodeState
from tests.support.planes.world import ApiWorld, open_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    with open_world(tmp_path_factory.mktemp("health")) as opened:
        yield opened


def test_server_whose_loops_fail_is_degraded_and_says_why_to_operators_alone(world: ApiWorld) -> None:
    assert world.call("GET", "/healthz").json() == {"status": "ok", "role": "leader"}
    turns = world.plane.core.loop_health
    turns.record_failure("clean", OSError("no space left on device"))
    try:
        assert world.call("GET", "/healthz").json() == {"status": "degraded", "role": "leader"}
        (failing,) = world.call("GET", "/v1/status", role="admin").json()["failing"]
        assert (failing["loop"], failing["times"]) == ("clean", 1)
        assert failing["why"] == "OSError: no space left on device"
        (failing,) = world.call("GET", "/v1/status", role="member").json()["failing"]
        assert (failing["loop"], failing["why"]) == ("clean", None)
    finally:
        turns.record_success("clean")
    assert world.call("GET", "/healthz").json() == {"status": "ok", "role": "leader"}


def test_nodes_that_their_cluster_has_closed_are_not_silent(world: ApiWorld) -> None:
    core = world.plane.core
    facts = NodeFacts(
        name="shut", cpus=8, memory_bytes=1, disk_bytes=1, is_alive=False, closed="drained in Slurm: bad fan"
    )
    node = Node(facts=facts, engine=core.link.engine.name)
    world.portal.call(core.records.store.write, lambda tx: tx.nodes.put(node))
    try:
        counts = world.call("GET", "/v1/status", role="member").json()["nodes"]
        assert (counts["silent"], counts["closed"]) == (0, 1)
        reply = world.call("GET", "/v1/nodes/shut", role="admin").json()
        assert (reply["closed"], reply["takes_work"]) == ("drained in Slurm: bad fan", False)
        wrong = msgspec.structs.replace(facts, is_alive=True, closed="", labels={"gpu_watts": "many"})
        node = msgspec.structs.replace(node, facts=wrong, version=2)
        world.portal.call(core.records.store.write, lambda tx: tx.nodes.put(node))
        counts = world.call("GET", "/v1/status", role="member").json()["nodes"]
        assert (counts["silent"], counts["closed"]) == (0, 1), "as `shoal nodes` has it"
    finally:
        world.portal.call(core.records.store.write, lambda tx: tx.nodes.remove("shut"))


def test_unanswered_cluster_is_reported_with_its_time_and_only_operators_see_its_words(
    world: ApiWorld,
) -> None:
    def told(role: str) -> object:
        return world.call("GET", "/v1/status", role=role).json()["unanswered"]

    def of_nodes() -> list[object]:
        items = world.call("GET", "/v1/nodes", role="member").json()["items"]
        alone = world.call("GET", f"/v1/nodes/{items[0]['name']}", role="member").json()
        return [node["unanswered"] for node in (items[0], alone)]

    outages = world.plane.core.link.outages
    assert (told("admin"), of_nodes()) == (None, [None, None])
    outages.current = EngineOutage(since=7.0, has_answered=False, why="ssh to n1: refused")
    try:
        since = {"since": 7.0, "has_answered": False}
        assert told("admin") == {**since, "why": "ssh to n1: refused"}
        assert told("member") == {**since, "why": None}
        assert of_nodes() == [since, since]
    finally:
        outages.record_answer()


def test_nodes_that_are_gone_are_in_no_other_count(world: ApiWorld) -> None:
    def counts() -> dict[str, int]:
        nodes: dict[str, int] = world.call("GET", "/v1/status", role="member").json()["nodes"]
        return nodes

    before, core = counts(), world.plane.core
    facts = NodeFacts(name="away", cpus=8, memory_bytes=1, disk_bytes=1, is_alive=False)
    node = Node(facts=facts, engine=core.link.engine.name, state=NodeState.CORDONED, is_gone=True)
    world.portal.call(core.records.store.write, lambda tx: tx.nodes.put(node))
    try:
        assert counts() == {**before, "gone": 1}
    finally:
        world.portal.call(core.records.store.write, lambda tx: tx.nodes.remove("away"))
