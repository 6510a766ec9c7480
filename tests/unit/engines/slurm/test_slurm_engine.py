"""The Slurm engine over a Slurm on paper: what it asks, how often, and what it makes of few words."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import CLUSTER_UNREACHABLE, Submission, SupportsOwnQueue
from shoal.engines.fake import VirtualClock
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import CONFIG_S, JOBS_S, NODES_S, SlurmEngine
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts, parse_nodes
from shoal.engines.slurm.render import SlurmJobRequest, job_name
from shoal.engines.slurm.shared_files import UnixAccount
from shoal.engines.slurm.states import SETTLE_S, SlurmJob
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone
from shoal.model.evidence import Evidence
from shoal.wire import LaunchRequest, TaskSpecRequest
from tests.support.slurm.fake_slurm import (
    BOOTED_AT,
    NODE,
    CancelledJobSlurm,
    FakeSlurm,
    engine_on,
    slurm_task_spec,
)

pytestmark = pytest.mark.anyio


class NamedSlurm(FakeSlurm):
    cluster = "lab"

    def facts(self) -> SlurmFacts:
        return SlurmFacts(has_cgroups=True, cluster=self.cluster, heads=("b",))


async def test_another_slurm_behind_the_same_transport_is_refused(tmp_path: Path) -> None:
    """Equal node names and a younger boot: taken at its word, it would be evidence of the end."""
    clock, slurm = VirtualClock(BOOTED_AT), NamedSlurm()
    engine = engine_on(tmp_path, clock, slurm, SlurmConfig(cluster="lab", heads=("a", "b")))
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    await engine.list_owned()
    slurm.cluster, slurm.is_restarted = "prod", True
    for _ in range(3):
        clock.advance(CONFIG_S)
        [seen] = await engine.list_owned()
        assert (seen.evidence, CLUSTER_UNREACHABLE in seen.raw) == (Evidence.UNKNOWN, True)
    with pytest.raises(EngineUnreachable, match="not about our jobs") as raised:
        await engine.nodes()
    assert "the Slurm `prod` (b) answers, and the Slurm `lab` (a, b) was connected" in raised.value.message
    slurm.cluster = "lab"  # and one of its controllers is another by now
    clock.advance(JOBS_S)
    assert [facts.name for facts in await engine.nodes()] == ["n0"]


async def test_slurm_is_known_to_have_a_queue_of_its_own(tmp_path: Path) -> None:
    engine = engine_on(tmp_path, VirtualClock(), FakeSlurm())
    assert isinstance(engine, SupportsOwnQueue), "what is handed to it may have to wait for jobs of others"
    assert engine.own_queue == "Slurm"


@pytest.mark.parametrize("has_shared", [True, False])
async def test_output_of_a_node_agent_goes_to_no_folder_that_others_can_prepare(
    tmp_path: Path, has_shared: bool
) -> None:
    slurm, shared = FakeSlurm(), str(tmp_path / "shared") if has_shared else ""
    reach, config = ControlPlaneAccess(urls=("https://login:1",), ca="ca"), SlurmConfig(shared=shared)
    engine = SlurmEngine(tmp_path, clock=VirtualClock(), access=reach, config=config, transport=slurm)
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://login:1",), ca="ca", bootstrap_token="t"
    )
    await engine.launch(launch_request, (slurm_task_spec(),))
    wanted = f"{shared}/slurm/shoal-att_1.0.out" if has_shared else "/dev/null"
    assert slurm.request.output == wanted


class Refusing(FakeSlurm):
    """Its nodes are what `changed` makes of them, from the moment on that something is submitted."""

    refusal = "sbatch said: Batch job submission failed: Requested node configuration is not available"

    def __init__(self, *changed: tuple[str, str]) -> None:
        super().__init__()
        self.changed = changed
        self.is_changed = False

    def nodes(self) -> list[RawNode]:
        changed = NODE.format(state="IDLE", reason="none")
        for before, after in self.changed if self.is_changed else ():
            changed = changed.replace(before, after)
        return parse_nodes(changed)

    def submit(self, request: SlurmJobRequest, account: UnixAccount | None = None) -> str:
        self.is_changed = True
        raise EngineRefused(self.refusal)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("RealMemory=8000", "RealMemory=2000"), "`n0` has 4 CPUs and 2000 MiB now"),
        (("CPUEfctv=4", "CPUEfctv=1"), "`n0` has 1 CPUs"),
        (("gpu:h100:2(S:0,2),gpu:a100:1", "gpu:h100:1"), "`n0` has 1 GPUs now"),
        (("Partitions=main,low", "Partitions=low"), "`n0` is not among Slurm's nodes for us any more"),
        (("Gres=gpu:h100:2", "Gres=gpu:b200:2"), "`n0` was changed at Slurm a moment ago"),
    ],
)
async def test_a_node_that_was_changed_since_it_was_chosen_costs_no_job(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    slurm = Refusing(change)
    engine = engine_on(tmp_path, VirtualClock(), slurm, SlurmConfig(partition="main"))
    submission = Submission(
        attempt_id="att_1", epoch=1, task_specs=(slurm_task_spec(nodes=("n0",)),), bootstrap_token="t"
    )
    with pytest.raises(NodeGone, match=re.escape(message)) as gone:
        await engine.submit(submission)
    assert gone.value.facts["node"] == "n0"
    assert slurm.refusal in gone.value.message
    assert engine.mailbox.find("att_1") == {}


async def test_request_beyond_unchanged_nodes_is_refused_for_ever(tmp_path: Path) -> None:
    slurm = Refusing()
    engine = engine_on(tmp_path, VirtualClock(), slurm)
    submission = Submission(
        attempt_id="att_1", epoch=1, task_specs=(slurm_task_spec(nodes=("n0",)),), bootstrap_token="t"
    )
    with pytest.raises(EngineRefused) as refused:
        await engine.submit(submission)
    assert not isinstance(refused.value, NodeGone)
    slurm.changed, slurm.refusal = (
        (("RealMemory=8000", "RealMemory=2000"),),
        "sbatch said: Invalid time limit",
    )
    engine = engine_on(tmp_path / "2", VirtualClock(), slurm)
    slurm.is_changed = False
    with pytest.raises(EngineRefused) as refused:
        await engine.submit(submission)
    assert not isinstance(refused.value, NodeGone)


class CountingSlurm(FakeSlurm):
    """How often it was asked for its jobs; those that `sbatch` gave it wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_queries = 0
        self.is_away = False

    def jobs(self) -> list[SlurmJob]:
        self.num_queries += 1
        if self.is_away:
            raise EngineUnreachable("squeue: away")
        return [
            SlurmJob(
                job_id="1", state="PENDING", name=job_name(slurm_task_spec().identity, 0), reason="Priority"
            )
        ]


