"""The engine through a real slurmrestd, with tokens. Commands are its other transport.

Over the Slurm of this machine, or of another version (`tests/support/slurm/other_version.py`).
"""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from shoal.engines.slurm import SlurmConfig, SlurmEngine
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.engines.slurm.rest import RestTransport
from shoal.engines.slurm.rest_request import parse_claims
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.wire import EndKind
from tests.contract.engines.engine_contract import EngineContract, RankProgram
from tests.contract.engines.test_slurm import (
    CODE,
    OnSlurm,
    drain_under_who_waits,
    fill,
    lose_a_submission,
    until_empty,
)
from tests.support.runtime.task_specs import change_task_spec
from tests.support.slurm.daemons import SlurmRestServer
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.anyio]


class RestWorld(OnSlurm):
    """Speaks to Slurm by REST alone; there are no commands in its PATH."""

    engine: SlurmEngine

    def __init__(self, root: Path, lab: SlurmLab) -> None:
        super().__init__(root, lab)
        assert lab.rest is not None
        self.rest = lab.rest
        self.token = self.rest.token_file(root / "token")
        self.engine = self.open()

    def open(self) -> SlurmEngine:
        config = SlurmConfig(
            project="tests",
            python=self.lab.nodes_python,
            python_path=CODE,
            shared=str(self.shared),
            rest=self.rest.url,
            jwt_file=str(self.token),
        )
        reach = self.server.access(spool=str(self.spool), shared=str(self.shared))
        return SlurmEngine(self.home, clock=self.clock, access=reach, config=config)

    def door(self, **more: object) -> RestTransport:
        return RestTransport(self.rest.url, str(self.token), **more)  # type: ignore[arg-type]


@pytest.fixture
async def world(tmp_path: Path, slurm: SlurmLab) -> AsyncIterator[RestWorld]:
    world = RestWorld(tmp_path, slurm)
    with world.server.serving(world.engine):
        yield world
        world.rest.token_file(world.token)
        await world.end_all()
        await anyio.to_thread.run_sync(until_empty, slurm)


@pytest.mark.soak
class TestRestEngine(EngineContract):
    """Commands are under the same contract in `make test`."""


async def test_a_gang_runs_on_the_nodes_that_were_named(world: RestWorld) -> None:
    submission = world.submission(RankProgram(lines=("hello",)), num_nodes=2)
    seen = await world.run_to_end(submission)
    assert [item.outcome.kind for item in seen if item.outcome is not None] == [EndKind.SUCCEEDED] * 2
    for node in world.node_names:
        assert b"hello" in await world.whole_log(submission.attempt_id, node)
    result = await world.slurm("scontrol", "show", "job", "-o")
    assert "NumNodes=2" in result
    assert "Requeue=0" in result


async def test_the_version_is_found_and_said(world: RestWorld) -> None:
    release = (await world.slurm("sinfo", "--version")).split()[1]
    spoken = {"22.05": "v0.0.38", "24.11": "v0.0.42"}[release[:5]]
    assert world.door().version() == f"slurm {release}, by REST {spoken}"


async def test_nodes_are_as_the_commands_show_them_but_for_switches(world: RestWorld) -> None:
    first = (await world.engine.nodes())[0]
    assert (first.name, first.pool, first.cpus, first.memory_bytes) == ("n0", "main", 4.0, 8000 << 20)
    assert [gpu.kind for gpu in first.gpus] == ["H100", "H100"]
    assert first.labels == {"feature.fast": "yes", "partition.main": "yes"}
    assert first.address == world.lab.address_of("n0")
    assert first.is_alive


async def test_a_drained_node_says_why(world: RestWorld) -> None:
    await world.slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=bad cable")
    try:
        [drained] = [n for n in await world.engine.nodes() if n.name == "n2"]
    finally:
        await world.slurm("scontrol", "update", "nodename=n2", "state=resume")
    assert (drained.is_alive, drained.remarks) == (False, ("Slurm says DRAIN bad cable",))


async def test_ranks_see_the_device_of_the_kind_that_was_chosen(world: RestWorld) -> None:
    created = world.submission()
    task_spec = change_task_spec(created.task_specs[0], run="echo $CUDA_VISIBLE_DEVICES", gpu_ids=(1,))
    await world.run_to_end(msgspec.structs.replace(created, task_specs=(task_spec,)))
    log = await world.whole_log(created.attempt_id, "n0")
    assert [line.split(b" ", 3)[3] for line in log.splitlines()] == [b"0"]
    assert "gpu:h100:1" in await world.slurm("scontrol", "show", "job", "-o")


async def test_what_slurm_refuses_is_told_in_its_own_words_and_starts_nothing(world: RestWorld) -> None:
    await world.refuses_too_much()


