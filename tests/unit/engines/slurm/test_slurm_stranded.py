"""What waits in Slurm's queue for a node that takes no work is taken back before it begins, never later."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.base import Observation
from shoal.engines.fake import VirtualClock
from shoal.engines.slurm.engine import JOBS_S, NODES_S, SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import parse_nodes
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import SlurmJob
from shoal.errors import StateError
from shoal.model.evidence import UNSTARTED, Evidence
from shoal.wire import EndKind, TaskSpecRequest
from tests.support.slurm.fake_slurm import BOOTED_AT, NODE, FakeSlurm, engine_on, slurm_task_spec

pytestmark = pytest.mark.anyio
UNAVAILABLE = "ReqNodeNotAvail, UnavailableNodes:n0"
GANG = ("n0", "n1")


class FullSlurm(FakeSlurm):
    """The first attempt's job waits there, on nodes of which the first is in `state`."""

    reason = "Resources"
    job_state = "PENDING"
    is_listed = True

    def __init__(self) -> None:
        super().__init__()
        self.times_asked = 0
        self.cancelled: tuple[list[str], str] = [], ""

    def jobs(self) -> list[SlurmJob]:
        job = SlurmJob(
            job_id="7", state=self.job_state, name=job_name(slurm_task_spec().identity, 0), reason=self.reason
        )
        return [job] if self.is_listed else []

    def nodes(self) -> list[RawNode]:
        self.times_asked += 1
        result = NODE.format(state="IDLE", reason="none")
        others = "\n".join(result.replace("NodeName=n0", f"NodeName={name}") for name in ("n1", "n2"))
        return parse_nodes(f"{NODE.format(state=self.state, reason='Duplicate jobid')}\n{others}")


class Bench:
    def __init__(self, home: Path, nodes: tuple[str, ...] = ("n0",)) -> None:
        self.clock, self.slurm = VirtualClock(BOOTED_AT), FullSlurm()
        self.engine: SlurmEngine = engine_on(home, self.clock, self.slurm)
        task_specs = (
            slurm_task_spec(node=name, node_rank=rank, nodes=nodes) for rank, name in enumerate(nodes)
        )
        self.engine.mailbox.add(tuple(task_specs), None)

    async def look(self, after_s: float = JOBS_S) -> list[Observation]:
        self.clock.advance(after_s)
        return await self.engine.list_owned()


async def test_task_that_waits_for_a_drained_node_is_closed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GANG)
    seen = await bench.look()
    assert [item.evidence for item in seen] == [Evidence.QUEUED] * 2
    bench.slurm.state, bench.slurm.reason = "IDLE+DRAIN", UNAVAILABLE
    for item in await bench.look():
        assert item.outcome is not None
        assert (item.outcome.kind, item.outcome.started_at) == (EndKind.LOST, None)
        assert "`n0` takes no work: Slurm says DRAIN Duplicate jobid" in item.outcome.message
        assert f"Slurm job 7 is PENDING ({UNAVAILABLE})" in item.outcome.message
    alive = {facts.name for facts in await bench.engine.nodes() if facts.is_alive}
    assert alive == {"n1", "n2"}, "whoever places it anew knows it, too"
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(slurm_task_spec().identity, 0)], "")


async def test_closed_attempt_is_cancelled_though_slurm_does_not_list_it(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.slurm.is_listed = False
    [task] = bench.engine.mailbox.find("att_1").values()
    bench.engine.mailbox.close(task, EndKind.LOST, "no supervisor fetched the task spec in 6 tries")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(slurm_task_spec().identity, 0)], "")


async def test_job_that_ended_after_it_was_queued_is_not_cancelled(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.look()
    mailbox, bench.slurm.job_state = bench.engine.mailbox, "COMPLETED"
    mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="n0"))
    mailbox.reap(mailbox.find("att_1")["n0"], EndKind.SUCCEEDED, "")
    bench.clock.advance(2 * JOBS_S)
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([], "")


