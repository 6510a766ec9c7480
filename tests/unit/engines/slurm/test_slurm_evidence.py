"""What of a few words of Slurm's is evidence that a task has ended: restarts, ends of jobs, accounting."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from shoal.engines.base import Submission, SupportsClearing
from shoal.engines.fake import VirtualClock
from shoal.engines.remote.task_observer import HEARD_S, LATE_S
from shoal.engines.slurm.engine import ACCOUNTING_S, NODES_S, SlurmEngine
from shoal.engines.slurm.render import job_name
from shoal.engines.slurm.states import SETTLE_S, SlurmJob
from shoal.errors import EngineUnreachable
from shoal.model.evidence import PER_CLUSTER, Evidence
from shoal.wire import EndKind, StatusReport, TaskSpecRequest
from tests.support.slurm.fake_slurm import (
    BOOTED_AT,
    NO_PROOF,
    CancelledJobSlurm,
    FakeSlurm,
    engine_on,
    slurm_task_spec,
)

pytestmark = pytest.mark.anyio


# Dates of two clocks say nothing: what counts is that slurmctld says another one than before.
@pytest.mark.parametrize("taken_s", [-3600.0, 3600.0])
async def test_reboot_ends_a_task_whose_job_slurm_has_forgotten(tmp_path: Path, taken_s: float) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + taken_s), FakeSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ALIVE
    clock.advance(LATE_S + HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.evidence in NO_PROOF
    slurm.is_restarted = True
    engine = engine_on(tmp_path, clock, slurm)  # a control plane that was away meanwhile
    await engine.list_owned()
    clock.advance(LATE_S)
    [seen] = await engine.list_owned()
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.LOST
    assert "the node was restarted since" in seen.outcome.message


async def test_reboot_before_the_task_began_is_no_evidence(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), FakeSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    await engine.list_owned()  # what Slurm says of the node now is believed for ten seconds
    slurm.is_restarted = True
    clock.advance(2.0)
    requested = TaskSpecRequest(attempt_id="att_1", node="n0", process="one")
    engine.mailbox.assign(requested)
    clock.advance(1.0)
    await engine.list_owned()
    clock.advance(NODES_S)
    engine.mailbox.assign(requested)
    await engine.list_owned()
    for _ in range(3):
        clock.advance(LATE_S + HEARD_S)
        [seen] = await engine.list_owned()
        assert seen.evidence in NO_PROOF


async def test_reporting_task_is_not_reaped_by_reports_of_slurm(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), FakeSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    requested = TaskSpecRequest(attempt_id="att_1", node="n0", process="one")
    engine.mailbox.assign(requested)
    await engine.list_owned()
    slurm.is_restarted = True
    for _ in range(20):
        clock.advance(5.5)  # as often as a node agent speaks, and a little late
        [seen] = await engine.list_owned()
        assert seen.evidence is Evidence.ALIVE
        engine.mailbox.assign(requested)


@pytest.mark.parametrize("is_slurmd_older", [True, False])
async def test_changed_clock_is_no_reboot(tmp_path: Path, is_slurmd_older: bool) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 7200.0), FakeSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    requested = TaskSpecRequest(attempt_id="att_1", node="n0", process="one")
    engine.mailbox.assign(requested)
    await engine.list_owned()
    slurm.has_clock_jumped, slurm.is_restarted = is_slurmd_older, not is_slurmd_older
    for _ in range(2):
        clock.advance(NODES_S / 2)
        await engine.list_owned()
        engine.mailbox.assign(requested)
    if not is_slurmd_older:  # who speaks now lives in that boot, whatever its date
        await engine.list_owned()
    for _ in range(3):
        clock.advance(LATE_S + HEARD_S)
        [seen] = await engine.list_owned()
        assert (seen.evidence in NO_PROOF, seen.outcome) == (True, None)


class FailedJob(CancelledJobSlurm):
    """Slurm believes that it is over: its node was away."""

    job_state = "NODE_FAIL"


class RunningJob(CancelledJobSlurm):
    job_state = "RUNNING"


class CompletingJob(CancelledJobSlurm):
    job_state = "COMPLETING"


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
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJobSlurm()
    slurm.state = state
    slurm.has_cgroups = has_cgroups
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [early] = await engine.list_owned()
    assert early.evidence in NO_PROOF
    clock.advance(SETTLE_S)
    [seen] = await engine.list_owned()
    assert seen.evidence in NO_PROOF  # Slurm's KillWait comes on top
    clock.advance(30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence in ((Evidence.ENDED,) if is_over else NO_PROOF)


@pytest.mark.parametrize("is_from_before", [False, True])
async def test_the_end_of_a_job_is_no_evidence_for_ranks_that_may_have_left_its_cgroup(
    tmp_path: Path, is_from_before: bool
) -> None:
    """What is handed to Slurm now stays there; what a Shoal from before has begun may not have."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJobSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    passed = slurm_task_spec(nodes=("n0",), stays_in_cgroup=False)
    if is_from_before:
        engine.mailbox.add((passed,), None)
    else:
        await engine.submit(
            Submission(attempt_id="att_1", epoch=1, task_specs=(passed,), bootstrap_token="t")
        )
    [task] = engine.mailbox.tasks()
    assert task.task_spec.isolation.stays_in_cgroup is not is_from_before
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert seen.evidence in NO_PROOF
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence in (NO_PROOF if is_from_before else (Evidence.ENDED,))


