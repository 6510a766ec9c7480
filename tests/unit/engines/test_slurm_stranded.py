"""What waits in Slurm's queue for a node that takes no work is taken back before it begins, never later."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.base import Observation, Sight
from shoal.engines.fake import VirtualClock
from shoal.engines.slurm.engine import JOBS_S, NODES_S, SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import parse_nodes
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import Job
from shoal.errors import StateError
from shoal.wire import EndKind, Fetch
from tests.support.paper_slurm import BOOTED_AT, NODE, PaperSlurm, engine_on, order

pytestmark = pytest.mark.anyio
UNAVAILABLE = "ReqNodeNotAvail, UnavailableNodes:n0"
GANG = ("n0", "n1")


class FullSlurm(PaperSlurm):
    """The first attempt's job waits there, on nodes of which the first is in `state`."""

    reason = "Resources"
    job_state = "PENDING"
    is_listed = True

    def __init__(self) -> None:
        super().__init__()
        self.times_asked = 0
        self.cancelled: tuple[list[str], str] = [], ""

    def jobs(self) -> list[Job]:
        job = Job(job_id="7", state=self.job_state, name=job_name(order(), 0), reason=self.reason)
        return [job] if self.is_listed else []

    def nodes(self) -> list[RawNode]:
        self.times_asked += 1
        told = NODE.format(state="IDLE", reason="none")
        others = "\n".join(told.replace("NodeName=n0", f"NodeName={name}") for name in ("n1", "n2"))
        return parse_nodes(f"{NODE.format(state=self.state, reason='Duplicate jobid')}\n{others}")


class Bench:
    def __init__(self, home: Path, nodes: tuple[str, ...] = ("n0",)) -> None:
        self.clock, self.slurm = VirtualClock(BOOTED_AT), FullSlurm()
        self.engine: SlurmEngine = engine_on(home, self.clock, self.slurm)
        orders = (order(node=name, node_rank=rank, nodes=nodes) for rank, name in enumerate(nodes))
        self.engine.desk.add(tuple(orders), None)

    async def look(self, after_s: float = JOBS_S) -> list[Observation]:
        self.clock.advance(after_s)
        return await self.engine.list_owned()


async def test_what_waits_for_a_drained_node_is_lost_there_before_it_began(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GANG)
    seen = await bench.look()
    assert [(one.sight, one.is_queued) for one in seen] == [(Sight.PENDING, True)] * 2
    bench.slurm.state, bench.slurm.reason = "IDLE+DRAIN", UNAVAILABLE
    for one in await bench.look():
        assert one.outcome is not None
        assert (one.outcome.kind, one.outcome.started_at) == (EndKind.LOST, None)
        assert "`n0` takes no work: Slurm says DRAIN Duplicate jobid" in one.outcome.message
        assert f"Slurm job 7 is PENDING ({UNAVAILABLE})" in one.outcome.message
    alive = {facts.name for facts in await bench.engine.nodes() if facts.is_alive}
    assert alive == {"n1", "n2"}, "whoever places it anew knows it, too"
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(order(), 0)], "")


async def test_what_was_given_up_is_taken_out_of_slurms_queue_also_where_slurm_does_not_list_it(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.slurm.is_listed = False
    [share] = bench.engine.desk.find("att_1").values()
    bench.engine.desk.close(share, EndKind.LOST, "no supervisor fetched the order in 6 tries")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(order(), 0)], "")


