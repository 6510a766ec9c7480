"""The Slurm engine over a Slurm on paper: what it makes of few words."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import Sight, Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.remote import HEARD_S, LATE_S, Reach
from shoal.engines.slurm.accounts import Account
from shoal.engines.slurm.client import CommandDoor
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import CONFIG_S, JOBS_S, NODES_S, PAST_S, SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts, parse_nodes
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import Request, job_name
from shoal.engines.slurm.states import SETTLE_S, Job
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone
from shoal.wire import EndKind, Fetch, Summons
from tests.unit.engines.test_slurm_pieces import NODE, order

pytestmark = pytest.mark.anyio
BOOTED_AT = datetime(2026, 11, 16, 18, 11, 18, tzinfo=UTC).timestamp()


class PaperSlurm(CommandDoor):
    """Remembers no job; its one node was started at BOOTED_AT, until it was `restarted`."""

    has_cgroups = True
    restarted = False
    is_clock_set = False
    """Forward by an hour: what its slurmd says of the boot moves, and when that itself began does not."""
    state = "IDLE"
    reason = "none"

    def jobs(self) -> list[Job]:
        return []

    def past(self, names: Collection[str]) -> list[Job]:
        return []

    def nodes(self) -> list[RawNode]:
        told = NODE.format(state=self.state, reason=self.reason)
        if self.restarted or self.is_clock_set:
            told = told.replace("2026-11-16T18:11:18", "2026-11-16T19:11:18")
        return parse_nodes(told.replace("T18:56:36", "T19:56:36") if self.restarted else told)

    def partitions(self) -> list[Partition]:
        return []

    def facts(self) -> SlurmFacts:
        return SlurmFacts(kill_wait_s=30.0, has_cgroups=self.has_cgroups)

    def submit(self, request: Request, account: Account | None = None) -> str:
        self.request, self.submitted_as = request, account
        return "1"

    def cancel(self, names: Collection[str], user: str = "") -> None:
        self.cancelled = sorted(names), user


class NamedSlurm(PaperSlurm):
    cluster = "lab"

    def facts(self) -> SlurmFacts:
        return SlurmFacts(has_cgroups=True, cluster=self.cluster, heads=("b",))


def engine_on(
    home: Path, clock: VirtualClock, slurm: PaperSlurm, config: SlurmConfig | None = None
) -> SlurmEngine:
    reach = Reach(urls=("https://login:1",), ca="ca")
    return SlurmEngine(home, clock=clock, reach=reach, config=config or SlurmConfig(), door=slurm)


async def test_another_slurm_behind_the_same_door_says_nothing_about_our_jobs(tmp_path: Path) -> None:
    """Equal node names and a younger boot: taken at its word, it would be evidence of the end."""
    clock, slurm = VirtualClock(BOOTED_AT), NamedSlurm()
    engine = engine_on(tmp_path, clock, slurm, SlurmConfig(cluster="lab", heads=("a", "b")))
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    await engine.list_owned()
    slurm.cluster, slurm.restarted = "prod", True
    for _ in range(3):
        clock.advance(CONFIG_S)
        [seen] = await engine.list_owned()
        assert seen.sight is Sight.UNKNOWN
        assert "the Slurm `prod` (b) answers, and the Slurm `lab` (a, b) was connected" in seen.raw
    with pytest.raises(EngineUnreachable, match="not about our jobs"):
        await engine.nodes()
    slurm.cluster = "lab"  # and one of its controllers is another by now
    assert [facts.name for facts in await engine.nodes()] == ["n0"]


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


async def test_a_restart_before_the_share_began_is_none_since_whatever_was_known_of_the_node(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), PaperSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    await engine.list_owned()  # what Slurm says of the node now is believed for ten seconds
    slurm.restarted = True
    clock.advance(2.0)
    asked = Fetch(attempt_id="att_1", node="n0", process="one")
    engine.desk.take(asked)
    clock.advance(1.0)
    await engine.list_owned()
    clock.advance(NODES_S)
    engine.desk.take(asked)
    await engine.list_owned()
    for _ in range(3):
        clock.advance(LATE_S + HEARD_S)
        [seen] = await engine.list_owned()
        assert seen.sight is Sight.UNKNOWN


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


@pytest.mark.parametrize("is_slurmd_older", [True, False])
async def test_a_clock_that_is_set_is_no_restart_whoever_is_silent_after_it(
    tmp_path: Path, is_slurmd_older: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 7200.0), PaperSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    asked = Fetch(attempt_id="att_1", node="n0", process="one")
    engine.desk.take(asked)
    await engine.list_owned()
    slurm.is_clock_set, slurm.restarted = is_slurmd_older, not is_slurmd_older
    for _ in range(2):
        clock.advance(NODES_S / 2)
        await engine.list_owned()
        engine.desk.take(asked)
    if not is_slurmd_older:  # who speaks now lives in that boot, whatever its date
        await engine.list_owned()
    for _ in range(3):
        clock.advance(LATE_S + HEARD_S)
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.outcome) == (Sight.UNKNOWN, None)


@pytest.mark.parametrize("has_shared", [True, False])
async def test_what_a_keeper_says_goes_to_no_place_that_others_can_prepare(
    tmp_path: Path, has_shared: bool
) -> None:
    slurm, shared = PaperSlurm(), str(tmp_path / "shared") if has_shared else ""
    reach, config = Reach(urls=("https://login:1",), ca="ca"), SlurmConfig(shared=shared)
    engine = SlurmEngine(tmp_path, clock=VirtualClock(), reach=reach, config=config, door=slurm)
    summons = Summons(attempt_id="att_1", urls=("https://login:1",), ca="ca", ticket="t")
    await engine.start(summons, (order(),))
    wanted = f"{shared}/slurm/shoal-att_1.0.out" if has_shared else "/dev/null"
    assert slurm.request.output == wanted


class Refusing(PaperSlurm):
    """Its nodes are what `changed` makes of them, from the moment on that something is submitted."""

    said = "sbatch said: Batch job submission failed: Requested node configuration is not available"

    def __init__(self, *changed: tuple[str, str]) -> None:
        super().__init__()
        self.changed = changed
        self.is_changed = False

    def nodes(self) -> list[RawNode]:
        told = NODE.format(state="IDLE", reason="none")
        for before, after in self.changed if self.is_changed else ():
            told = told.replace(before, after)
        return parse_nodes(told)

    def submit(self, request: Request, account: Account | None = None) -> str:
        self.is_changed = True
        raise EngineRefused(self.said)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("RealMemory=8000", "RealMemory=2000"), "`n0` has 4 CPUs and 2000 MiB now"),
        (("CPUEfctv=4", "CPUEfctv=1"), "`n0` has 1 CPUs"),
        (("gpu:h100:2(S:0,2),gpu:a100:1", "gpu:h100:1"), "`n0` has 1 GPUs now"),
        (("Partitions=main,low", "Partitions=low"), "`n0` is not among Slurm's nodes for us any more"),
        (("Gres=gpu:h100:2", "Gres=gpu:b200:2"), "`n0` was changed at Slurm a moment ago"),
    ],
)
async def test_a_node_that_was_changed_since_it_was_chosen_costs_no_job(
    tmp_path: Path, change: tuple[str, str], told: str
) -> None:
    slurm = Refusing(change)
    engine = engine_on(tmp_path, VirtualClock(), slurm, SlurmConfig(partition="main"))
    submission = Submission(attempt_id="att_1", epoch=1, orders=(order(nodes=("n0",)),), ticket="t")
    with pytest.raises(NodeGone, match=re.escape(told)) as gone:
        await engine.submit(submission)
    assert gone.value.facts["node"] == "n0"
    assert slurm.said in gone.value.message
    assert engine.desk.find("att_1") == {}


async def test_what_nodes_as_they_were_do_not_have_is_refused_for_ever(tmp_path: Path) -> None:
    slurm = Refusing()
    engine = engine_on(tmp_path, VirtualClock(), slurm)
    submission = Submission(attempt_id="att_1", epoch=1, orders=(order(nodes=("n0",)),), ticket="t")
    with pytest.raises(EngineRefused) as refused:
        await engine.submit(submission)
    assert not isinstance(refused.value, NodeGone)
    slurm.changed, slurm.said = (("RealMemory=8000", "RealMemory=2000"),), "sbatch said: Invalid time limit"
    engine = engine_on(tmp_path / "2", VirtualClock(), slurm)
    slurm.is_changed = False
    with pytest.raises(EngineRefused) as refused:
        await engine.submit(submission)
    assert not isinstance(refused.value, NodeGone)


class CancelledJob(PaperSlurm):
    """Of the first attempt."""

    user = "ana"

    def jobs(self) -> list[Job]:
        return [Job(job_id="1", state="CANCELLED", name=job_name("att_1", 0), user=self.user)]


@pytest.mark.parametrize(
    ("state", "has_cgroups", "is_over"),
    [
        ("IDLE", True, True),
        ("IDLE+DRAIN", True, True),
        ("IDLE*", True, False),
        ("DOWN+DRAIN", True, False),
        ("IDLE", False, False),
    ],
)
async def test_the_end_of_a_job_is_evidence_where_its_node_answers_whether_or_not_it_takes_work(
    tmp_path: Path, state: str, has_cgroups: bool, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    slurm.state = state
    slurm.has_cgroups = has_cgroups
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


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_the_end_of_a_job_is_no_evidence_where_slurm_could_not_kill_all_of_one(
    tmp_path: Path, is_forgotten: bool
) -> None:
    clock = VirtualClock(BOOTED_AT + 3600.0)
    slurm = PaperSlurm() if is_forgotten else CancelledJob()
    slurm.state, slurm.reason = "IDLE+DRAIN", "Kill task failed"
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.outcome) == (Sight.ORPHANED, None)
        assert "Slurm says of `n0`: Kill task failed" in seen.raw
    slurm.restarted = True
    clock.advance(NODES_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED, "nothing outlives a restart"


async def test_what_slurm_says_once_somebody_resumed_the_node_counts_from_then(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    slurm.state, slurm.reason = "IDLE+DRAIN", "Kill task failed"
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(SETTLE_S + 30.0)
    await engine.list_owned()
    slurm.state, slurm.reason = "IDLE", "none"
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.UNKNOWN
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED


class TwinJobs(PaperSlurm):
    """Two of the first attempt, as `sbatch` was run twice; the later found no order."""

    states = ("NODE_FAIL", "COMPLETED")

    def jobs(self) -> list[Job]:
        return [
            Job(job_id=str(number), state=state, name=job_name("att_1", 0))
            for number, state in enumerate(self.states, 9)
        ]


@pytest.mark.parametrize(
    ("states", "told", "is_over"),
    [
        (("NODE_FAIL", "COMPLETED"), "9 is NODE_FAIL", False),
        (("COMPLETED", "NODE_FAIL"), "10 is NODE_FAIL", False),
        (("RUNNING", "NODE_FAIL"), "9 is RUNNING", False),
        (("FAILED", "COMPLETED"), "10 is COMPLETED", True),
    ],
)
async def test_a_twin_that_is_over_hides_none_that_slurm_only_believes_to_be(
    tmp_path: Path, states: tuple[str, str], told: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), TwinJobs()
    slurm.states = states
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert told in seen.raw
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert (seen.sight is Sight.ENDED) is is_over


class CountingSlurm(PaperSlurm):
    """How often it was asked for its jobs; those that `sbatch` gave it wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.is_away = False

    def jobs(self) -> list[Job]:
        self.asked += 1
        if self.is_away:
            raise EngineUnreachable("squeue: away")
        return [Job(job_id="1", state="PENDING", name=job_name("att_1", 0), reason="Priority")]


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


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        (SlurmConfig(), True),
        (SlurmConfig(project="vision"), False),
        (SlurmConfig(has_shared_trust=True), False),
    ],
)
async def test_jobs_of_other_projects_are_refused_unless_all_are_trusted(
    tmp_path: Path, config: SlurmConfig, is_refused: bool
) -> None:
    slurm, reach = PaperSlurm(), Reach(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path, clock=VirtualClock(), reach=reach, config=config, door=slurm)
    asked = Submission(
        attempt_id="att_1", epoch=1, orders=(order(nodes=("n0",), project="vision"),), ticket="t"
    )
    if not is_refused:
        assert await engine.submit(asked) == "slurm:att_1"
        return
    with pytest.raises(
        EngineRefused, match="this Slurm is for project `default`, and the job is of `vision`"
    ):
        await engine.submit(asked)
    assert engine.desk.shares() == []
    assert not hasattr(slurm, "request")


