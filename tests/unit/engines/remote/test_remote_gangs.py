"""Of tasks that belong together: who is begun anew, who is lost beside others, and who waits with them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.remote.agent_launcher import MAX_PAUSE_S
from shoal.engines.remote.cluster_observation import ClusterObservation, ClusterObservations, ClusterTaskState
from shoal.engines.remote.task_observer import BEHIND_S, HEARD_S, SILENT_S
from shoal.errors import EngineRefused, EngineUnreachable, StateError
from shoal.model.evidence import Evidence
from shoal.wire import EndKind
from tests.support.fakes.remote_engine import ScriptedEngine
from tests.support.runtime.task_specs import change_task_spec
from tests.unit.engines.remote.test_mailbox_terms import ORDER, fetch, told

pytestmark = pytest.mark.anyio


GANG = Submission(
    attempt_id="att_1",
    epoch=1,
    task_specs=tuple(
        change_task_spec(ORDER, node=node, node_rank=rank, nodes=("n1", "n2"))
        for rank, node in enumerate(("n1", "n2"))
    ),
    bootstrap_token="t",
)


def of_pair(*places: tuple[str, int]) -> Submission:
    """The attempt with tasks on these nodes, of these replacements."""
    nodes = tuple(node for node, _ in places)
    task_specs = tuple(
        change_task_spec(ORDER, node=node, node_rank=rank, nodes=nodes, replacement=replacement)
        for rank, (node, replacement) in enumerate(places)
    )
    return Submission(attempt_id="att_1", epoch=1, task_specs=task_specs, bootstrap_token="t")


@pytest.fixture
async def pair(tmp_path: Path, clock: VirtualClock) -> ScriptedEngine:
    """Two tasks run, and that of n2 is heard from no more."""
    engine = ScriptedEngine(tmp_path, clock)
    engine.names = ("n1", "n2", "n3")
    await engine.submit(of_pair(("n1", 0), ("n2", 0)))
    for node in ("n1", "n2"):
        engine.mailbox.assign(msgspec.structs.replace(fetch(node), node=node))
    clock.advance(HEARD_S)
    engine.mailbox.receive(msgspec.structs.replace(told("n1"), node="n1"), b"")
    return engine


async def test_silent_task_replaced_on_another_node_releases_its_node(
    pair: ScriptedEngine, clock: VirtualClock
) -> None:
    await pair.submit(of_pair(("n1", 0), ("n3", 2)))
    seen = {observation.node: observation.evidence for observation in await pair.list_owned()}
    assert seen == {"n1": Evidence.ALIVE, "n2": Evidence.ENDED, "n3": Evidence.PENDING}
    clock.advance(SILENT_S)
    assert [node.name for node in await pair.nodes() if node.is_alive] == ["n2", "n3"]
    await pair.submit(of_pair(("n1", 0), ("n2", 3)))
    assert pair.mailbox.find("att_1")["n2"].task_spec.identity.replacement == 3


async def test_silent_task_is_replaced_on_its_node_and_a_reporting_one_is_not(
    pair: ScriptedEngine, clock: VirtualClock
) -> None:
    with pytest.raises(EngineUnreachable, match="n1 still has the task"):
        await pair.submit(of_pair(("n1", 1), ("n2", 0)))
    await pair.submit(of_pair(("n1", 0), ("n2", 1)))
    assert pair.mailbox.find("att_1")["n2"].is_waiting
    with pytest.raises(StateError, match="another process"):
        pair.mailbox.receive(msgspec.structs.replace(told("n2"), node="n2"), b"")


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_refused_replacement_is_lost_and_ends_no_other_task(
    tmp_path: Path, clock: VirtualClock, is_restarted: bool
) -> None:
    engine = ScriptedEngine(tmp_path, clock)
    await engine.submit(GANG)
    engine.mailbox.assign(fetch("one"))
    engine = ScriptedEngine(tmp_path, clock) if is_restarted else engine
    engine.mailbox.assign(fetch("one"))
    engine.refusal = "sbatch said: Requested node configuration is not available"
    clock.advance(MAX_PAUSE_S)
    engine.mailbox.assign(fetch("one"))
    assert await engine.submit(GANG) == "lent:att_1"
    began, refused = await engine.list_owned()
    assert (began.evidence, refused.evidence) == (Evidence.ALIVE, Evidence.ENDED)
    assert refused.outcome is not None
    assert refused.outcome.kind is EndKind.LOST
    assert refused.outcome.message == f"lent refused it: {engine.refusal}"


async def test_refused_attempt_without_a_started_task_is_withdrawn(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = ScriptedEngine(tmp_path, clock)
    engine.refusal = "sbatch said: Requested node configuration is not available"
    with pytest.raises(EngineRefused, match="not available"):
        await engine.submit(GANG)
    assert await engine.list_owned() == []


def running(*nodes: str) -> ClusterObservations:
    return {
        ("att_1", node): ClusterObservation(state=ClusterTaskState.RUNNING, raw="Slurm job 7 is RUNNING")
        for node in nodes
    }


async def test_task_without_a_node_agent_beside_started_ones_is_lost(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = ScriptedEngine(tmp_path, clock)
    await engine.submit(GANG)
    engine.cluster_observations = running("n1", "n2")
    clock.advance(BEHIND_S)
    await engine.list_owned()
    engine.mailbox.assign(fetch("one"))
    result = "Slurm job 7 is RUNNING; others of it have begun, and no node agent has fetched this task spec"
    for second in range(int(BEHIND_S)):
        _, late = await engine.list_owned()
        assert (late.evidence, late.raw == result) == (Evidence.PENDING, second >= HEARD_S)
        clock.advance(1.0)
    _, late = await engine.list_owned()
    assert late.outcome is not None
    assert (late.outcome.kind, late.outcome.message) == (EndKind.LOST, f"{result} in 360 s")
    with pytest.raises(StateError):  # one that comes yet
        engine.mailbox.assign(msgspec.structs.replace(fetch("two"), node="n2"))


async def test_stranded_task_beside_started_ones_is_lost(tmp_path: Path, clock: VirtualClock) -> None:
    engine = ScriptedEngine(tmp_path, clock)
    await engine.submit(GANG)
    engine.mailbox.assign(fetch("one"))
    stranded = ClusterObservation(raw="no answer", stranded_reason="`n2` did not answer for 45 s")
    engine.cluster_observations = running("n1") | {("att_1", "n2"): stranded}
    await engine.list_owned()
    clock.advance(BEHIND_S - 1.0)
    _, late = await engine.list_owned()
    assert late.evidence is Evidence.PENDING
    clock.advance(1.0)
    _, late = await engine.list_owned()
    assert late.outcome is not None
    assert (late.outcome.kind, "no answer" in late.outcome.message) == (EndKind.LOST, True)


@pytest.mark.parametrize(
    "stage", [ClusterTaskState.QUEUED, ClusterTaskState.SUSPENDED, ClusterTaskState.UNKNOWN]
)
async def test_task_that_the_cluster_does_not_run_is_not_closed_as_left_behind(
    tmp_path: Path, clock: VirtualClock, stage: ClusterTaskState
) -> None:
    engine = ScriptedEngine(tmp_path, clock)
    await engine.submit(GANG)
    engine.mailbox.assign(fetch("one"))
    engine.cluster_observations = running("n1", "n2")
    await engine.list_owned()
    clock.advance(BEHIND_S - 1.0)
    engine.cluster_observations = running("n1") | {("att_1", "n2"): ClusterObservation(state=stage)}
    await engine.list_owned()
    engine.cluster_observations = running("n1", "n2")
    for _ in range(2):  # it counts from here again
        _, late = await engine.list_owned()
        assert late.evidence is Evidence.PENDING
        clock.advance(BEHIND_S - 1.0)


async def test_single_task_waits_for_its_node_agent_without_a_limit(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = ScriptedEngine(tmp_path, clock)
    await engine.submit(GANG)
    engine.cluster_observations = running("n1", "n2")
    for _ in range(3):
        clock.advance(BEHIND_S)
        assert [seen.evidence for seen in await engine.list_owned()] == [Evidence.PENDING] * 2
