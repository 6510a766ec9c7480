"""What of a few words of Slurm's is evidence that a share has ended: restarts, ends of jobs, accounting."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from shoal.engines.base import Sight, Submission, SupportsClearing
from shoal.engines.fake import VirtualClock
from shoal.engines.sightings import HEARD_S, LATE_S
from shoal.engines.slurm.engine import NODES_S, PAST_S, SlurmEngine
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import SETTLE_S, Job
from shoal.errors import EngineUnreachable
from shoal.wire import Dispatch, EndKind, Fetch
from tests.support.paper_slurm import BOOTED_AT, CancelledJob, PaperSlurm, engine_on, order

pytestmark = pytest.mark.anyio


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


class FailedJob(CancelledJob):
    """Slurm believes that it is over: its node was away."""

    word = "NODE_FAIL"


class RunningJob(CancelledJob):
    word = "RUNNING"


class CompletingJob(CancelledJob):
    word = "COMPLETING"


@pytest.mark.parametrize(
    ("state", "has_cgroups", "is_over"),
    [
        ("IDLE", True, True),
        ("IDLE+DRAIN", True, False),
        ("MIXED+DRAIN", True, False),
        ("IDLE+MAINTENANCE", True, True),
        ("IDLE*", True, False),
        ("DOWN+DRAIN", True, False),
        ("IDLE", False, False),
    ],
)
async def test_the_end_of_a_job_is_evidence_where_its_node_would_say_what_did_not_die(
    tmp_path: Path, state: str, has_cgroups: bool, is_over: bool
) -> None:
    """One that is drained already, for whatever, says nothing when slurmd gives processes up."""
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


@pytest.mark.parametrize("is_from_before", [False, True])
async def test_the_end_of_a_job_is_no_evidence_for_ranks_that_may_have_left_its_cgroup(
    tmp_path: Path, is_from_before: bool
) -> None:
    """What is handed to Slurm now stays there; what a Shoal from before has begun may not have."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    engine = engine_on(tmp_path, clock, slurm)
    given = order(nodes=("n0",), stays_in_cgroup=False)
    if is_from_before:
        engine.desk.add((given,), None)
    else:
        await engine.submit(Submission(attempt_id="att_1", epoch=1, orders=(given,), ticket="t"))
    [share] = engine.desk.shares()
    assert share.order.stays_in_cgroup is not is_from_before
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.UNKNOWN
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.UNKNOWN if is_from_before else Sight.ENDED)


@pytest.mark.parametrize("speaks", [False, True])
async def test_the_end_of_a_job_is_no_evidence_from_another_machine_that_has_got_the_name_of_its_node(
    tmp_path: Path, speaks: bool
) -> None:
    """Slurm asks that one, which knows of no such job; the keeper runs on where it began, cut off."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    asked = Fetch(attempt_id="att_1", node="n0", process="one")
    engine.desk.take(asked)
    await engine.list_owned()
    slurm.address = "10.204.204.99"
    clock.advance(NODES_S)
    await engine.list_owned()
    if speaks:  # nobody moves by speaking
        engine.desk.take(asked)
        await engine.list_owned()
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.outcome) == (Sight.UNKNOWN, None)
    slurm.restarted = True
    clock.advance(NODES_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.UNKNOWN, "the start of another machine"
    slurm.address, slurm.restarted = PaperSlurm.address, False
    for _ in range(3):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED


def unkilled_on(tmp_path: Path, clock: VirtualClock, slurm: PaperSlurm) -> SlurmEngine:
    """An engine with a share that somebody has, on a node where something did not die."""
    slurm.state, slurm.reason = "IDLE+DRAIN", "Kill task failed"
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    return engine


@pytest.mark.parametrize(
    ("jobs", "sight"),
    [
        (CancelledJob, Sight.ORPHANED),
        (FailedJob, Sight.DOUBTFUL),
        (RunningJob, Sight.DOUBTFUL),
        (CompletingJob, Sight.DOUBTFUL),
        (PaperSlurm, Sight.DOUBTFUL),
    ],
)
async def test_the_end_of_a_job_is_no_evidence_where_slurm_could_not_kill_all_of_one(
    tmp_path: Path, jobs: type[PaperSlurm], sight: Sight
) -> None:
    """What Slurm merely believes to be over, or has forgotten, may run: what did not die may be another's.
    And one that runs on other nodes may have been given up on this one.
    """
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), jobs()
    engine = unkilled_on(tmp_path, clock, slurm)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.outcome) == (sight, None)
        assert "Slurm says of `n0`: Kill task failed" in seen.raw
    slurm.restarted = True
    clock.advance(NODES_S)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ENDED, "nothing outlives a restart"


async def test_a_gang_that_runs_on_hides_nobody_whom_slurm_gave_up_on_one_of_its_nodes(
    tmp_path: Path,
) -> None:
    """`--no-kill`: the keeper on n0 was killed, slurmd gives its rank up, and n1 keeps the job RUNNING."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RunningJob()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(), order(node="n1", node_rank=1)), None)
    there = Fetch(attempt_id="att_1", node="n1", process="two")
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    engine.desk.take(there)
    slurm.state, slurm.reason = "MIXED+DRAIN", "Kill task failed"
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        engine.desk.take(there)
        seen = {one.node: one.sight for one in await engine.list_owned()}
        assert seen == {"n0": Sight.DOUBTFUL, "n1": Sight.ALIVE}