async def test_cancelled_in_the_queue_it_leaves_it_and_nobody_elses_does(world: RestWorld) -> None:
    await fill(world, "n0")
    submission = world.submission()
    await world.engine.submit(submission)
    [seen] = (await world.observe(submission.attempt_id)).values()
    assert seen.evidence is Evidence.QUEUED
    assert "is PENDING (" in seen.raw
    [name] = (await world.slurm("squeue", "-h", "-t", "PD", "-o", "%j")).split()
    held = ("--hold", "--output=/dev/null", "--wrap=true")
    await world.slurm("sbatch", "--uid=nobody", "--chdir=/", f"--job-name={name}", *held)
    await world.engine.cancel(submission.attempt_id, 5.0)
    [ended] = await world.until(submission.attempt_id, Evidence.ENDED)
    assert ended.outcome is not None
    assert ended.outcome.kind is EndKind.STOPPED
    assert (await world.slurm("squeue", "-h", "-t", "PD,R", "-o", "%j %k")).splitlines().count(
        f"{name} "
    ) <= 1
    assert (await world.slurm("squeue", "-h", "-t", "PD", "-o", "%j %u")).splitlines() == [f"{name} nobody"]
    await world.slurm("scancel", f"--name={name}")
    await world.slurm("scancel", "--name=filler")


async def test_a_submission_that_slurmctld_lost_is_made_again_and_runs_once(world: RestWorld) -> None:
    await lose_a_submission(world)


async def test_what_waits_for_a_node_that_is_drained_is_lost_before_it_began(world: RestWorld) -> None:
    await drain_under_who_waits(world)


async def test_slurmrestd_killed_and_back_ends_nothing(world: RestWorld) -> None:
    submission = world.submission()
    await world.run_until_started(submission)
    await anyio.to_thread.run_sync(world.rest.kill)
    try:
        world.clock.ahead += 2.0
        [seen] = (await world.observe(submission.attempt_id)).values()
        assert seen.evidence is Evidence.ALIVE
        with pytest.raises(EngineUnreachable, match="did not answer"):
            await world.engine.submit(world.submission())
    finally:
        await anyio.to_thread.run_sync(world.rest.up)
    assert world.door().jobs()[-1].state == "RUNNING"
    await world.engine.cancel(submission.attempt_id, 1.0)
    [ended] = await world.until(submission.attempt_id, Evidence.ENDED)
    assert ended.outcome is not None
    assert ended.outcome.kind is EndKind.STOPPED


async def test_a_token_that_is_not_taken_refuses_no_job(world: RestWorld) -> None:
    submission = world.submission(RankProgram(lines=("late",)))
    forged = world.token.read_text().strip()[:-4] + "AAAA"
    world.token.write_text(forged)
    with pytest.raises(EngineUnreachable, match="token") as raised:
        await world.engine.submit(submission)
    assert "scontrol token username=root" in (raised.value.hint or "")
    world.rest.token_file(world.token)
    await _until_answered(world)
    [seen] = await world.run_to_end(submission)
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.SUCCEEDED


async def test_another_users_token_is_not_taken_and_the_error_says_whose_it_is(world: RestWorld) -> None:
    world.rest.token_file(world.token, "nobody")
    transport = world.door(user="root")
    with pytest.raises(EngineUnreachable, match="it is nobody's, and root asks"):
        transport.jobs()
    assert not [job for job in world.door().jobs() if job.is_active]


async def test_a_token_of_slurmuser_speaks_for_whom_it_is_told(world: RestWorld) -> None:
    transport = world.door(user="nobody")
    script = "#!/bin/sh\nsleep 60\n"
    transport.submit(
        SlurmJobRequest(
            name="shoal-x.0", comment="", nodes=("n0",), cpus=1, output="/dev/null", script=script
        )
    )
    # Whose it is, in whatever state: on a busy machine Slurm may have given it up by now.
    assert len([job for job in transport.jobs() if job.name == "shoal-x.0"]) == 1
    listed = await world.slurm("squeue", "-h", "-t", "all", "-n", "shoal-x.0", "-o", "%u %T %r")
    assert listed.split()[:1] == ["nobody"], listed
    assert not [job for job in world.door().jobs() if job.name == "shoal-x.0"]
    transport.cancel(["shoal-x.0"])
    await anyio.to_thread.run_sync(until_empty, world.lab)


async def test_an_expired_token_is_named_before_slurm_is_asked(world: RestWorld) -> None:
    world.rest.token_file(world.token, lifespan_s=1)
    claims = parse_claims(world.token.read_text().strip())
    assert claims is not None
    assert (claims.sun, claims.exp is not None) == ("root", True)
    await anyio.sleep(1.5)
    with pytest.raises(EngineUnreachable, match="expired") as raised:
        world.door().nodes()
    assert "scontrol token username=root" in (raised.value.hint or "")


async def test_it_can_be_asked_at_a_sockets_file(world: RestWorld) -> None:
    transport = RestTransport(f"unix:{world.rest.socket}", str(world.token))
    assert [node.name for node in transport.nodes()] == list(world.lab.names)
    uid = transport.served_by()
    assert uid == world.door().served_by() == _owner(world.rest)
    with pytest.raises(EngineUnreachable, match="listens at"):
        RestTransport(f"unix:{world.rest.socket}", str(world.token), served_by=12345).nodes()
    with pytest.raises(EngineUnreachable, match="listens at"):
        world.door(served_by=12345).nodes()


async def _until_answered(world: RestWorld) -> None:
    """What has just failed is not asked again at once."""
    with anyio.fail_after(30):
        while True:
            try:
                await world.engine.nodes()
                return
            except EngineUnreachable:
                await anyio.sleep(0.2)


def _owner(rest: SlurmRestServer) -> int:
    facts = rest.socket.stat()
    assert stat.S_ISSOCK(facts.st_mode)
    return facts.st_uid
