"""The Slurm engine over a Slurm on paper: what it makes of few words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shoal.engines.base import Sight
from shoal.engines.fake import VirtualClock
from shoal.engines.remote import HEARD_S, LATE_S, Reach
from shoal.engines.slurm.accounts import Account
from shoal.engines.slurm.client import SlurmClient
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import JOBS_S, SlurmEngine
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import SETTLE_S
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.wire import EndKind, Fetch, Summons
from tests.unit.engines.test_slurm_pieces import NODE, order

pytestmark = pytest.mark.anyio
BOOTED_AT = datetime(2026, 11, 16, 18, 11, 18, tzinfo=UTC).timestamp()


class PaperSlurm(SlurmClient):
    """Remembers no job; its one node was started at BOOTED_AT, until it was `restarted`."""

    proctrack = "cgroup"
    restarted = False

    def jobs(self) -> str:
        return ""

    def nodes(self) -> str:
        told = NODE.format(state="IDLE", reason="none")
        return told.replace("2026-11-16T18:11:18", "2026-11-16T19:11:18") if self.restarted else told

    def topology(self) -> str:
        return ""

    def config(self) -> str:
        return f"KillWait = 30 sec\nProctrackType = proctrack/{self.proctrack}\n"

    def partitions(self) -> str:
        return ""

    def submit(self, arguments: Sequence[str], script: str, account: Account | None = None) -> str:
        self.arguments, self.submitted_as = arguments, account
        return "1"

    def cancel(self, names: Collection[str], user: str = "") -> None:
        self.cancelled = sorted(names), user


def engine_on(home: Path, clock: VirtualClock, slurm: PaperSlurm) -> SlurmEngine:
    reach = Reach(urls=("https://login:1",), ca="ca")
    return SlurmEngine(home, clock=clock, reach=reach, config=SlurmConfig(), client=slurm)


# Dates of two clocks say nothing: what counts is that slurmctld says another one than before.
@pytest.mark.parametrize("taken_s", [-3600.0, 3600.0])
async def test_a_restart_ends_a_share_whose_job_slurm_has_forgotten(tmp_path: Path, taken_s: float) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + taken_s), PaperSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE
    clock.advance(LATE_S + HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.UNKNOWN
    slurm.restarted = True
    engine = engine_on(tmp_path, clock, slurm)  # a control plane that was away meanwhile
    await engine.list_owned()
    clock.advance(LATE_S)
    [seen] = await engine.list_owned()
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.LOST
    assert "the node was restarted since" in seen.outcome.message


async def test_who_speaks_is_not_buried_whatever_slurm_says_of_its_node(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), PaperSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    asked = Fetch(attempt_id="att_1", node="n0", process="one")
    engine.desk.take(asked)
    await engine.list_owned()
    slurm.restarted = True
    for _ in range(20):
        clock.advance(5.5)  # as often as a keeper speaks, and a little late
        [seen] = await engine.list_owned()
        assert seen.sight is Sight.ALIVE
        engine.desk.take(asked)


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
    user = "ana"

    def jobs(self) -> str:
        return f"1|CANCELLED|{self.user}|N/A|{job_name('att_1', 0)}|None\n"

    def nodes(self) -> str:
        return NODE.format(state=self.state, reason="none")


@pytest.mark.parametrize(
    ("state", "proctrack", "is_over"),
    [
        ("IDLE", "cgroup", True),
        ("IDLE+DRAIN", "cgroup", True),
        ("IDLE*", "cgroup", False),
        ("DOWN+DRAIN", "cgroup", False),
        ("IDLE", "linuxproc", False),
    ],
)
async def test_the_end_of_a_job_is_evidence_where_its_node_answers_whether_or_not_it_takes_work(
    tmp_path: Path, state: str, proctrack: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    slurm.state = state
    slurm.proctrack = proctrack
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [early] = await engine.list_owned()
    assert early.sight is Sight.UNKNOWN
    clock.advance(SETTLE_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.UNKNOWN  # Slurm's KillWait comes on top
    clock.advance(30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.ENDED if is_over else Sight.UNKNOWN)


class CountingSlurm(PaperSlurm):
    """How often it was asked for its jobs; those that `sbatch` gave it wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.is_away = False

    def jobs(self) -> str:
        self.asked += 1
        if self.is_away:
            raise EngineUnreachable("squeue: away")
        return f"1|PENDING|ana|N/A|{job_name('att_1', 0)}|Priority\n"


