"""The contract over a real Slurm with nodes in networks of their own, and what only a real Slurm can show."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from shoal.engines.slurm import SlurmConfig, SlurmEngine
from shoal.engines.slurm.render import job_name
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.wire import EndKind, TaskSpec
from tests.contract.engines.engine_contract import EngineContract, RankProgram
from tests.contract.engines.mailbox_world import MailboxWorld
from tests.contract.engines.test_local import SkewedClock
from tests.support.runtime.task_specs import change_task_spec
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = pytest.mark.engines
CODE = str(Path(__file__).parents[3] / "src")


class OnSlurm(MailboxWorld):
    """A world whose engine speaks to a laboratory's Slurm, through whichever transport."""

    def __init__(self, root: Path, lab: SlurmLab) -> None:
        super().__init__(root, lab.address)
        self.lab = lab
        self.node_names = lab.names[:2]
        self.shared = root / "shared"
        self.clock = SkewedClock()

    async def slurm(self, *command: str) -> str:
        return await anyio.to_thread.run_sync(lambda: self.lab.run(*command))

    async def refuses_too_much(self) -> None:
        good = self.submission()
        task_specs = tuple(change_task_spec(o, cpus=1.0, memory_bytes=1 << 40) for o in good.task_specs)
        with pytest.raises(EngineRefused, match="node configuration is not available"):
            await self.engine.submit(msgspec.structs.replace(good, task_specs=task_specs))
        assert await self.engine.list_owned() == []
        assert await self.slurm("squeue", "-h") == ""


class SlurmWorld(OnSlurm):
    engine: SlurmEngine

    def __init__(self, root: Path, lab: SlurmLab) -> None:
        super().__init__(root, lab)
        self.engine = self.open()

    def open(self) -> SlurmEngine:
        config = SlurmConfig(
            project="tests", python=self.lab.nodes_python, python_path=CODE, shared=str(self.shared)
        )
        reach = self.server.access(spool=str(self.spool), shared=str(self.shared))
        return SlurmEngine(self.home, clock=self.clock, access=reach, config=config)


@pytest.fixture
async def world(
    tmp_path: Path, slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SlurmWorld]:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    world = SlurmWorld(tmp_path, slurm)
    with world.server.serving(world.engine):
        yield world
        await world.end_all()
        await anyio.to_thread.run_sync(until_empty, slurm)


def until_empty(lab: SlurmLab) -> None:
    """What a test that failed has left in Slurm's queue fails none but itself."""
    try:
        lab.until(lambda: not lab.run("squeue", "-h").strip(), "no job is left")
    except AssertionError:
        lab.reset()
        raise


class TestSlurmEngine(EngineContract):
    pass