class RememberingSlurm(PaperSlurm):
    """Its accounting has the first attempt's job, in this state; nobody else has a trace of it."""

    job_state = "COMPLETED"
    is_away = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[set[str]] = []

    def past(self, names: Collection[str]) -> list[Job]:
        self.asked.append(set(names))
        if self.is_away:
            raise EngineUnreachable("slurmdbd is away")
        return [Job(job_id="7", state=self.job_state, name=job_name("att_1", 0), is_past=True)]


@pytest.mark.parametrize(
    ("job_state", "node_state", "is_over"),
    [("COMPLETED", "IDLE", True), ("COMPLETED", "IDLE*", False), ("NODE_FAIL", "IDLE", False)],
)
async def test_what_accounting_remembers_is_worth_what_squeue_says(
    tmp_path: Path, job_state: str, node_state: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RememberingSlurm()
    slurm.job_state, slurm.state = job_state, node_state
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [early] = await engine.list_owned()
    assert early.sight is Sight.UNKNOWN
    assert f"Slurm's accounting has job 7 as {job_state}" in early.raw
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.ENDED if is_over else Sight.UNKNOWN)


async def test_accounting_is_asked_seldom_and_only_about_what_began_and_left_no_trace(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RememberingSlurm()
    slurm.job_state = "RUNNING"
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    clock.advance(HEARD_S)
    await engine.list_owned()
    assert slurm.asked == []
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    for _ in range(120):
        clock.advance(1.0)
        await engine.list_owned()
    assert slurm.asked == [{job_name("att_1", 0)}] * 2
    slurm.job_state, slurm.state = "FAILED", "DOWN"
    for _ in range(3):
        clock.advance(PAST_S)
        await engine.list_owned()
    assert len(slurm.asked) == 3


async def test_accounting_that_is_away_is_no_trace(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RememberingSlurm()
    slurm.is_away = True
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [seen] = await engine.list_owned()
    assert (seen.sight, "no trace" in seen.raw) == (Sight.UNKNOWN, True)


class SlowSlurm(PaperSlurm):
    """Takes two seconds to list its jobs."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.num_lists = 0

    def jobs(self) -> list[Job]:
        self.num_lists += 1
        self._clock.advance(2.0)
        return []


async def test_a_slurm_that_takes_long_to_answer_is_asked_less_often(tmp_path: Path) -> None:
    clock = VirtualClock(BOOTED_AT + 3600.0)
    slurm = SlowSlurm(clock)
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    began = clock.monotonic()
    while clock.monotonic() - began < 40.0:
        await engine.list_owned()
        clock.advance(1.0)
    assert slurm.num_lists == 4


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
    return SlurmEngine(tmp_path, clock=clock, reach=reach, config=config, door=slurm)


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
    assert slurm.request.output == "/shared/slurm/ana/shoal-att_1.0.out"
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


class SleepingSlurm(PaperSlurm):
    """Its node has an address once it is awake."""

    asked = 0

    def nodes(self) -> list[RawNode]:
        self.asked += 1
        [raw] = super().nodes()
        is_awake = self.state == "IDLE+CLOUD"
        return [msgspec.structs.replace(raw, address="10.9.9.9" if is_awake else "n0")]


async def test_ranks_meet_where_a_node_is_that_slurm_woke_for_them(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), SleepingSlurm()
    slurm.state = "IDLE+CLOUD+POWERED_DOWN"
    engine = engine_on(tmp_path, clock, slurm)
    [facts] = await engine.nodes()
    laid = order(nodes=("n0", "n1"), master_addr=facts.address)
    clock.advance(JOBS_S)  # much less than the list of nodes is believed for
    slurm.state = "IDLE+CLOUD"
    given = [await engine.as_given(laid) for _ in range(9)]
    assert {one.master_addr for one in given} == {"10.9.9.9"}
    assert slurm.asked == 2
    alone = order(nodes=("n0",), master_addr="127.0.0.1")
    assert await engine.as_given(alone) == alone


async def test_a_first_node_that_does_not_respond_is_not_asked_about_by_each_of_its_peers(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), SleepingSlurm()
    slurm.state = "IDLE*"
    engine = engine_on(tmp_path, clock, slurm)
    for _ in range(9):
        assert (await engine.as_given(order(nodes=("n0", "n1")))).master_addr == "n0"
    assert slurm.asked == 1


def test_how_nodes_get_a_shared_directory_goes_by_who_made_the_cluster(tmp_path: Path) -> None:
    def to_share() -> str:
        return engine_on(tmp_path, VirtualClock(), PaperSlurm(), SlurmConfig(ssh="ana@head")).to_share

    assert "`shoal connect slurm` with the flags that it had and `--shared DIR`" in to_share()
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "shoal.yaml").touch()
    assert to_share() == "`shoal down`, `shoal cluster create --shared DIR`, `shoal up`"
