"""What both doors to a real Slurm show alike: kinds of GPUs, partitions, and what its accounting knows."""

from __future__ import annotations

import os
import pwd
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.engines.base import Sight
from shoal.engines.reach import Reach
from shoal.engines.slurm import SlurmConfig, SlurmEngine
from shoal.engines.slurm.associations import Association
from shoal.engines.slurm.door import Door, open_door
from shoal.engines.slurm.nodes import SlurmNode, slurm_nodes
from shoal.engines.slurm.partitions import Partition, partition_for
from shoal.engines.slurm.render import comment, job_name, request
from shoal.engines.slurm.rights import parts_of, rights_of
from shoal.engines.slurm.states import SETTLE_S
from shoal.wire import EndKind, Fetch, Order
from tests.contract.test_engine_local import SkewedClock
from tests.support import slurm_accounting, slurm_rest
from tests.support.host import PATH
from tests.support.paper_slurm import order
from tests.support.slurm_lab import Shape, SlurmLab, slurm_lab, what_is_missing
from tests.support.slurm_rest import NOBODY

pytestmark = [pytest.mark.engines, pytest.mark.anyio]
SHAPE = Shape(
    nodes=1,
    kinds=("h100", "a100"),
    others=("nvme",),
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


def named(attempt_id: str) -> Order:
    """A job whose name means much to a shell, and to a list of names."""
    return order(
        attempt_id=attempt_id, nodes=("n0",), job_name="Train, $(7B)'%j\n", project="Vision", owner="ana"
    )


def name_of(attempt_id: str) -> str:
    return job_name(named(attempt_id), 0)


FORGOTTEN_S = 120.0
"""slurmctld looks for what it may forget about every half minute."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    missing = what_is_missing() or slurm_rest.what_is_missing(PATH) or slurm_accounting.what_is_missing(PATH)
    if missing is not None:
        pytest.skip(missing)
    with slurm_lab(tmp_path_factory.mktemp("slurm"), SHAPE) as lab:
        for attempt_id, run in {"att_well": "true", "att_ill": "exit 3"}.items():
            name, said = f"--job-name={name_of(attempt_id)}", f"--comment={comment(named(attempt_id))}"
            lab.run("sbatch", name, said, "--output=/dev/null", f"--wrap={run}")
        for words in ACCOUNTS:
            lab.run("sacctmgr", "-i", *words.split())
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


def only_node(door: Door, config: SlurmConfig) -> SlurmNode:
    raw, facts = door.nodes(), door.facts()
    [node] = slurm_nodes(raw, facts.places, parts_of(config, facts, door.partitions(), raw))
    return node


async def test_partitions_are_shown_with_what_decides_who_may_use_them(
    config: SlurmConfig, lab: SlurmLab
) -> None:
    door = open_door(config)
    found = {one.name: one for one in door.partitions()}
    if config.rest and lab.other is not None:  # v0.0.42 shows neither
        assert not any(one.is_default or one.is_hidden for one in found.values())
        found["main"] = msgspec.structs.replace(found["main"], is_default=True)
        for name in ("staff", "quiet"):
            found[name] = msgspec.structs.replace(found[name], is_hidden=True)
        config = msgspec.structs.replace(config, partition="main,gpu,closed")
    assert found == {
        "main": Partition(name="main", is_default=True),
        "gpu": Partition(name="gpu", max_minutes=120, max_nodes=2, has_default_time=True),
        "staff": Partition(name="staff", is_hidden=True, groups=("staff",), accounts=("vision", "nlp")),
        "closed": Partition(name="closed", state="DRAIN", tier=7),
        "quiet": Partition(name="quiet", is_hidden=True),
    }
    facts = only_node(door, config).facts
    assert (facts.pool, facts.is_alive) == ("main", True)
    assert {name for name in facts.labels if name.startswith("partition.")} == {
        "partition.main",
        "partition.gpu",
        "partition.closed",
    }
    assert door.facts().is_root


async def test_a_job_that_waits_in_a_hidden_partition_is_shown_to_who_submitted_it(
    config: SlurmConfig, lab: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root sees everything anyway: somebody else asks."""
    name = name_of("att_quiet")
    words = ("--partition=quiet", "--hold", f"--job-name={name}", "--output=/dev/null", "--wrap=true")
    lab.run("sbatch", "--uid=nobody", "--chdir=/", *words)
    if config.rest:
        assert lab.rest is not None
        lab.rest.token_file(Path(config.jwt_file), "nobody")
    else:
        entering = [] if lab.other is None else lab.other.entering
        (tmp_path / "squeue").write_text(
            f'#!/bin/sh\nexec {shlex.join([*entering, *NOBODY])} /usr/bin/squeue "$@"\n'
        )
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{PATH}")
        monkeypatch.setattr(os, "getuid", lambda: pwd.getpwnam("nobody").pw_uid)
    try:
        assert [job.name for job in open_door(config).jobs() if job.is_active] == [name]
    finally:
        lab.cancel(name)


async def test_accounts_are_shown_with_their_qos(config: SlurmConfig) -> None:
    found = {one.account: one for one in open_door(config).associations()}
    assert found == {
        "nlp": Association(account="nlp", qos=("normal",)),
        "vision": Association(account="vision", partition="gpu", qos=("high", "normal")),
        "root": Association(account="root", is_default=True, qos=("normal",)),
    }


async def test_a_job_gets_the_kind_of_gpu_that_was_chosen_for_it(
    config: SlurmConfig, lab: SlurmLab, tmp_path: Path
) -> None:
    door = open_door(config)
    node = only_node(door, config)
    assert sorted(gpu.kind for gpu in node.facts.gpus) == ["A100", "H100"]
    for device, kind in enumerate(SHAPE.kinds):
        chosen = order(nodes=("n0",), gpu_ids=(node.gpu_kinds.index(kind),), attempt_id=f"att_{kind}")
        output = tmp_path / kind
        script = "#!/bin/sh\necho device $CUDA_VISIBLE_DEVICES\n"
        asked = request(config, (chosen,), {"n0": node.gpu_kinds}, str(output), script)
        door.submit(asked)
        lab.until(lambda: not lab.run("squeue", "-h"), f"the job with an {kind} is over")
        assert output.read_text() == f"device {device}\n"


async def test_a_job_gets_the_partition_and_the_gres_that_it_asks_for(
    config: SlurmConfig, lab: SlurmLab, tmp_path: Path
) -> None:
    door = open_door(config)
    facts, raw = door.facts(), door.nodes()
    node = only_node(door, config)
    assert node.facts.labels["gres.nvme"] == "yes"
    require = {"partition.gpu": "yes", "gres.nvme": "yes"}
    orders = (order(nodes=("n0",), gpu_ids=(), attempt_id="att_gpu", require=require, time_limit_s=None),)
    parts, rights = parts_of(config, facts, door.partitions(), raw), rights_of(config, facts, "default")
    partition = partition_for(parts, {"n0": node.partitions}, orders, rights)
    output, show = tmp_path / "told", "scontrol show job $SLURM_JOB_ID -d"
    script = f"#!/bin/sh\nexport SLURM_CONF={lab.environment['SLURM_CONF']}\n{show} || exit\n"
    door.submit(request(config, orders, {}, str(output), script, partition))
    lab.until(lambda: not lab.run("squeue", "-h"), "the job is over")
    told = output.read_text()
    assert re.search(r"Partition=gpu\b", told)
    assert re.search(r"TimeLimit=02:00:00", told)  # the longest, and not the default
    assert re.search(r"nvme:1\b", told)


@pytest.mark.last
@pytest.mark.usefixtures("forgetful")
async def test_a_job_that_slurm_has_forgotten_has_an_end(config: SlurmConfig) -> None:
    door = open_door(config)
    names = [name_of("att_well"), name_of("att_ill"), name_of("att_none")]
    assert not {job.name for job in door.jobs()} & set(names)
    assert {job.name: job.state for job in door.past(names)} == {names[0]: "COMPLETED", names[1]: "FAILED"}
    assert door.past(names[2:]) == []


@pytest.mark.last
@pytest.mark.usefixtures("forgetful")
async def test_a_share_whose_job_is_forgotten_says_how_it_ended_and_is_over_where_that_is_evidence(
    config: SlurmConfig, tmp_path: Path
) -> None:
    clock, reach = SkewedClock(), Reach(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path / "home", clock=clock, reach=reach, config=config)
    engine.desk.add((named("att_ill"),), None)
    engine.desk.take(Fetch(attempt_id="att_ill", node="n0", process="one"))
    clock.ahead += SETTLE_S
    [early] = await engine.list_owned()
    assert early.sight is Sight.UNKNOWN
    assert early.raw.endswith("as FAILED")
    clock.ahead += 2 * SETTLE_S
    [seen] = await engine.list_owned()
    if config.rest:  # which does not show how Slurm tracks processes
        assert seen.sight is Sight.UNKNOWN
    else:
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.LOST
        assert "Slurm's accounting has job" in seen.outcome.message


async def test_a_node_whose_slurmd_does_not_answer_is_shown_as_mute(
    config: SlurmConfig, lab: SlurmLab
) -> None:
    door = open_door(config)
    assert only_node(door, config).answers
    lab.until(lambda: not lab.run("squeue", "-h").strip(), "no job of another test is lost with it")
    lab.kill_daemon("n0")
    lab.until(lambda: only_node(door, config).mute.startswith("Slurm says"), "Slurm misses n0", 60.0)
    lab.start_node("n0")
    lab.until(lambda: only_node(door, config).answers, "n0 answers again", 60.0)
    assert not only_node(door, config).mute