async def test_squeue_is_asked_once_a_second_however_much_is_submitted_meanwhile(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), CountingSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    await engine.list_owned()
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://login:1",), ca="ca", bootstrap_token="t"
    )
    for _ in range(5):
        await engine.launch(launch_request, (slurm_task_spec(nodes=("n0",)),))
        [seen] = await engine.list_owned()
        assert (slurm.num_queries, seen.evidence) == (1, Evidence.QUEUED)
        assert "squeue has not been asked since" in seen.raw
        clock.advance(0.1)
    clock.advance(JOBS_S)
    [seen] = await engine.list_owned()
    assert (slurm.num_queries, seen.evidence) == (2, Evidence.QUEUED)
    assert "is PENDING (Priority)" in seen.raw


async def test_a_squeue_that_failed_is_not_asked_again_at_once_and_is_not_forgotten(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), CountingSlurm()
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    slurm.is_away = True
    for _ in range(2):
        with pytest.raises(EngineUnreachable):
            await engine.observe_tasks(engine.mailbox.tasks())
    assert slurm.num_queries == 1
    slurm.is_away = False
    clock.advance(JOBS_S)
    assert await engine.observe_tasks(engine.mailbox.tasks())


async def test_query_of_one_attempt_keeps_facts_about_others(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT + 3600.0), CancelledJobSlurm()
    slurm.state = "IDLE"
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",), attempt_id="att_2"),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_1", node="n0", process="one"))
    clock.advance(20.0)
    await engine.list_owned()
    for _ in range(3):
        clock.advance((SETTLE_S + 30.0) / 3)
        await engine.observe_tasks(engine.mailbox.find("att_2").values())
    assert [seen.evidence for seen in await engine.list_owned()] == [Evidence.ENDED, Evidence.PENDING]


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
    slurm, reach = FakeSlurm(), ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path, clock=VirtualClock(), access=reach, config=config, transport=slurm)
    requested = Submission(
        attempt_id="att_1",
        epoch=1,
        task_specs=(slurm_task_spec(nodes=("n0",), project="vision"),),
        bootstrap_token="t",
    )
    if not is_refused:
        assert await engine.submit(requested) == "slurm:att_1"
        return
    with pytest.raises(
        EngineRefused, match="this Slurm is for project `default`, and the job is of `vision`"
    ):
        await engine.submit(requested)
    assert engine.mailbox.tasks() == []
    assert not hasattr(slurm, "request")