async def test_squeue_is_asked_once_a_second_however_much_is_submitted_meanwhile(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), CountingSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    await engine.list_owned()
    summons = Summons(attempt_id="att_1", urls=("https://login:1",), ca="ca", ticket="t")
    for _ in range(5):
        await engine.start(summons, (order(nodes=("n0",)),))
        [seen] = await engine.list_owned()
        assert (slurm.asked, seen.is_queued) == (1, True)
        assert "squeue has not been asked since" in seen.raw
        clock.advance(0.1)
    clock.advance(JOBS_S)
    [seen] = await engine.list_owned()
    assert (slurm.asked, seen.is_queued) == (2, True)
    assert "is PENDING (Priority)" in seen.raw


async def test_a_squeue_that_failed_is_not_asked_again_at_once_and_is_not_forgotten(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), CountingSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    slurm.is_away = True
    for _ in range(2):
        with pytest.raises(EngineUnreachable):
            await engine.look(engine.desk.shares())
    assert slurm.asked == 1
    slurm.is_away = False
    clock.advance(JOBS_S)
    assert await engine.look(engine.desk.shares())


async def test_a_look_at_one_attempt_leaves_what_is_known_of_the_others(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    slurm.state = "IDLE"
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.add((order(nodes=("n0",), attempt_id="att_2"),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    await engine.list_owned()
    for _ in range(3):
        clock.advance((SETTLE_S + 30.0) / 3)
        await engine.look(engine.desk.find("att_2").values())
    assert [seen.sight for seen in await engine.list_owned()] == [Sight.ENDED, Sight.PENDING]


class Accounts(CancelledJob):
    """Ana has an account, and so has root."""

    state = "IDLE"

    def account(self, name: str) -> Account | None:
        return {
            "ana": Account(name="ana", uid=1000, gid=1000),
            "root": Account(name="root", uid=0, gid=0),
        }.get(name)

    def give(self, shared: str, folders: Sequence[str], account: Account) -> None:
        self.given = shared, tuple(folders), account.name


def for_owners(tmp_path: Path, clock: VirtualClock, slurm: Accounts) -> SlurmEngine:
    config = SlurmConfig(as_owners=True, shared="/shared")
    reach = Reach(urls=("https://login:1",), ca="ca", shared="/shared")
    return SlurmEngine(tmp_path, clock=clock, reach=reach, config=config, client=slurm)


async def test_a_job_is_submitted_and_cancelled_as_its_owners_and_its_folders_are_the_owners(
    tmp_path: Path,
) -> None:
    slurm = Accounts()
    engine = for_owners(tmp_path, VirtualClock(), slurm)
    summons = Summons(attempt_id="att_1", urls=("https://login:1",), ca="ca", ticket="t")
    mine = order(owner="ana", nodes=("n0",), checkpoint_dir="/shared/checkpoints/job_1")
    await engine.start(summons, (mine,))
    assert slurm.submitted_as == Account(name="ana", uid=1000, gid=1000)
    assert slurm.given == ("/shared", ("slurm/ana", "checkpoints/job_1"), "ana")
    assert "--output=/shared/slurm/ana/shoal-att_1.0.out" in slurm.arguments
    engine.desk.add((mine,), None)
    await engine.end("att_1")
    assert slurm.cancelled == (["shoal-att_1.0"], "ana")


@pytest.mark.parametrize("owner", ["root", "ghost", ""])
async def test_who_has_no_account_of_their_own_is_refused_and_nothing_is_submitted(
    tmp_path: Path, owner: str
) -> None:
    slurm = Accounts()
    engine = for_owners(tmp_path, VirtualClock(), slurm)
    summons = Summons(attempt_id="att_1", urls=("https://login:1",), ca="ca", ticket="t")
    with pytest.raises(EngineRefused, match=f"`{owner}`"):
        await engine.start(summons, (order(owner=owner, nodes=("n0",)),))
    assert not hasattr(slurm, "submitted_as")
    assert not hasattr(slurm, "given")


@pytest.mark.parametrize(("user", "is_over"), [("ana", True), ("eve", False), ("root", False)])
async def test_a_job_of_another_user_that_is_named_like_ours_is_not_believed(
    tmp_path: Path, user: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), Accounts()
    slurm.user = user
    engine = for_owners(tmp_path, clock, slurm)
    engine.desk.add((order(owner="ana", nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    await engine.list_owned()
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.ENDED if is_over else Sight.UNKNOWN)
