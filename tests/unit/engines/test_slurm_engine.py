"""The Slurm engine over a Slurm on paper: what it makes of few words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from shoal.engines.base import Sight
from shoal.engines.fake import VirtualClock
from shoal.engines.remote import LATE_S, Reach
from shoal.engines.slurm.client import SlurmClient
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import SlurmEngine
from shoal.engines.slurm.render import comment, job_name
from shoal.engines.slurm.states import SETTLE_S
from shoal.wire import EndKind, Fetch, Summons
from tests.unit.engines.test_slurm_pieces import NODE, order

pytestmark = pytest.mark.anyio
BOOTED_AT = datetime(2026, 11, 16, 18, 11, 18).astimezone().timestamp()


class PaperSlurm(SlurmClient):
    """Remembers no job; its one node was started at BOOTED_AT."""

    def jobs(self) -> str:
        return ""

    def nodes(self) -> str:
        return NODE.format(state="IDLE", reason="none")

    def topology(self) -> str:
        return ""

    def submit(self, arguments: Sequence[str], script: str) -> str:
        self.arguments = arguments
        return "1"


@pytest.mark.parametrize(("taken_s", "is_over"), [(-3600.0, True), (3600.0, False)])
async def test_a_restart_ends_a_share_whose_job_slurm_has_forgotten(
    tmp_path: Path, taken_s: float, is_over: bool
) -> None:
    clock = VirtualClock(BOOTED_AT + taken_s)
    reach = Reach(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path, clock=clock, reach=reach, config=SlurmConfig(), client=PaperSlurm())
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(max(LATE_S, 20.0))
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.ENDED if is_over else Sight.UNKNOWN)
    if is_over:
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.LOST
        assert "the node was restarted since" in seen.outcome.message


@pytest.mark.parametrize("has_shared", [True, False])
async def test_what_a_keeper_says_goes_to_no_place_that_others_can_prepare(
    tmp_path: Path, has_shared: bool
) -> None:
    slurm, shared = PaperSlurm(), str(tmp_path / "shared") if has_shared else ""
    reach, config = Reach(urls=("https://login:1",), ca="ca"), SlurmConfig(shared=shared)
    engine = SlurmEngine(tmp_path, clock=VirtualClock(), reach=reach, config=config, client=slurm)
    summons = Summons(attempt_id="att_1", urls=("https://login:1",), ca="ca", ticket="t")
    await engine.start(summons, (order(),))
    [output] = [word for word in slurm.arguments if word.startswith("--output=")]
    wanted = f"{shared}/slurm/shoal-att_1.0.out" if has_shared else "/dev/null"
    assert output == f"--output={wanted}"


class CancelledJob(PaperSlurm):
    """Of the first attempt, on a node in this state."""

    state = ""

    def jobs(self) -> str:
        return f"1|CANCELLED|{job_name('att_1', 0)}|{comment('att_1', 0)}|N/A|None\n"

    def nodes(self) -> str:
        return NODE.format(state=self.state, reason="none")


@pytest.mark.parametrize(
    ("state", "is_over"), [("IDLE", True), ("IDLE+DRAIN", True), ("IDLE*", False), ("DOWN+DRAIN", False)]
)
async def test_the_end_of_a_job_is_evidence_where_its_node_answers_whether_or_not_it_takes_work(
    tmp_path: Path, state: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    slurm.state = state
    reach = Reach(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path, clock=clock, reach=reach, config=SlurmConfig(), client=slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [early] = await engine.list_owned()
    assert early.sight is Sight.UNKNOWN
    clock.advance(SETTLE_S)
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.ENDED if is_over else Sight.UNKNOWN)
