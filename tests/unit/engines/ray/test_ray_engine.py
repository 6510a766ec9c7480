"""The Ray engine over a Ray on paper: what it makes of agents that do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.ray.client import RayClient
from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.engine import NODES_S, RayEngine
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.task_observer import HEARD_S, LATE_S, SILENT_S
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.wire import EndKind, TaskSpecRequest
from tests.unit.engines.ray.test_ray_parse_and_render import answer, facts, row
from tests.unit.engines.remote.test_mailbox_terms import ORDER

pytestmark = pytest.mark.anyio
NODE_ID = "a" * 8


class PaperRay(RayClient):
    """One node; its agent answers, and has started nobody, until it `is_cut`."""

    is_cut = False
    is_known = True
    is_away = False
    """Ray itself cannot be asked."""
    state = ""
    """What the agent says of every node agent; empty: it has no record."""
    process = "one"
    """Of whom the agent says it."""
    machine, boot_id = "m", "1"

    def __init__(self) -> None:
        """No bridge."""

    def nodes(self) -> dict[str, Any]:
        if self.is_away:
            raise EngineUnreachable("Ray did not answer")
        result = {} if self.is_cut else {NODE_ID: facts(machine=self.machine, boot_id=self.boot_id)}
        return answer(row(NODE_ID, NodeName="n1"), **result) if self.is_known else answer()

    def look(self, keys_by_node: dict[str, list[str]]) -> dict[str, Any]:
        if self.is_cut:
            return {"failed": {NODE_ID: "no answer"}, "seen": {}}
        result = {"state": self.state, "pid": 7, "said": "", "process": self.process}
        seen = {
            node_id: dict.fromkeys(keys, result) if self.state else {}
            for node_id, keys in keys_by_node.items()
        }
        return {"failed": {}, "seen": seen}

    def start(self, starts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"failed": {}}


@pytest.mark.parametrize("is_known", [True, False])
async def test_unstarted_task_leaves_a_node_that_does_not_respond(tmp_path: Path, is_known: bool) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    for _ in range(2):
        ray.is_cut, ray.is_known = False, True
        clock.advance(NODES_S)
        await engine.list_owned()
        ray.is_cut, ray.is_known = True, is_known
        clock.advance(NODES_S)
        await engine.list_owned()
        clock.advance(SILENT_S - 1)
        [seen] = await engine.list_owned()
        assert seen.evidence is Evidence.PENDING
    clock.advance(1)
    [seen] = await engine.list_owned()
    assert seen.outcome is not None
    assert (seen.outcome.kind, "`n1` did not answer for" in seen.outcome.message) == (EndKind.LOST, True)


async def test_while_ray_itself_cannot_be_asked_no_node_is_seen_away(tmp_path: Path) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    clock.advance(NODES_S)
    ray.is_cut = True
    await engine.list_owned()
    ray.is_away = True
    for _ in range(10):
        clock.advance(60)
        [seen] = await engine.list_owned()
        assert seen.evidence is Evidence.QUEUED
    ray.is_away, ray.is_known = False, False  # another head, which its raylets have not found yet
    for _ in range(2):
        clock.advance(NODES_S)
        [seen] = await engine.list_owned()
        assert seen.evidence is Evidence.PENDING
    clock.advance(SILENT_S - NODES_S - 1)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.PENDING
    clock.advance(1)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED


async def test_occasional_failed_query_does_not_keep_a_task_on_a_gone_node(
    tmp_path: Path,
) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    ray.is_cut = True
    for turn in range(60):  # a bridge that ends itself every ten seconds, to learn anew where agents are
        clock.advance(NODES_S)
        ray.is_away = turn % 5 == 4
        await engine.list_owned()
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED


async def test_started_task_stays_on_a_node_that_does_not_respond(
    tmp_path: Path,
) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n1", process="one"))
    ray.is_cut = True
    for _ in range(5):
        await engine.list_owned()
        clock.advance(SILENT_S)
    [seen] = await engine.list_owned()
    assert (seen.evidence, seen.outcome) == (Evidence.UNKNOWN, None)


@pytest.mark.parametrize(
    ("machine", "boot_id", "state", "is_over"),
    [
        ("m", "2", "", True),
        ("m", "2", "running", False),  # who has looked knows better
        ("m", "1", "", False),
        ("", "2", "", False),
        ("another of the same name", "2", "", False),
    ],
)
async def test_only_another_boot_of_the_same_machine_is_a_restart(
    tmp_path: Path, machine: str, boot_id: str, state: str, is_over: bool
) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    clock.advance(NODES_S)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n1", process="one"))
    await engine.list_owned()
    ray.machine, ray.boot_id, ray.state = machine, boot_id, state
    clock.advance(LATE_S + 0.5)
    await engine.list_owned()
    clock.advance(LATE_S + 0.5)
    [seen] = await engine.list_owned()
    assert (seen.evidence is Evidence.ENDED) is is_over


@pytest.mark.parametrize(
    ("state", "process", "evidence"),
    [
        ("over", "one", Evidence.ENDED),
        ("left", "one", Evidence.ORPHANED_PER_CLUSTER),
        # It came up under the same name on another machine, asked for the task spec in vain, and ended.
        ("over", "two", Evidence.UNKNOWN),
        ("left", "two", Evidence.UNKNOWN),
        # By an agent of an older Shoal.
        ("over", "", Evidence.UNKNOWN),
    ],
)
async def test_only_the_end_of_the_assigned_node_agent_ends_its_task(
    tmp_path: Path, state: str, process: str, evidence: Evidence
) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    clock.advance(NODES_S)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n1", process="one"))
    ray.state, ray.process, ray.machine = state, process, "m" if process == "one" else "another"
    clock.advance(LATE_S + HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.evidence is evidence


async def test_node_agent_without_a_task_spec_does_not_hide_a_reboot(
    tmp_path: Path,
) -> None:
    clock, ray = VirtualClock(1_800_000_000.0), PaperRay()
    reach = ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = RayEngine(tmp_path, clock=clock, access=reach, config=RayConfig(), client=ray)
    engine.mailbox.add((ORDER,), None)
    clock.advance(NODES_S)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n1", process="one"))
    await engine.list_owned()
    ray.state, ray.process, ray.boot_id = "over", "two", "2"
    clock.advance(LATE_S + HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED
