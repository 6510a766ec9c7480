"""What both transports to a real Slurm show alike: kinds of GPUs, partitions, and what its accounting
knows."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.slurm import SlurmConfig, SlurmEngine
from shoal.engines.slurm.config import partition_rights, usable_partitions
from shoal.engines.slurm.nodes import SlurmNode, slurm_nodes
from shoal.engines.slurm.partitions import Association, Partition, choose_partition
from shoal.engines.slurm.render import comment, job_name, job_request
from shoal.engines.slurm.states import SETTLE_S
from shoal.engines.slurm.transport import SlurmTransport, open_transport
from shoal.model.evidence import Evidence
from shoal.wire import EndKind, TaskSpec, TaskSpecRequest
from tests.contract.engines.test_local import SkewedClock
from tests.support.host.processes import PATH
from tests.support.slurm import daemons
from tests.support.slurm.daemons import AS_NOBODY
from tests.support.slurm.fake_slurm import slurm_task_spec
from tests.support.slurm.real_slurm import SlurmLab, SlurmShape, slurm_lab, what_is_missing

pytestmark = [pytest.mark.engines, pytest.mark.anyio]
SHAPE = SlurmShape(
    nodes=1,
    kinds_of_gpu=("h100", "a100"),
    other_gres=("nvme",),
    min_job_age_s=2,
    has_accounting=True,
    has_rest=True,
    partitions=(
        "main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "gpu Nodes=ALL DefaultTime=1:00:00 MaxTime=2:00:00 MaxNodes=2 State=UP",
        "staff Nodes=ALL Hidden=YES AllowGroups=staff AllowAccounts=vision,nlp State=UP",
        "closed Nodes=ALL State=DRAIN PriorityTier=7",
        "quiet Nodes=ALL Hidden=YES State=UP",
    ),
)
ACCOUNTS = (
    "add qos high",
    "add account vision",
    "add account nlp",
    "add user root account=vision partition=gpu qos=high,normal",
    "add user root account=nlp qos=normal",
)


def named(attempt_id: str) -> TaskSpec:
    """A job whose name means much to a shell, and to a list of names."""
    return slurm_task_spec(
        attempt_id=attempt_id, nodes=("n0",), job_name="Train, $(7B)'%j\n", project="Vision", owner="ana"
    )


def name_of(attempt_id: str) -> str:
    return job_name(named(attempt_id).identity, 0)


FORGOTTEN_S = 120.0
"""slurmctld looks for what it may forget about every half minute."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing() or daemons.missing_for_rest(PATH) or daemons.missing_for_accounting(PATH)
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), SHAPE) as lab:
        for attempt_id, run in {"att_well": "true", "att_ill": "exit 3"}.items():
            name = f"--job-name={name_of(attempt_id)}"
            message = f"--comment={comment(named(attempt_id).identity)}"
            lab.run("sbatch", name, message, "--output=/dev/null", f"--wrap={run}")
        for text in ACCOUNTS:
            lab.run("sacctmgr", "-i", *text.split())
        yield lab


@pytest.fixture
def forgetful(lab: SlurmLab) -> None:
    """The first jobs are over, and Slurm knows nothing of them."""
    names = {name_of(attempt_id) for attempt_id in ("att_well", "att_ill")}

    def listed() -> set[str]:
        return set(lab.run("squeue", "-h", "-t", "all", "-o", "%j").split())

    lab.until(lambda: not names & listed(), "Slurm has forgotten its jobs", FORGOTTEN_S)


@pytest.fixture(params=["commands", "rest"])
def config(
    request: pytest.FixtureRequest, lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SlurmConfig:
    if request.param == "rest":
        assert lab.rest is not None
        return SlurmConfig(rest=lab.rest.url, jwt_file=str(lab.rest.token_file(tmp_path / "token")))
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, lab.environment[name])
    return SlurmConfig()


def only_node(door: SlurmTransport, config: SlurmConfig) -> SlurmNode:
    raw, facts = door.nodes(), door.facts()
    [node] = slurm_nodes(raw, facts.switch_labels, usable_partitions(config, facts, door.partitions(), raw))
    return node


async def test_partitions_are_shown_with_what_decides_who_may_use_them(
    config: SlurmConfig, lab: SlurmLab
) -> None:
    transport = open_transport(config)
    result = {partition.name: partition for partition in transport.partitions()}
    if config.rest and lab.other_root is not None:  # v0.0.42 shows neither
        assert not any(partition.is_default or partition.is_hidden for partition in result.values())
        result["main"] = msgspec.structs.replace(result["main"], is_default=True)
        for name in ("staff", "quiet"):
            result[name] = msgspec.structs.replace(result[name], is_hidden=True)
        config = msgspec.structs.replace(config, partition="main,gpu,closed")
    assert result == {
        "main": Partition(name="main", is_default=True),
        "gpu": Partition(name="gpu", max_minutes=120, max_nodes=2, has_default_time=True),
        "staff": Partition(name="staff", is_hidden=True, groups=("staff",), accounts=("vision", "nlp")),
        "closed": Partition(name="closed", state="DRAIN", tier=7),
        "quiet": Partition(name="quiet", is_hidden=True),
    }
    facts = only_node(transport, config).facts
    assert (facts.pool, facts.is_alive) == ("main", True)
    assert {name for name in facts.labels if name.startswith("partition.")} == {
        "partition.main",
        "partition.gpu",
        "partition.closed",
    }
    assert transport.facts().is_root


async def test_a_job_that_waits_in_a_hidden_partition_is_shown_to_who_submitted_it(
    config: SlurmConfig, lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root sees everything anyway: somebody else asks."""
    name = name_of("att_quiet")
    text = ("--partition=quiet", "--hold", f"--job-name={name}", "--output=/dev/null", "--wrap=true")
    lab.run("sbatch", "--uid=nobody", "--chdir=/", *text)
    if config.rest:
        assert lab.rest is not None
        lab.rest.token_file(Path(config.jwt_file), "nobody")
    else:
        entering = [] if lab.other_root is None else lab.other_root.enter_command
        (tmp_path / "squeue").write_text(
            f'#!/bin/sh\nexec {shlex.join([*entering, *AS_NOBODY])} /usr/bin/squeue "$@"\n'
        )
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{PATH}")
        monkeypatch.setattr(os, "getuid", lambda: pwd.getpwnam("nobody").pw_uid)
    try:
        assert [job.name for job in open_transport(config).jobs() if job.is_active] == [name]
    finally:
        lab.cancel(name)


async def test_accounts_are_shown_with_their_qos(config: SlurmConfig) -> None:
    result = {association.account: association for association in open_transport(config).associations()}
    assert result == {
        "nlp": Association(account="nlp", qos=("normal",)),
        "vision": Association(account="vision", partition="gpu", qos=("high", "normal")),
        "root": Association(account="root", is_default=True, qos=("normal",)),
    }


async def test_a_job_gets_the_kind_of_gpu_that_was_chosen_for_it(
    config: SlurmConfig, lab: SlurmLab, tmp_path: Path
) -> None:
    transport = open_transport(config)
    node = only_node(transport, config)
    assert sorted(gpu.kind for gpu in node.facts.gpus) == ["A100", "H100"]
    for device, kind in enumerate(SHAPE.kinds_of_gpu):
        chosen = slurm_task_spec(
            nodes=("n0",), gpu_ids=(node.gpu_kinds.index(kind),), attempt_id=f"att_{kind}"
        )
        output = tmp_path / kind
        script = "#!/bin/sh\necho device $CUDA_VISIBLE_DEVICES\n"
        request = job_request(config, (chosen,), {"n0": node.gpu_kinds}, str(output), script)
        transport.submit(request)
        lab.until(lambda: not lab.run("squeue", "-h"), f"the job with an {kind} is over")
        assert output.read_text() == f"device {device}\n"


async def test_a_job_gets_the_partition_and_the_gres_that_it_asks_for(
    config: SlurmConfig, lab: SlurmLab, tmp_path: Path
) -> None:
    transport = open_transport(config)
    facts, raw = transport.facts(), transport.nodes()
    node = only_node(transport, config)
    assert node.facts.labels["gres.nvme"] == "yes"
    require = {"partition.gpu": "yes", "gres.nvme": "yes"}
    task_specs = (
        slurm_task_spec(nodes=("n0",), gpu_ids=(), attempt_id="att_gpu", require=require, time_limit_s=None),
    )
    parts, rights = (
        usable_partitions(config, facts, transport.partitions(), raw),
        partition_rights(config, facts, "default"),
    )
    partition = choose_partition(parts, {"n0": node.partitions}, task_specs, rights)
    output, show = tmp_path / "told", "scontrol show job $SLURM_JOB_ID -d"
    script = f"#!/bin/sh\nexport SLURM_CONF={lab.environment['SLURM_CONF']}\n{show} || exit\n"
    transport.submit(job_request(config, task_specs, {}, str(output), script, partition))
    lab.until(lambda: not lab.run("squeue", "-h"), "the job is over")
    text = output.read_text()
    assert re.search(r"Partition=gpu\b", text)
    assert re.search(r"TimeLimit=02:00:00", text)  # the longest, and not the default
    assert re.search(r"nvme:1\b", text)


@pytest.mark.last
@pytest.mark.usefixtures("forgetful")
async def test_a_job_that_slurm_has_forgotten_has_an_end(config: SlurmConfig) -> None:
    transport = open_transport(config)
    names = [name_of("att_well"), name_of("att_ill"), name_of("att_none")]
    assert not {job.name for job in transport.jobs()} & set(names)
    assert {job.name: job.state for job in transport.accounting_jobs(names)} == {
        names[0]: "COMPLETED",
        names[1]: "FAILED",
    }
    assert transport.accounting_jobs(names[2:]) == []


@pytest.mark.last
@pytest.mark.usefixtures("forgetful")
async def test_a_share_whose_job_is_forgotten_says_how_it_ended_and_is_over_where_that_is_evidence(
    config: SlurmConfig, tmp_path: Path
) -> None:
    clock, reach = SkewedClock(), ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path / "home", clock=clock, access=reach, config=config)
    engine.mailbox.add((named("att_ill"),), None)
    engine.mailbox.assign(TaskSpecRequest(attempt_id="att_ill", node="n0", process="one"))
    clock.ahead += SETTLE_S
    [early] = await engine.list_owned()
    assert early.evidence in (Evidence.UNKNOWN, Evidence.CLEARED)
    assert early.raw.endswith("as FAILED")
    clock.ahead += 2 * SETTLE_S
    [seen] = await engine.list_owned()
    if config.rest:  # which does not show how Slurm tracks processes
        assert seen.evidence in (Evidence.UNKNOWN, Evidence.CLEARED)
    else:
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.LOST
        assert "Slurm's accounting has job" in seen.outcome.message


async def test_a_node_whose_slurmd_does_not_answer_is_shown_as_mute(
    config: SlurmConfig, lab: SlurmLab
) -> None:
    transport = open_transport(config)
    assert only_node(transport, config).is_responding
    lab.until(lambda: not lab.run("squeue", "-h").strip(), "no job of another test is lost with it")
    lab.kill_daemon("n0")
    lab.until(
        lambda: only_node(transport, config).unresponsive_reason.startswith("Slurm says"),
        "Slurm misses n0",
        60.0,
    )
    lab.start_node("n0")
    lab.until(lambda: only_node(transport, config).is_responding, "n0 answers again", 60.0)
    assert not only_node(transport, config).unresponsive_reason