@pytest.mark.parametrize("speaks", [False, True])
async def test_the_end_of_a_job_is_no_evidence_from_another_machine_that_has_got_the_name_of_its_node(
    tmp_path: Path, speaks: bool
) -> None:
    """Slurm asks that one, which knows of no such job; the node agent runs on where it began, cut off."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJobSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    requested = TaskSpecRequest(attempt_id="att_1", node="n0", process="one")
    engine.mailbox.assign(requested)
    await engine.list_owned()
    slurm.address = "10.204.204.99"
    clock.advance(NODES_S)
    await engine.list_owned()
    if speaks:  # nobody moves by speaking
        engine.mailbox.assign(requested)
        await engine.list_owned()
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert (seen.evidence in NO_PROOF, seen.outcome) == (True, None)
    slurm.is_restarted = True
    clock.advance(NODES_S)
    [seen] = await engine.list_owned()
    assert seen.evidence in NO_PROOF, "the start of another machine"
    slurm.address, slurm.is_restarted = FakeSlurm.address, False
    for _ in range(3):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED


def unkilled_on(tmp_path: Path, clock: VirtualClock, slurm: FakeSlurm) -> SlurmEngine:
    """An engine with a task that somebody has, on a node where something did not die."""
    slurm.state, slurm.reason = "IDLE+DRAIN", "Kill task failed"
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    return engine


@pytest.mark.parametrize(
    ("jobs", "evidence"),
    [
        (CancelledJobSlurm, Evidence.ORPHANED_PER_CLUSTER),
        (FailedJob, Evidence.DOUBTFUL),
        (RunningJob, Evidence.DOUBTFUL),
        (CompletingJob, Evidence.DOUBTFUL),
        (FakeSlurm, Evidence.DOUBTFUL),
    ],
)
async def test_the_end_of_a_job_is_no_evidence_where_slurm_could_not_kill_all_of_one(
    tmp_path: Path, jobs: type[FakeSlurm], evidence: Evidence
) -> None:
    """What Slurm merely believes to be over, or has forgotten, may run: what did not die may be another's.
    And one that runs on other nodes may have been given up on this one.
    """
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), jobs()
    engine = unkilled_on(tmp_path, clock, slurm)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ALIVE
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert (seen.evidence, seen.outcome) == (evidence, None)
        assert "Slurm says of `n0`: Kill task failed" in seen.raw
    slurm.is_restarted = True
    clock.advance(NODES_S)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ENDED, "nothing outlives a restart"


async def test_running_gang_does_not_hide_leftovers_on_one_node(
    tmp_path: Path,
) -> None:
    """`--no-kill`: the node agent on n0 was killed, slurmd gives its rank up, and n1 keeps the job
    RUNNING.
    """
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RunningJob()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(), slurm_task_spec(node="n1", node_rank=1)), None)
    there = TaskSpecRequest(attempt_id="att_1", node="n1", process="two")
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    engine.mailbox.assign(there)
    slurm.state, slurm.reason = "MIXED+DRAIN", "Kill task failed"
    for _ in range(5):
        clock.advance(SETTLE_S + 30.0)
        engine.mailbox.assign(there)
        seen = {observation.node: observation.evidence for observation in await engine.list_owned()}
        assert seen == {"n0": Evidence.DOUBTFUL, "n1": Evidence.ALIVE}


@pytest.mark.parametrize("jobs", [CancelledJobSlurm, FailedJob, FakeSlurm])
async def test_new_control_plane_waits_for_reports_before_it_acts_on_leftovers(
    tmp_path: Path, jobs: type[FakeSlurm]
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), jobs()
    await unkilled_on(tmp_path, clock, slurm).list_owned()
    engine = engine_on(tmp_path, clock, slurm)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.DOUBTFUL
    clock.advance(LATE_S - 0.1)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.DOUBTFUL
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ALIVE


async def test_leftovers_are_remembered_until_the_node_is_resumed(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJobSlurm()
    engine = unkilled_on(tmp_path, clock, slurm)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.ALIVE
    for state, reason in (("IDLE+DRAIN", "maintenance"), ("DOWN*", "Not responding"), ("IDLE*", "none")):
        slurm.state, slurm.reason = state, reason
        clock.advance(SETTLE_S + 30.0)
        [seen] = await engine.list_owned()
        assert seen.evidence is Evidence.ORPHANED_PER_CLUSTER
        assert "Slurm says of `n0`: Kill task failed" in seen.raw
    slurm.state, slurm.reason = "IDLE", "none"
    clock.advance(SETTLE_S)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.CLEARED


@pytest.mark.parametrize(
    ("jobs", "has_cgroups", "is_over"),
    [
        (CancelledJobSlurm, True, True),
        (CancelledJobSlurm, False, False),
        (FailedJob, True, False),
        (FakeSlurm, True, False),
    ],
)
async def test_resumed_node_counts_as_clear_from_then_on(
    tmp_path: Path, jobs: type[FakeSlurm], has_cgroups: bool, is_over: bool
) -> None:
    """As evidence where it is; else it withdraws the doubt, and the fence counts."""
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), jobs()
    slurm.has_cgroups = has_cgroups
    engine = unkilled_on(tmp_path, clock, slurm)
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence in PER_CLUSTER
    slurm.state, slurm.reason = "IDLE", "none"
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence is Evidence.CLEARED
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence in ((Evidence.ENDED,) if is_over else NO_PROOF)


async def test_leftovers_reported_by_a_node_agent_are_not_withdrawn_by_slurm(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), FakeSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    task = engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    result = StatusReport(
        attempt_id="att_1",
        epoch=task.task_spec.identity.epoch,
        node="n0",
        process="one",
        leftovers="it is stuck",
    )
    engine.mailbox.receive(result, b"")
    for _ in range(2):
        clock.advance(HEARD_S)
        [seen] = await engine.list_owned()
        assert (seen.evidence, seen.raw) == (Evidence.ORPHANED, "it is stuck")
        engine = engine_on(tmp_path, clock, slurm)  # another control plane, and the node agent is gone, too


async def test_hint_for_leftovers_names_the_scontrol_command(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, VirtualClock(), FakeSlurm())
    await engine.nodes()
    assert isinstance(engine, SupportsClearing)
    assert "`scontrol update nodename=n0 state=resume`" in engine.how_to_clear("n0")
    assert engine.how_to_clear("scrapped") == "", "Slurm would not know it"


class TwinJobs(FakeSlurm):
    """Two of the first attempt, as `sbatch` was run twice; the later found no task spec."""

    states = ("NODE_FAIL", "COMPLETED")

    def jobs(self) -> list[SlurmJob]:
        return [
            SlurmJob(job_id=str(number), state=state, name=job_name(slurm_task_spec().identity, 0))
            for number, state in enumerate(self.states, 9)
        ]


@pytest.mark.parametrize(
    ("states", "raw", "is_over"),
    [
        (("NODE_FAIL", "COMPLETED"), "9 is NODE_FAIL", False),
        (("COMPLETED", "NODE_FAIL"), "10 is NODE_FAIL", False),
        (("RUNNING", "NODE_FAIL"), "9 is RUNNING", False),
        (("FAILED", "COMPLETED"), "10 is COMPLETED", True),
    ],
)
async def test_ended_twin_does_not_hide_a_job_whose_end_is_unconfirmed(
    tmp_path: Path, states: tuple[str, str], raw: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), TwinJobs()
    slurm.states = states
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(HEARD_S)
    [seen] = await engine.list_owned()
    assert raw in seen.raw
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert (seen.evidence is Evidence.ENDED) is is_over


class RememberingSlurm(FakeSlurm):
    """Its accounting has the first attempt's job, in this state; nobody else has a trace of it."""

    job_state = "COMPLETED"
    is_away = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[set[str]] = []

    def accounting_jobs(self, names: Collection[str]) -> list[SlurmJob]:
        self.asked.append(set(names))
        if self.is_away:
            raise EngineUnreachable("slurmdbd is away")
        return [
            SlurmJob(
                job_id="7", state=self.job_state, name=job_name(slurm_task_spec().identity, 0), is_past=True
            )
        ]


