"""The contract over a real Ray with nodes in networks of their own, and what only a real Ray can show."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from shoal.engines.ray import RayConfig, RayEngine
from shoal.engines.ray.client import RayClient
from shoal.engines.ray.head import finder
from shoal.engines.ray.parse import parse_nodes
from shoal.engines.ray.render import key_of
from shoal.errors import EngineRefused, EngineUnreachable, SpecError
from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts
from shoal.wire import EndKind
from tests.contract.engines.engine_contract import EngineContract, RankProgram
from tests.contract.engines.mailbox_world import MailboxWorld
from tests.contract.engines.test_local import SkewedClock
from tests.support.ray.real_ray import RAY_PYTHON, RayLab
from tests.support.runtime.task_specs import change_task_spec

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
]  # with the start of a Ray, which may take its time
SOAK = pytest.mark.soak
"""Killed or cut off beside a control plane, too, in tests/e2e/ray/test_ray.py."""
CODE = str(Path(__file__).parents[3] / "src")


def config_for(lab: RayLab, spool_root: Path) -> RayConfig:
    return RayConfig(
        address=lab.head_address,
        token_file=str(lab.token_file),
        ray_python=str(RAY_PYTHON),
        python_path=CODE,
        spool=str(spool_root),
        project="tests",
    )


def client_for(lab: RayLab, config: RayConfig) -> RayClient:
    return RayClient(
        config, namespace="tests", log_file=lab.root / "bridge.log", find=finder(config, lab.root)
    )


class RayWorld(MailboxWorld):
    engine: RayEngine

    def __init__(self, root: Path, lab: RayLab, client: RayClient, spool_root: Path) -> None:
        super().__init__(root, lab.address)
        self.lab = lab
        self.client = client
        self.spool = spool_root
        self.config = config_for(lab, spool_root)
        self.node_names = lab.names
        self.clock = SkewedClock()
        self.engine = self.open()

    def open(self) -> RayEngine:
        reach = self.server.access(spool=str(self.spool))
        return RayEngine(self.home, clock=self.clock, access=reach, config=self.config, client=self.client)

    async def until_nodes(self, *names: str) -> None:
        """Until Ray calls no other alive, and an agent answers on each of these."""
        with anyio.fail_after(180):
            while {n.name: n.is_alive for n in await self._nodes()} != dict.fromkeys(names, True):  # noqa: ASYNC110
                await anyio.sleep(0.2)

    async def until_alive(self, *names: str) -> None:
        """Until these, and no other that Ray has, are alive."""
        with anyio.fail_after(180):
            while {n.name for n in await self._nodes() if n.is_alive} != set(names):  # noqa: ASYNC110
                await anyio.sleep(0.2)

    async def agent_pid(self, node: str) -> int:
        result = await anyio.to_thread.run_sync(self.client.nodes)
        [result_text] = [n.node_id for n in parse_nodes(result) if n.facts.name == node]
        return int(result["facts"][result_text]["pid"])

    def keeper_pid(self, attempt_id: str, node: str = "n0") -> int:
        file = self.spool / "ray" / key_of(attempt_id, node, 0) / "node_agent.json"
        return int(json.loads(file.read_text())["pid"])

    async def said(self, attempt_id: str) -> str:
        """What the agent says of the only task, whatever its node agent does."""
        [glimpse] = (
            await self.engine.observe_tasks(list(self.engine.mailbox.find(attempt_id).values()))
        ).values()
        return glimpse.raw

    async def _nodes(self) -> list[NodeFacts]:
        self.clock.ahead += 10.0
        try:
            return await self.engine.nodes()
        except EngineUnreachable:
            return []


@pytest.fixture(scope="module")
def lab(ray_site: RayLab) -> RayLab:
    return ray_site


@pytest.fixture(scope="module")
def client(lab: RayLab) -> Iterator[RayClient]:
    client = client_for(lab, config_for(lab, lab.root / "spool"))
    with lab.restarting_daemons():  # a cut of the file before may have ended a raylet
        lab.until(lambda: len(usable(client)) == len(lab.names), "an agent answers on every node")
    yield client
    client.dismiss()
    client.close()


def usable(client: RayClient) -> list[str]:
    try:
        return [node.facts.name for node in parse_nodes(client.nodes()) if node.facts.is_alive]
    except EngineUnreachable:
        return []


@pytest.fixture
async def world(tmp_path: Path, lab: RayLab, client: RayClient) -> AsyncIterator[RayWorld]:
    world = RayWorld(tmp_path, lab, client, lab.root / "spool")
    with world.server.serving(world.engine):
        yield world
        await world.end_all()


class TestRayEngine(EngineContract):
    pass


@pytest.mark.anyio
class TestRay:
    async def test_nodes_have_their_gpus_labels_and_addresses(self, world: RayWorld) -> None:
        first = (await world.engine.nodes())[0]
        assert (first.name, first.cpus, [gpu.index for gpu in first.gpus]) == ("n0", 4.0, [0, 1])
        assert (first.labels["rack"], first.labels["hostname"]) == ("leaf", "n0")
        assert first.address == world.lab.address_of("n0")
        assert "head" not in {facts.name for facts in await world.engine.nodes()}

    async def test_jobs_of_other_projects_are_refused_unless_all_are_trusted(self, world: RayWorld) -> None:
        created = world.submission(RankProgram())
        task_specs = tuple(change_task_spec(task_spec, project="others") for task_spec in created.task_specs)
        stranger = msgspec.structs.replace(created, task_specs=task_specs)
        with pytest.raises(EngineRefused, match="this Ray is for project `tests`"):
            await world.engine.submit(stranger)
        assert await world.engine.list_owned() == []
        world.config = msgspec.structs.replace(world.config, has_shared_trust=True)
        await world.restart()
        [seen] = await world.run_to_end(stranger)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.SUCCEEDED

    async def test_a_wrong_token_is_said_to_be_one(self, world: RayWorld, tmp_path: Path) -> None:
        wrong = tmp_path / "token"
        wrong.write_text("0" * 48)
        wrong.chmod(0o600)
        client = client_for(world.lab, msgspec.structs.replace(world.config, token_file=str(wrong)))
        try:
            with pytest.raises(SpecError, match="does not take the token"):
                await anyio.to_thread.run_sync(client.nodes)
        finally:
            client.close()

    async def test_an_agent_that_does_not_answer_keeps_nobody_waiting_for_the_others(
        self, world: RayWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else one node that hangs would hold up every look, and with it the recovery of all that runs."""
        submission = world.submission(num_nodes=2)
        await world.run_until_started(submission)
        tasks = list(world.engine.mailbox.find(submission.attempt_id).values())
        agent = await world.agent_pid("n0")
        os.kill(agent, signal.SIGSTOP)
        try:
            await world.until_alive(*world.lab.others("n0"))
            monkeypatch.setattr("shoal.engines.ray.client.WITHIN_S", 100.0)
            with anyio.fail_after(50):
                seen = await world.engine.observe_tasks(tasks)
        finally:
            os.kill(agent, signal.SIGCONT)
        message = {node: glimpse.raw for (_, node), glimpse in seen.items()}
        assert message["n0"] == "n0: its agent has not answered in time"
        assert "its node agent is process" in message["n1"]
        await world.until_alive(*world.node_names)
        message = {
            node: glimpse.raw for (_, node), glimpse in (await world.engine.observe_tasks(tasks)).items()
        }
        assert "its node agent is process" in message["n0"], "who has answered is asked again"

    @SOAK
    async def test_a_killed_agent_is_replaced_by_one_that_finds_what_runs(self, world: RayWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        before = await world.agent_pid("n0")
        os.kill(before, signal.SIGKILL)
        await world.until_nodes(*world.node_names)
        assert await world.agent_pid("n0") != before
        await world.until_running(submission.attempt_id)
        assert "its node agent is process" in await world.said(submission.attempt_id)
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert seen.evidence is Evidence.ALIVE
        await world.run_to_end(world.submission(RankProgram()))

    @SOAK
    async def test_a_killed_keeper_takes_its_share_with_it_and_that_is_evidence(
        self, world: RayWorld
    ) -> None:
        submission = world.submission(RankProgram(exit_code=None, has_children=True, is_deaf=True))
        await world.run_until_started(submission)
        await world.until_running(submission.attempt_id)
        os.kill(world.keeper_pid(submission.attempt_id), signal.SIGKILL)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.LOST
        assert world.num_running(submission.attempt_id) == 0

    @SOAK
    async def test_jobs_outlive_a_killed_raylet_and_are_found_by_the_next(self, world: RayWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await anyio.to_thread.run_sync(world.lab.kill_daemon, "n0")
        await world.until_nodes(*world.lab.others("n0"))
        await world.until_running(submission.attempt_id)
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert (seen.evidence, seen.outcome) == (Evidence.ALIVE, None)
        await anyio.to_thread.run_sync(world.lab.start_node, "n0")
        await world.until_nodes(*world.node_names)
        assert "its node agent is process" in await world.said(submission.attempt_id)
        await world.engine.cancel(submission.attempt_id, 1.0)
        [ended] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert ended.outcome is not None
        assert ended.outcome.kind is EndKind.STOPPED

    @SOAK
    async def test_jobs_outlive_a_killed_head_and_the_next_one_knows_its_nodes(self, world: RayWorld) -> None:
        submission = world.submission(num_nodes=2)
        await world.run_until_started(submission)
        await anyio.to_thread.run_sync(world.lab.kill_head)
        for seen in (await world.observe(submission.attempt_id)).values():
            assert (seen.evidence, seen.outcome) == (Evidence.ALIVE, None)
        await anyio.to_thread.run_sync(world.lab.start_head)
        await world.until_nodes(*world.node_names)
        for seen in (await world.observe(submission.attempt_id)).values():
            assert seen.evidence is Evidence.ALIVE
        assert world.num_starts(submission.attempt_id) == 2
        await world.run_to_end(world.submission(RankProgram()))

    async def test_a_lost_node_is_no_evidence_until_somebody_there_has_looked(self, world: RayWorld) -> None:
        submission = world.submission()
        await world.run_until_started(submission)
        await anyio.to_thread.run_sync(world.lab.crash_node, "n0")
        await world.until_nodes(*world.lab.others("n0"))
        world.clock.ahead += 120.0
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert (seen.evidence, seen.outcome) == (Evidence.UNKNOWN, None)
        assert "Ray has no node n0 now" in seen.raw
        await anyio.to_thread.run_sync(world.lab.start_node, "n0")
        [ended] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert ended.outcome is not None
        assert ended.outcome.kind is EndKind.LOST
        await world.until_nodes(*world.node_names)  # a silent one takes no work until then

    @SOAK
    async def test_a_node_cut_off_from_us_works_on_and_hands_in_everything_later(
        self, world: RayWorld
    ) -> None:
        await world.check_delivery_after_cut(world.lab)
        await world.until_nodes(*world.node_names)