class SlowSlurm(FakeSlurm):
    """Takes two seconds to list its jobs."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.num_lists = 0

    def jobs(self) -> list[SlurmJob]:
        self.num_lists += 1
        self._clock.advance(2.0)
        return []


async def test_a_slurm_that_takes_long_to_answer_is_asked_less_often(tmp_path: Path) -> None:
    clock = VirtualClock(BOOTED_AT + 3600.0)
    slurm = SlowSlurm(clock)
    engine = engine_on(tmp_path, clock, slurm)
    engine.mailbox.add((slurm_task_spec(nodes=("n0",)),), None)
    began = clock.monotonic()
    while clock.monotonic() - began < 40.0:
        await engine.list_owned()
        clock.advance(1.0)
    assert slurm.num_lists == 4


class SleepingSlurm(FakeSlurm):
    """Its node has an address once it is awake."""

    num_queries = 0

    def nodes(self) -> list[RawNode]:
        self.num_queries += 1
        [raw] = super().nodes()
        is_awake = self.state == "IDLE+CLOUD"
        return [msgspec.structs.replace(raw, address="10.9.9.9" if is_awake else "n0")]


async def test_ranks_meet_where_a_node_is_that_slurm_woke_for_them(tmp_path: Path) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), SleepingSlurm()
    slurm.state = "IDLE+CLOUD+POWERED_DOWN"
    engine = engine_on(tmp_path, clock, slurm)
    [facts] = await engine.nodes()
    laid = slurm_task_spec(nodes=("n0", "n1"), master_addr=facts.address)
    clock.advance(JOBS_S)  # much less than the list of nodes is believed for
    slurm.state = "IDLE+CLOUD"
    passed = [await engine.resolve_task_spec(laid) for _ in range(9)]
    assert {item.ranks.master_addr for item in passed} == {"10.9.9.9"}
    assert slurm.num_queries == 2
    alone = slurm_task_spec(nodes=("n0",), master_addr="127.0.0.1")
    assert await engine.resolve_task_spec(alone) == alone


async def test_a_first_node_that_does_not_respond_is_not_asked_about_by_each_of_its_peers(
    tmp_path: Path,
) -> None:
    clock, slurm = VirtualClock(BOOTED_AT), SleepingSlurm()
    slurm.state = "IDLE*"
    engine = engine_on(tmp_path, clock, slurm)
    for _ in range(9):
        assert (await engine.resolve_task_spec(slurm_task_spec(nodes=("n0", "n1")))).ranks.master_addr == "n0"
    assert slurm.num_queries == 1


async def test_a_shared_directory_that_is_written_down_later_is_taken_up_and_no_other_after_it(
    tmp_path: Path,
) -> None:
    clock = VirtualClock(BOOTED_AT)
    engine = engine_on(tmp_path, clock, FakeSlurm())

    async def found(text: bytes) -> str | None:
        (tmp_path / "slurm.json").write_bytes(text)
        clock.advance(NODES_S)
        await engine.nodes()
        return engine.checkpoint_dir("7")

    await engine.nodes()
    assert engine.checkpoint_dir("7") is None
    assert await found(b"{}") is None
    assert await found(b"half a fi") is None
    assert await found(msgspec.json.encode(SlurmConfig(shared="/srv", cluster="other"))) is None
    for shared in ("/srv/one", "/srv/two"):
        assert await found(msgspec.json.encode(SlurmConfig(shared=shared))) == "/srv/one/checkpoints/7"


def test_how_nodes_get_a_shared_directory_goes_by_who_made_the_cluster(tmp_path: Path) -> None:
    def to_share(cluster: str = "shoal") -> str:
        config = SlurmConfig(ssh="ana@head", cluster=cluster)
        return engine_on(tmp_path, VirtualClock(), FakeSlurm(), config).sharing_hint

    others = "`shoal connect slurm` with the flags that it had and `--shared DIR`"
    assert others in to_share()
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "shoal.yaml").touch()
    assert to_share() == "`shoal cluster create --name shoal --shared DIR`"
    assert others in to_share("site"), "made by others, whatever was made from here"
    assert others in to_share("")
    (tmp_path / "clusters" / "second.yaml").touch()
    assert "`shoal cluster create --name second --shared DIR`" in to_share("second")