async def test_what_was_seen_in_the_queue_and_has_ended_well_since_is_not_cancelled(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.look()
    desk, bench.slurm.job_state = bench.engine.desk, "COMPLETED"
    desk.take(Fetch(attempt_id="att_1", node="n0", process="n0"))
    desk.bury(desk.find("att_1")["n0"], EndKind.SUCCEEDED, "")
    bench.clock.advance(2 * JOBS_S)
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([], "")


async def test_a_gang_that_lost_a_node_and_went_on_leaves_no_job_that_waits_for_it(tmp_path: Path) -> None:
    bench, nodes = Bench(tmp_path, GANG), ("n0", "n2")
    desk, bench.slurm.job_state = bench.engine.desk, "RUNNING"
    for name in GANG:
        desk.take(Fetch(attempt_id="att_1", node=name, process=name))
    desk.bury(desk.find("att_1")["n1"], EndKind.LOST, "declared dead by ana")
    desk.begin_anew(order(node="n2", node_rank=1, nodes=nodes, incarnation=1), None)
    desk.take(Fetch(attempt_id="att_1", node="n2", incarnation=1, process="n2"))
    desk.bury(desk.find("att_1")["n0"], EndKind.SUCCEEDED, "")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([], ""), "one of them runs on"
    desk.bury(desk.find("att_1")["n2"], EndKind.SUCCEEDED, "")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == ([job_name(order(), 0)], "")


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_gang_that_went_on_after_the_restart_of_a_node_leaves_no_job_either(
    tmp_path: Path, is_kept: bool
) -> None:
    """`is_kept`: only its supervisor was lost. The job ends with its keepers, and is left alone."""
    bench = Bench(tmp_path, GANG)
    desk, bench.slurm.job_state = bench.engine.desk, "RUNNING"
    for name in GANG:
        desk.take(Fetch(attempt_id="att_1", node=name, process=name))
    desk.bury(desk.find("att_1")["n1"], EndKind.LOST, "it was restarted")
    desk.begin_anew(order(node="n1", node_rank=1, nodes=GANG, incarnation=1), None)
    anew = Fetch(attempt_id="att_1", node="n1", incarnation=1, process="another")
    desk.take(Fetch(attempt_id="att_1", node="n1", process="n1", after=0) if is_kept else anew)
    for share in desk.find("att_1").values():
        desk.bury(share, EndKind.SUCCEEDED, "")
    await bench.engine.forget("att_1")
    assert bench.slurm.cancelled == (([], "") if is_kept else ([job_name(order(), 0)], ""))


async def test_whom_slurm_starts_after_it_was_taken_back_gets_no_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.reason = "IDLE+DRAIN", UNAVAILABLE
    [seen] = await bench.look()
    assert seen.sight is Sight.ENDED
    with pytest.raises(StateError):
        bench.engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="late"))


@pytest.mark.parametrize("first", GANG)
async def test_of_a_gang_of_which_one_has_an_order_nothing_is_taken_back(tmp_path: Path, first: str) -> None:
    """It began between what `squeue` said and now."""
    bench = Bench(tmp_path, GANG)
    await bench.look()
    bench.slurm.state, bench.slurm.reason = "IDLE+DRAIN", UNAVAILABLE
    bench.engine.desk.take(Fetch(attempt_id="att_1", node=first, process="one"))
    seen = {one.node: one for one in await bench.look()}
    assert seen.pop(first).sight is Sight.ALIVE
    [other] = seen.values()
    assert (other.sight, other.outcome) == (Sight.PENDING, None)
    bench.engine.desk.take(Fetch(attempt_id="att_1", node=other.node, process="two"))
    assert {one.sight for one in await bench.look()} == {Sight.ALIVE}


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
async def test_only_what_waits_for_its_node_alone_is_taken_back(
    tmp_path: Path, state: str, job_state: str, reason: str, is_lost: bool
) -> None:
    bench = Bench(tmp_path)
    bench.slurm.state, bench.slurm.job_state, bench.slurm.reason = state, job_state, reason
    for _ in range(3):
        [seen] = await bench.look(NODES_S)
        assert seen.sight is (Sight.ENDED if is_lost else Sight.PENDING)


async def test_nodes_are_looked_at_when_slurm_says_that_one_is_missing_and_not_at_every_look(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    await bench.look()
    asked = bench.slurm.times_asked
    bench.slurm.reason = UNAVAILABLE
    for _ in range(3):  # it stays so: a reservation, say
        await bench.look()
        assert bench.slurm.times_asked == asked + 1
    bench.slurm.reason = "ReqNodeNotAvail, UnavailableNodes:n[0-1]"
    await bench.look()
    assert bench.slurm.times_asked == asked + 2
