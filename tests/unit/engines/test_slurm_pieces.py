"""Slurm's words, read and written, without a Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from shoal.engines.glimpses import Stage
from shoal.engines.slurm.config import SlurmConfig, load_config
from shoal.engines.slurm.nodes import SlurmNode, slurm_nodes
from shoal.engines.slurm.parse import (
    SlurmFacts,
    expand,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_topology,
)
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import (
    batch_script,
    comment,
    is_name_of,
    job_name,
    request,
    sbatch_arguments,
    sbatch_environment,
)
from shoal.engines.slurm.rights import parts_of
from shoal.engines.slurm.states import OVER, Job, glimpse, stage_of
from shoal.errors import EngineRefused, SpecError
from shoal.wire import Summons
from tests.support.paper_slurm import NODE, order

NOW = 1_794_877_200.0
"""2026-11-17T01:00:00 UTC."""

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"


def test_what_slurm_is_told_is_the_golden_file() -> None:
    config = SlurmConfig(account="vision", python="/opt/shoal/bin/python")
    orders = (order(), order(node="n1", node_rank=1))
    summons = Summons(attempt_id="att_1", urls=("https://a:1", "https://b:1"), ca="PEM", ticket="sht_att_1_x")
    script = batch_script(config, summons, 2, 2)
    asked = request(config, orders, {}, "/shared/slurm/%x.out", script, Partition(name="main"))
    text = "\n".join(["sbatch", *sbatch_arguments(asked)]) + "\n\n" + script
    if os.environ.get("SHOAL_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / "two-nodes.txt").write_text(text)
    assert text == (GOLDEN / "two-nodes.txt").read_text()


ODD = "-a,b %j\n$(touch x)'\"\x00*[1-9];\u202e\u00e9"


@pytest.mark.parametrize(
    ("job_name_given", "begins"),
    [
        ("train-7b", "train-7b.default-7.shoal-att_1."),
        (ODD, "-a_b__j___touch_x"),
        ("x" * 100, "x" * 48 + "."),
    ],
)
def test_a_slurm_job_is_called_what_people_call_the_job(job_name_given: str, begins: str) -> None:
    ours = order(job_name=job_name_given, project="p" * 100 if job_name_given == "x" * 100 else "default")
    name = job_name(ours, 12)
    assert name.startswith(begins)
    assert name.endswith(".shoal-att_1.12")
    assert re.fullmatch(r"[A-Za-z0-9_.@-]{1,200}", name), "a comma parts names; `%` is a pattern"


def test_the_comment_names_the_job_for_people_and_is_one_line() -> None:
    told = comment(order(job_name="train-7b", owner="ana", incarnation=2))
    assert told == "Shoal job default/7 train-7b of ana, attempt att_1, incarnation 2"
    assert comment(order(job_name=ODD, owner="a\nb")).isprintable()
    assert comment(order(job_name="x")).startswith("Shoal job default/7 x, attempt")


def test_nothing_that_people_write_is_in_the_batch_script_but_its_sealed_summons() -> None:
    summons = Summons(attempt_id="att_1", urls=(), ca="PEM", ticket="t")
    script = batch_script(SlurmConfig(), summons, 1, 1)
    asked = request(SlurmConfig(), (order(job_name="x\nrm -rf /"),), {}, "/dev/null", script)
    assert "rm -rf" not in asked.script


@pytest.mark.parametrize(
    "stranger",
    [
        "train.default-7.shoal-att_1.",
        "train.default-7.shoal-att_1.0.1",
        "train.default-7.shoal-att_1.00",
        "train.default-7.shoal-att_1.0-copy",
        "train.default-7.shoal-att_1.\u0663",
        "train.default-7.shoal-att_1.0\n",
        "train.default-7.shoal-att_12.0",
        "train.default-8.shoal-att_1.0",
        "mine.default-7.shoal-att_1.0",
        "x.train.default-7.shoal-att_1.0",
        "shoal-att_1.0",
        "",
    ],
)
def test_a_strangers_job_that_looks_like_ours_is_not_taken_for_it(stranger: str) -> None:
    assert not is_name_of(order(), stranger)


@pytest.mark.parametrize("incarnation", [0, 1, 10, 123])
def test_every_incarnation_of_an_attempt_is_known_by_its_name(incarnation: int) -> None:
    again = order(node="n1", node_rank=1, incarnation=incarnation)
    assert is_name_of(order(), job_name(again, incarnation))


@pytest.mark.parametrize(("given", "got"), [("{0}/link", "{0}/v1"), ("{0}/v1:{0}/link", "{0}/v1:{0}/link")])
def test_a_keeper_has_the_version_that_a_link_leads_to_when_it_begins(
    tmp_path: Path, given: str, got: str
) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "link").symlink_to("v1")
    programs = {
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
        "python": '#!/bin/sh\necho "$PYTHONPATH" "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = SlurmConfig(python=str(tmp_path / "python"), python_path=given.format(tmp_path))
    summons = Summons(attempt_id="att_1", urls=("https://a:1",), ca="PEM", ticket="sht_att_1_x")
    done = subprocess.run(
        ["sh", "-c", batch_script(config, summons, 1, 1)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{got.format(tmp_path)} -P -s -m shoal.runtime.keep $SLURMD_NODENAME\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("plugin", "can_bind"),
    [("task/affinity,task/cgroup", True), ("task/cgroup", False), ("task/none", False), (None, True)],
)
def test_binding_is_spoken_of_only_to_a_slurm_that_binds(plugin: str | None, can_bind: bool) -> None:
    told = "ClusterName = c\n" + ("" if plugin is None else f"TaskPlugin              = {plugin}\n")
    facts = parse_config(told)
    summons = Summons(attempt_id="att_1", urls=("https://login:1",), ca="ca", ticket="t")
    script = batch_script(SlurmConfig(), summons, 1, 1, can_bind=facts.can_bind)
    assert ("--cpu-bind=none" in script) is can_bind


def test_no_argument_of_sbatch_holds_the_ticket() -> None:
    asked = request(SlurmConfig(), (order(),), {}, "/tmp/x", "#!/bin/sh\n# sht_att_1_x\n")
    assert not any("sht_" in word for word in sbatch_arguments(asked))


KINDS = {"n0": ("h100", "h100", "a100"), "n1": ("h100", "h100", "a100"), "n2": ("", "")}


@pytest.mark.parametrize(
    ("given", "gres"),
    [
        ({"n0": (2,), "n1": (2,)}, "gpu:a100:1"),
        ({"n0": (0, 1, 2)}, "gpu:a100:1,gpu:h100:2"),
        ({"n0": (0, 1), "n1": (1, 2)}, "gpu:2"),
        ({"n2": (0, 1)}, "gpu:2"),
        ({"gone": (0,)}, "gpu:1"),
        ({"n0": ()}, ""),
    ],
)
def test_gpus_are_asked_for_by_the_kind_that_was_chosen_in_slurms_own_spelling(
    given: dict[str, tuple[int, ...]], gres: str
) -> None:
    orders = tuple(order(node=node, gpu_ids=gpu_ids, nodes=tuple(given)) for node, gpu_ids in given.items())
    assert request(SlurmConfig(), orders, KINDS, "/tmp/x", "").gres == gres


def test_a_part_of_a_gpu_is_refused() -> None:
    with pytest.raises(EngineRefused, match="Slurm gives whole ones"):
        request(SlurmConfig(), (order(gpu_ids=(0,), gpu_milli=500),), {}, "/tmp/x", "")


def nodes(
    state: str, reason: str = "none", partition: str = "", places: dict[str, dict[str, str]] | None = None
) -> list[SlurmNode]:
    raw = parse_nodes(NODE.format(state=state, reason=reason))
    return slurm_nodes(raw, places or {}, parts_of(SlurmConfig(partition=partition), SlurmFacts(), [], raw))


def test_a_node_becomes_facts() -> None:
    [node] = nodes("IDLE", places={"n0": {"rack": "leaf-3", "fabric": "top"}})
    facts = node.facts
    assert (facts.name, facts.pool, facts.address, facts.cpus) == ("n0", "low", "10.204.204.10", 4.0)
    assert (facts.memory_bytes, facts.disk_bytes) == (8000 << 20, 100 << 20)
    assert [(gpu.index, gpu.kind) for gpu in facts.gpus] == [(0, "H100"), (1, "H100"), (2, "A100")]
    assert facts.labels == {
        "feature.fast": "yes",
        "feature.ib": "yes",
        "partition.main": "yes",
        "partition.low": "yes",
        "gres.nvme": "yes",
        "gres.bandwidth": "yes",
        "rack": "leaf-3",
        "fabric": "top",
    }
    assert facts.is_alive
    assert node.boot is not None
    assert nodes("DOWN")[0].boot is None
    assert nodes("IDLE", partition="gpu") == []


@pytest.mark.parametrize(
    "state",
    [
        "DOWN",
        "IDLE+DRAIN",
        "MIXED*",
        "DOWN*+DRAIN",
        "IDLE+NOT_RESPONDING",
        "IDLE+MAINTENANCE",
        "MIXED+MAINTENANCE+RESERVED",
    ],
)
def test_a_node_that_takes_no_work_says_why(state: str) -> None:
    [node] = nodes(state, "bad cable", "low")
    assert not node.facts.is_alive
    assert "bad cable" in node.facts.remarks[0]
    assert node.facts.pool == "low"


@pytest.mark.parametrize(
    ("state", "closed"),
    [
        ("IDLE", ""),
        ("IDLE+DRAIN", "drained in Slurm: bad cable"),
        ("IDLE+DRAIN+POWERED_DOWN", "drained in Slurm: bad cable"),
        ("MIXED+MAINTENANCE+RESERVED", "in maintenance, reserved in Slurm: bad cable"),
        ("DOWN", ""),
        ("MIXED*", ""),
        ("DOWN*+DRAIN", ""),
        ("IDLE+DRAIN+NOT_RESPONDING", ""),
    ],
)
def test_a_node_that_answers_and_is_closed_is_told_from_one_that_is_silent(state: str, closed: str) -> None:
    [node] = nodes(state, "bad cable")
    assert node.facts.closed.partition(" [root@")[0] == closed


@pytest.mark.parametrize(
    "reason",
    [
        "bad DIMM RealMemory=half",
        "was State=IDLE Gres=gpu:h100:8",
        "x Comment=y Partitions=all NodeName=n9 State=IDLE",
    ],
)
def test_what_people_write_about_a_node_is_no_fact(reason: str) -> None:
    [plain] = parse_nodes(NODE.format(state="IDLE+DRAIN", reason="none"))
    [told] = parse_nodes(f"{NODE.format(state='IDLE+DRAIN', reason=reason)} Comment=State=IDLE RealMemory=1")
    assert msgspec.structs.replace(told, reason=plain.reason) == plain
    assert told.reason.startswith(reason.partition(" Comment")[0])


@pytest.mark.parametrize(("aside", "left"), [("512", 7488), ("9000", 1), ("(null)", 8000)])
def test_memory_that_is_set_aside_for_the_system_is_not_offered(aside: str, left: int) -> None:
    line = NODE.format(state="IDLE", reason="none")
    aside = f"Boards=1 CoreSpecCount=1 CPUSpecList=3 MemSpecLimit={aside} "
    [raw] = parse_nodes(line.replace("Boards=1 ", aside))
    assert raw.memory_mb == left


def test_a_node_that_cannot_be_read_takes_no_work_and_leaves_the_others_alone() -> None:
    good, bad = (
        NODE.format(state="IDLE", reason="none"),
        NODE.replace("n0", "n1").format(state="IDLE", reason=""),
    )
    lines = f"{good}\n{bad.replace('RealMemory=8000', 'RealMemory=half')}\nNo such thing\n\n"
    raw = parse_nodes(lines)
    first, second = slurm_nodes(raw, {}, parts_of(SlurmConfig(), SlurmFacts(), [], raw))
    assert (first.facts.name, first.facts.is_alive) == ("n0", True)
    assert (second.facts.name, second.facts.is_alive, second.answers) == ("n1", False, False)
    assert "half" in second.facts.remarks[0]


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ("2026-12-16T01:00:00", ", Slurm expects it to start at 2026-12-16T01:00:00 UTC"),
        ("2027-11-17T00:00:00", ", and Slurm has no estimate of its start that means anything"),
        ("N/A", ""),
    ],
)
def test_an_estimate_a_year_away_is_none(start: str, told: str) -> None:
    job = Job(job_id="12", state="PENDING", name="x", start=start)
    seen = glimpse(job, is_settled=False, rebooted=False, now=NOW)
    assert seen.raw == f"Slurm job 12 is PENDING{told}"


def test_jobs_and_switches_are_read() -> None:
    line = "12|PENDING|ana|2026-11-17T01:00:00|shoal-att_1.0|Resources|odd"
    [job] = parse_jobs(f"{line}\nrubbish\n")
    assert (job.job_id, job.state, job.reason) == ("12", "PENDING", "Resources|odd")
    assert glimpse(job, is_settled=False, rebooted=False, now=NOW).raw == (
        "Slurm job 12 is PENDING (Resources|odd), Slurm expects it to start at 2026-11-17T01:00:00 UTC"
    )
    leaf = "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[08-10],m1"
    told = f"{leaf}\nSwitchName=top Level=1 LinkSpeed=1 Nodes=n08 Switches=s0\n"
    assert parse_topology(told) == {
        "n08": {"rack": "s0", "fabric": "top"},
        "n09": {"rack": "s0"},
        "n10": {"rack": "s0"},
        "m1": {"rack": "s0"},
    }
    assert expand("a[1-2]b[0,3],c") == ["a1b0", "a1b3", "a2b0", "a2b3", "c"]


@pytest.mark.parametrize(
    "state", ["NODE_FAIL", "BOOT_FAIL", "REVOKED", "RUNNING", "SUSPENDED", "PENDING", "SOMETHING_NEW"]
)
def test_what_slurm_merely_believes_is_never_evidence(state: str) -> None:
    job = Job(job_id="1", state=state, name="x")
    assert not glimpse(job, is_settled=True, rebooted=False, now=NOW).is_over


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"])
def test_what_slurm_is_to_run_again_waits_in_its_queue(state: str) -> None:
    assert stage_of(state) is Stage.QUEUED


def test_an_end_is_evidence_once_the_node_has_answered_for_a_while_or_was_restarted() -> None:
    for state in OVER:
        job = Job(job_id="1", state=state, name="x")
        assert not glimpse(job, is_settled=False, rebooted=False, now=NOW).is_over
        assert glimpse(job, is_settled=True, rebooted=False, now=NOW).is_over
    assert glimpse(
        Job(job_id="1", state="NODE_FAIL", name="x"), is_settled=False, rebooted=True, now=NOW
    ).is_over
    suspended = glimpse(
        Job(job_id="1", state="SUSPENDED", name=""), is_settled=False, rebooted=False, now=NOW
    )
    assert suspended.stage is Stage.SUSPENDED


def test_a_home_that_is_not_connected_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no Slurm is connected"):
        load_config(tmp_path)
    (tmp_path / "slurm.json").write_text('{"partitoin": "x"}')
    with pytest.raises(SpecError, match="partitoin"):
        load_config(tmp_path)


def test_what_of_its_configuration_decides_what_slurms_word_is_worth() -> None:
    told = "Configuration data as of now\nKillWait   = 45 sec\nProctrackType  = proctrack/cgroup\n"
    assert parse_config(told) == SlurmFacts(kill_wait_s=45.0, has_cgroups=True)
    assert parse_config("ProctrackType = proctrack/pgid\n") == SlurmFacts(kill_wait_s=30.0, has_cgroups=False)


def test_which_slurm_it_is_is_read() -> None:
    told = (
        "ClusterName             = lab\nSlurmctldHost[0]        = a(10.0.0.1)\nSlurmctldHost[1]        = b\n"
    )
    assert parse_config(told) == SlurmFacts(cluster="lab", heads=("a", "b"))


def test_a_node_that_sleeps_takes_work_and_tells_nothing() -> None:
    [node] = nodes("IDLE+CLOUD+POWERED_DOWN")
    assert (node.facts.is_alive, node.answers) == (True, False)


def test_nothing_of_the_control_planes_environment_goes_to_the_nodes() -> None:
    environ = {"PATH": "/bin", "LANG": "C", "SLURM_CONF": "/etc/s", "SBATCH_ACCOUNT": "a", "AWS_SECRET": "x"}
    assert sbatch_environment(environ) == {"PATH": "/bin", "LANG": "C", "SLURM_CONF": "/etc/s"}