@pytest.mark.parametrize(
    ("job_state", "node_state", "is_over"),
    [("COMPLETED", "IDLE", True), ("COMPLETED", "IDLE*", False), ("NODE_FAIL", "IDLE", False)],
)
async def test_accounting_counts_as_much_as_squeue(
    tmp_path: Path, job_state: str, node_state: str, is_over: bool
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RememberingSlurm()
    slurm.job_state, slurm.state = job_state, node_state
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [early] = await engine.list_owned()
    assert early.evidence in NO_PROOF
    assert f"Slurm's accounting has job 7 as {job_state}" in early.raw
    clock.advance(SETTLE_S + 30.0)
    [seen] = await engine.list_owned()
    assert seen.evidence in ((Evidence.ENDED,) if is_over else NO_PROOF)


async def test_accounting_is_queried_rarely_and_only_for_jobs_without_a_trace(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RememberingSlurm()
    slurm.job_state = "RUNNING"
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    clock.advance(HEARD_S)
    await engine.list_owned()
    assert slurm.asked == []
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    for _ in range(120):
        clock.advance(1.0)
        await engine.list_owned()
    assert slurm.asked == [{job_name(slurm_task_spec().identity, 0)}] * 2
    slurm.job_state, slurm.state = "FAILED", "DOWN"
    for _ in range(3):
        clock.advance(ACCOUNTING_S)
        await engine.list_owned()
    assert len(slurm.asked) == 3


async def test_accounting_that_is_away_is_no_trace(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), RememberingSlurm()
    slurm.is_away = True
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    [seen] = await engine.list_owned()
    assert (seen.evidence in NO_PROOF, "no trace" in seen.raw) == (True, True)