@pytest.mark.anyio
class TestSlurm:
    async def test_what_slurm_refuses_is_told_in_its_own_words_and_starts_nothing(
        self, world: SlurmWorld
    ) -> None:
        await world.refuses_too_much()

    async def test_nodes_have_their_gpus_features_racks_and_partitions(self, world: SlurmWorld) -> None:
        first = (await world.engine.nodes())[0]
        assert (first.name, first.pool, first.cpus, first.memory_bytes) == ("n0", "main", 4.0, 8000 << 20)
        assert [gpu.kind for gpu in first.gpus] == ["H100", "H100"]
        assert first.labels == {"feature.fast": "yes", "partition.main": "yes", "rack": "leaf"}
        assert first.address == world.lab.address_of("n0")

    async def test_a_share_in_slurms_queue_says_why_and_is_not_silent(self, world: SlurmWorld) -> None:
        await fill(world, "n0")
        submission = world.submission(RankProgram(lines=("late",)))
        await world.engine.submit(submission)
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert seen.evidence is Evidence.QUEUED
        assert "is PENDING (" in seen.raw
        await world.engine.submit(submission)
        assert len((await world.slurm("squeue", "-h", "-t", "PD", "-o", "%j")).splitlines()) == 1
        await world.slurm("scancel", "--name=filler")
        [ended] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert ended.outcome is not None
        assert ended.outcome.kind is EndKind.SUCCEEDED

    async def test_what_slurm_wrote_for_an_attempt_that_said_nothing_goes_once_that_is_forgotten(
        self, world: SlurmWorld
    ) -> None:
        submission = world.submission(RankProgram(lines=("fine",)))
        await world.engine.submit(submission)
        await world.until(submission.attempt_id, Evidence.ENDED)
        await anyio.to_thread.run_sync(until_empty, world.lab)
        world.clock.ahead += 60.0  # what is known of Slurm's queue is too old, or the job is cancelled in it
        await world.engine.prune(0.0, 1 << 40)
        [written] = [path async for path in anyio.Path(world.shared / "slurm").iterdir()]
        assert (await written.stat()).st_size == 0
        await world.engine.forget(submission.attempt_id)
        await world.engine.prune(0.0, 1 << 40)
        assert not await written.exists()

    async def test_a_controller_killed_right_after_a_submission_loses_nothing(
        self, world: SlurmWorld
    ) -> None:
        await lose_a_submission(world)

    async def test_what_waits_for_a_node_that_is_drained_is_lost_before_it_began(
        self, world: SlurmWorld
    ) -> None:
        await drain_under_who_waits(world)

    async def test_cancelled_in_the_queue_it_leaves_it(self, world: SlurmWorld) -> None:
        await fill(world, "n0")
        submission = world.submission()
        await world.engine.submit(submission)
        await world.engine.cancel(submission.attempt_id, 5.0)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.STOPPED
        assert "shoal" not in await world.slurm("squeue", "-h", "-t", "PD,R", "-o", "%j")
        await world.slurm("scancel", "--name=filler")

    async def test_a_suspended_job_is_alive_however_silent(self, world: SlurmWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        job = (await world.slurm("squeue", "-h", "-t", "R", "-o", "%i")).strip()
        await world.slurm("scontrol", "suspend", job)
        world.clock.ahead += 3600.0
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert (seen.evidence, seen.raw.split()[-1]) == (Evidence.SUSPENDED, "SUSPENDED")
        await world.slurm("scontrol", "resume", job)

    async def test_the_loss_of_a_slurmd_ends_nothing(self, world: SlurmWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await anyio.to_thread.run_sync(world.lab.kill_daemon, "n0")
        await anyio.to_thread.run_sync(_until_failed, world.lab, submission.task_specs[0])
        await world.until_running(submission.attempt_id)
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert seen.evidence is Evidence.ALIVE
        await world.engine.cancel(submission.attempt_id, 1.0)
        [ended] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert ended.outcome is not None
        assert ended.outcome.kind is EndKind.STOPPED
        await anyio.to_thread.run_sync(_bring_back, world.lab, "n0")

    async def test_the_loss_of_a_whole_node_is_no_evidence(self, world: SlurmWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await anyio.to_thread.run_sync(world.lab.crash_node, "n0")
        await anyio.to_thread.run_sync(_until_failed, world.lab, submission.task_specs[0])
        world.clock.ahead += 120.0
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert seen.evidence in (Evidence.UNKNOWN, Evidence.CLEARED)
        assert "NODE_FAIL" in seen.raw
        await anyio.to_thread.run_sync(_bring_back, world.lab, "n0")
        world.clock.ahead += 120.0
        [again] = (await world.observe(submission.attempt_id)).values()
        assert again.evidence in (Evidence.UNKNOWN, Evidence.CLEARED)
        [task] = world.engine.mailbox.find(submission.attempt_id).values()
        world.engine.mailbox.reap(task, EndKind.LOST, "the test crashed its node")

    async def test_a_node_cut_off_from_us_works_on_and_hands_in_everything_later(
        self, world: SlurmWorld
    ) -> None:
        await world.check_delivery_after_cut(world.lab)

    async def test_ranks_see_the_devices_that_slurm_gave(self, world: SlurmWorld) -> None:
        created = world.submission()
        task_spec = change_task_spec(created.task_specs[0], run="echo $CUDA_VISIBLE_DEVICES", gpu_ids=(1,))
        await world.slurm(*_filler("n0", "--gres=gpu:1", "--cpus-per-task=1"))
        await world.run_to_end(msgspec.structs.replace(created, task_specs=(task_spec,)))
        log = await world.whole_log(created.attempt_id, "n0")
        assert [line.split(b" ", 3)[3] for line in log.splitlines()] == [b"1"]
        await world.slurm("scancel", "--name=filler")

    async def test_the_last_cpu_of_a_node_can_be_used(self, world: SlurmWorld) -> None:
        created = world.submission(RankProgram(lines=("all",)))
        whole = {"cpus": 4.0, "memory_bytes": 8000 << 20}
        task_specs = tuple(change_task_spec(task_spec, **whole) for task_spec in created.task_specs)
        [seen] = await world.run_to_end(msgspec.structs.replace(created, task_specs=task_specs))
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.SUCCEEDED


def _filler(node: str, *more: str) -> list[str]:
    text = ["--job-name=filler", f"--nodelist={node}", "--wrap=sleep 600", "--output=/dev/null"]
    return ["sbatch", *text, *(more or ("--exclusive",))]


async def lose_a_submission(world: OnSlurm) -> None:
    """slurmctld is killed before it has written a job down: it is gone, its id is somebody else's, and it is
    submitted again, under another, and begins once.
    """
    await fill(world, "n0")
    await anyio.to_thread.run_sync(world.lab.until_saved)
    submission = world.submission(RankProgram(lines=("once",)))
    await world.engine.submit(submission)
    name = job_name(submission.task_specs[0].identity, 0)
    listed = ("squeue", "-h", "-t", "all", "-n", name, "-o", "%i")
    number = (await world.slurm(*listed)).strip()
    await anyio.to_thread.run_sync(lambda: world.lab.kill_controller(loses_state=True))
    try:
        [seen] = (await world.observe(submission.attempt_id)).values()
    finally:
        await anyio.to_thread.run_sync(world.lab.start_controller)
    assert (seen.evidence, "the cluster cannot be asked" in seen.raw) == (Evidence.QUEUED, True)
    assert await world.slurm(*listed) == "", "Slurm has lost it"
    held = ("sbatch", "--parsable", "--hold", "--job-name=stranger", "-o/dev/null", "--wrap=true")
    assert (await world.slurm(*held)).strip() == number, "its id is given away"
    await world.slurm("scancel", "--quiet", "--name=filler")
    with anyio.fail_after(90):
        while seen.evidence is not Evidence.ENDED:
            # A list that failed counts for a second, as for the control plane, which comes again.
            with contextlib.suppress(EngineUnreachable):
                await world.engine.submit(submission)
            await world.pass_time()
            [seen] = (await world.observe(submission.attempt_id)).values()
    assert seen.outcome is not None
    assert (seen.outcome.kind, world.num_starts(submission.attempt_id)) == (EndKind.SUCCEEDED, 1)
    again = (await world.slurm(*listed)).split()
    assert len(again) == 1
    assert again != [number]
    assert await world.slurm("squeue", "-h", "-n", "stranger", "-o", "%i %T") == f"{number} PENDING\n"
    await anyio.to_thread.run_sync(world.lab.cancel, "stranger", "news")


async def drain_under_who_waits(world: OnSlurm) -> None:
    """Slurm says the reason in other words by each transport, and in each version."""
    await fill(world, "n0")
    submission = world.submission()
    await world.engine.submit(submission)
    [seen] = (await world.observe(submission.attempt_id)).values()
    assert seen.evidence is Evidence.QUEUED
    await world.slurm("scontrol", "update", "nodename=n0", "state=drain", "reason=a fan")
    try:
        [lost] = await world.until(submission.attempt_id, Evidence.ENDED)
    finally:
        await world.slurm("scontrol", "update", "nodename=n0", "state=resume")
    assert lost.outcome is not None
    assert lost.outcome.kind is EndKind.LOST
    assert "`n0` takes no work: Slurm says DRAIN a fan" in lost.outcome.message
    await world.engine.forget(submission.attempt_id)
    await world.slurm("scancel", "--name=filler")
    await anyio.to_thread.run_sync(until_empty, world.lab)
    assert world.num_starts(submission.attempt_id) == 0


async def fill(world: OnSlurm, node: str) -> None:
    """Somebody else has the whole node."""
    await world.slurm(*_filler(node))

    def is_running() -> bool:
        return bool(world.lab.run("squeue", "-h", "-t", "R", "-n", "filler").strip())

    await anyio.to_thread.run_sync(lambda: world.lab.until(is_running, "the filler runs"))


def _until_failed(lab: SlurmLab, order: TaskSpec) -> None:
    text = ("squeue", "-h", "-t", "all", "-o", "%T", "-n", job_name(order.identity, 0))
    lab.until(lambda: "NODE_FAIL" in lab.run(*text), "Slurm believes that the node failed")


def _bring_back(lab: SlurmLab, name: str) -> None:
    """With the daemon gone, its node is down until the daemon registers again."""
    lab.crash_node(name)
    lab.start_node(name)
    lab.until(lambda: name in lab.usable_nodes(), f"{name} takes jobs again")