async def test_a_gang_that_lost_a_node_and_went_on_leaves_no_job_that_waits_for_it(tmp_path: Path) -> None:
    bench, nodes = Bench(tmp_path, GANG), ("n0", "n2")
    mailbox, bench.slurm.job_state = bench.engine.mailbox, "RUNNING"
    for name in GANG:
        mailbox.assign(TaskSpecRequest(attempt_id="att_1", node=name, process=name))
    mailbox.reap(mailbox.find("att_1")["n1"], EndKind.LOST, "declared dead by ana")
    mailbox.replace(slurm_task_spec(node="n2", node_rank=1, nodes=nodes, replacement=1), None)
    mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n2", replacement=1, process="n2"))
    mailbox.reap(mailbox.find("att_1")["n0"], EndKind.SUCCEEDED, "")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([], ""), "one of them runs on"
    mailbox.reap(mailbox.find("att_1")["n2"], EndKind.SUCCEEDED, "")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(slurm_task_spec().identity, 0)], "")


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_gang_that_went_on_after_the_restart_of_a_node_leaves_no_job_either(
    tmp_path: Path, is_kept: bool
) -> None:
    """`is_kept`: only its supervisor was lost. The job ends with its node agents, and is left alone."""
    bench = Bench(tmp_path, GANG)
    mailbox, bench.slurm.job_state = bench.engine.mailbox, "RUNNING"
    for name in GANG:
        mailbox.assign(TaskSpecRequest(attempt_id="att_1", node=name, process=name))
    mailbox.reap(mailbox.find("att_1")["n1"], EndKind.LOST, "it was restarted")
    mailbox.replace(slurm_task_spec(node="n1", node_rank=1, nodes=GANG, replacement=1), None)
    anew = TaskSpecRequest(attempt_id="att_1", node="n1", replacement=1, process="another")
    mailbox.assign(
        TaskSpecRequest(attempt_id="att_1", node="n1", process="n1", previous_replacement=0)
        if is_kept
        else anew
    )
    for task in mailbox.find("att_1").values():
        mailbox.reap(task, EndKind.SUCCEEDED, "")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == (([], "") if is_kept else ([job_name(slurm_task_spec().identity, 0)], ""))


async def test_node_agent_started_after_the_close_gets_no_task_spec(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.reason = "IDLE+DRAIN", UNAVAILABLE
    [seen] = await bench.look()
    assert seen.evidence is Evidence.ENDED
    with pytest.raises(StateError):
        bench.engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="late"))


@pytest.mark.parametrize("first", GANG)
async def test_gang_with_one_assigned_task_is_not_closed(tmp_path: Path, first: str) -> None:
    """It began between what `squeue` said and now."""
    bench = Bench(tmp_path, GANG)
    await bench.look()
    bench.slurm.state, bench.slurm.reason = "IDLE+DRAIN", UNAVAILABLE
    bench.engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node=first, process="one"))
    seen = {item.node: item for item in await bench.look()}
    assert seen.pop(first).evidence is Evidence.ALIVE
    [other] = seen.values()
    assert (other.evidence in UNSTARTED, other.outcome) == (True, None)
    bench.engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node=other.node, process="two"))
    assert {item.evidence for item in await bench.look()} == {Evidence.ALIVE}


@pytest.mark.parametrize(
    ("state", "job_state", "reason", "is_lost"),
    [
        ("DOWN*", "PENDING", UNAVAILABLE, True),
        ("IDLE+DRAIN", "PENDING", "Nodes required for job are DOWN, DRAINED or reserved for others", True),
        # So 24.11 says it of a drained node.
        ("IDLE+DRAIN", "PENDING", "ReqNodeNotAvail, May be reserved for other job", True),
        ("IDLE+DRAIN", "PENDING", "Priority", True),
        ("IDLE+DRAIN", "PENDING", "None", True),
        # A slurmd that is silent for a moment is awaited.
        ("IDLE*", "PENDING", UNAVAILABLE, False),
        # Reserved for a time to come: it may begin when that is over.
        ("IDLE", "PENDING", "ReqNodeNotAvail, May be reserved for other job", False),
        ("IDLE", "PENDING", "Resources", False),
        # Whoever holds it means it, wherever it is to run.
        ("IDLE+DRAIN", "PENDING", "JobHeldAdmin", False),
        ("IDLE+DRAIN", "PENDING", "QOSMaxJobsPerUserLimit", False),
        ("MIXED+DRAIN", "CONFIGURING", "None", False),
        ("MIXED+DRAIN", "RUNNING", "None", False),
    ],
)
async def test_only_a_job_that_waits_for_its_node_is_closed(
    tmp_path: Path, state: str, job_state: str, reason: str, is_lost: bool
) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.job_state, bench.slurm.reason = state, job_state, reason
    for _ in range(3):
        [seen] = await bench.look(NODES_S)
        assert seen.evidence in ((Evidence.ENDED,) if is_lost else UNSTARTED)


async def test_nodes_are_looked_at_when_slurm_says_that_one_is_missing_and_not_at_every_look(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    await bench.look()
    requested = bench.slurm.times_asked
    bench.slurm.reason = UNAVAILABLE
    for _ in range(3):  # it stays so: a reservation, say
        await bench.look()
        assert bench.slurm.times_asked == requested + 1
    bench.slurm.reason = "ReqNodeNotAvail, UnavailableNodes:n[0-1]"
    await bench.look()
    assert bench.slurm.times_asked == requested + 2