@pytest.mark.parametrize("jobs", [CancelledJob, FailedJob, PaperSlurm])
async def test_who_lived_under_an_earlier_control_plane_may_speak_before_anything_is_stopped(
    tmp_path: Path, jobs: type[PaperSlurm]
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), jobs()
    await unkilled_on(tmp_path, clock, slurm).list_owned()
    engine = engine_on(tmp_path, clock, slurm)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.DOUBTFUL
    clock.advance(LATE_S - 0.1)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.DOUBTFUL
    engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE


async def test_what_did_not_die_is_remembered_whatever_the_reason_becomes_until_the_node_is_resumed(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJob()
    engine = unkilled_on(tmp_path, clock, slurm)
    [seen] = await engine.list_owned()
    assert seen.sight is Sight.ALIVE
    for state, reason in (("IDLE+DRAIN", "maintenance"), ("DOWN*", "Not responding"), ("IDLE*", "none")):
        slurm.state, slurm.reason = state, reason
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.is_cleared) == (Sight.ORPHANED, False)
        assert "Slurm says of `n0`: Kill task failed" in seen.raw
    slurm.state, slurm.reason = "IDLE", "none"
    clock.advance(SETTLE_S)
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.is_cleared) == (Sight.UNKNOWN, True)


@pytest.mark.parametrize(
    ("jobs", "has_cgroups", "is_over"),
    [
        (CancelledJob, True, True),
        (CancelledJob, False, False),
        (FailedJob, True, False),
        (PaperSlurm, True, False),
    ],
)
async def test_what_slurm_says_once_somebody_resumed_the_node_counts_from_then(
    tmp_path: Path, jobs: type[PaperSlurm], has_cgroups: bool, is_over: bool
) -> None:
    """As evidence where it is; else it withdraws the doubt, and the fence counts."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), jobs()
    slurm.has_cgroups = has_cgroups
    engine = unkilled_on(tmp_path, clock, slurm)
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert (seen.sight in (Sight.ORPHANED, Sight.DOUBTFUL), seen.is_cleared) == (True, False)
    slurm.state, slurm.reason = "IDLE", "none"
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert (seen.sight, seen.is_cleared) == (Sight.UNKNOWN, True)
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.sight is (Sight.ENDED if is_over else Sight.UNKNOWN)


async def test_what_a_keeper_saw_not_die_is_not_withdrawn_by_a_slurm_that_knows_nothing_of_it(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), PaperSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.desk.add((order(nodes=("n0",)),), None)
    share = engine.desk.take(Fetch(attempt_id="att_1", node="n0", process="one"))
    told = Dispatch(attempt_id="att_1", epoch=share.order.epoch, node="n0", process="one", left="it is stuck")
    engine.desk.hear(told, b"")
    for _ in range(2):
        clock.advance(HEARD_S)
        [seen] = await engine.list_owned()
        assert (seen.sight, seen.raw, seen.is_cleared) == (Sight.ORPHANED, "it is stuck", False)
        engine = engine_on(tmp_path, clock, slurm)  # another control plane, and the keeper is gone, too


async def test_who_helps_where_something_does_not_die_is_told_what_to_type(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, VirtualClock(), PaperSlurm())
    await engine.nodes()
    assert isinstance(engine, SupportsClearing)
    assert "`scontrol update nodename=n0 state=resume`" in engine.how_to_clear("n0")
    assert engine.how_to_clear("scrapped") == "", "Slurm would not know it"


class TwinJobs(PaperSlurm):
    """Two of the first attempt, as `sbatch` was run twice; the later found no order."""

    states = ("NODE_FAIL", "COMPLETED")

    def jobs(self) -> list[Job]:
        return [
            Job(job_id=str(number), state=state, name=job_name(order(), 0))
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
        return [Job(job_id="7", state=self.job_state, name=job_name(order(), 0), is_past=True)]


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
    assert slurm.asked == [{job_name(order(), 0)}] * 2
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
