"""Slurm's words, read and written, without a Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from shoal.engines.remote.cluster_observation import ClusterTaskState
from shoal.engines.slurm.config import SlurmConfig, load_config, usable_partitions
from shoal.engines.slurm.nodes import SlurmNode, slurm_nodes
from shoal.engines.slurm.parse import (
    SlurmFacts,
    expand_hostlist,
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
    job_request,
    sbatch_arguments,
    sbatch_environment,
)
from shoal.engines.slurm.states import OVER, SlurmJob, job_observation, task_state_of
from shoal.errors import EngineRefused, SpecError
from shoal.model.evidence import Evidence
from shoal.wire import LaunchRequest
from tests.support.slurm.fake_slurm import NODE, slurm_task_spec

NOW = 1_794_877_200.0
"""2026-11-17T01:00:00 UTC."""

GOLDEN = Path(__file__).parents[3] / "golden" / "slurm"


def test_sbatch_request_matches_the_golden_file() -> None:
    config = SlurmConfig(account="vision", python="/opt/shoal/bin/python")
    task_specs = (slurm_task_spec(), slurm_task_spec(node="n1", node_rank=1))
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://a:1", "https://b:1"), ca="PEM", bootstrap_token="sht_att_1_x"
    )
    script = batch_script(config, launch_request, 2, 2)
    request = job_request(config, task_specs, {}, "/shared/slurm/%x.out", script, Partition(name="main"))
    text = "\n".join(["sbatch", *sbatch_arguments(request)]) + "\n\n" + script
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
    ours = slurm_task_spec(
        job_name=job_name_given, project="p" * 100 if job_name_given == "x" * 100 else "default"
    )
    name = job_name(ours.identity, 12)
    assert name.startswith(begins)
    assert name.endswith(".shoal-att_1.12")
    assert re.fullmatch(r"[A-Za-z0-9_.@-]{1,200}", name), "a comma parts names; `%` is a pattern"


def test_the_comment_names_the_job_for_people_and_is_one_line() -> None:
    text = comment(slurm_task_spec(job_name="train-7b", owner="ana", replacement=2).identity)
    assert text == "Shoal job default/7 train-7b of ana, attempt att_1, replacement 2"
    assert comment(slurm_task_spec(job_name=ODD, owner="a\nb").identity).isprintable()
    assert comment(slurm_task_spec(job_name="x").identity).startswith("Shoal job default/7 x, attempt")


def test_batch_script_has_no_user_text_outside_the_launch_request() -> None:
    launch_request = LaunchRequest(attempt_id="att_1", urls=(), ca="PEM", bootstrap_token="t")
    script = batch_script(SlurmConfig(), launch_request, 1, 1)
    request = job_request(SlurmConfig(), (slurm_task_spec(job_name="x\nrm -rf /"),), {}, "/dev/null", script)
    assert "rm -rf" not in request.script


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
def test_similar_job_name_of_another_user_is_not_ours(stranger: str) -> None:
    assert not is_name_of(slurm_task_spec().identity, stranger)


@pytest.mark.parametrize("replacement", [0, 1, 10, 123])
def test_every_replacement_of_an_attempt_is_known_by_its_name(replacement: int) -> None:
    again = slurm_task_spec(node="n1", node_rank=1, replacement=replacement)
    assert is_name_of(slurm_task_spec().identity, job_name(again.identity, replacement))


@pytest.mark.parametrize(("path", "got"), [("{0}/link", "{0}/v1"), ("{0}/v1:{0}/link", "{0}/v1:{0}/link")])
def test_node_agent_resolves_a_linked_version_when_it_starts(tmp_path: Path, path: str, got: str) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "link").symlink_to("v1")
    programs = {
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
        "python": '#!/bin/sh\necho "$PYTHONPATH" "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = SlurmConfig(python=str(tmp_path / "python"), python_path=path.format(tmp_path))
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://a:1",), ca="PEM", bootstrap_token="sht_att_1_x"
    )
    done = subprocess.run(
        ["sh", "-c", batch_script(config, launch_request, 1, 1)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{got.format(tmp_path)} -P -s -m shoal.runtime.agent.bootstrap $SLURMD_NODENAME\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("plugin", "can_bind"),
    [("task/affinity,task/cgroup", True), ("task/cgroup", False), ("task/none", False), (None, True)],
)
def test_binding_is_spoken_of_only_to_a_slurm_that_binds(plugin: str | None, can_bind: bool) -> None:
    result = "ClusterName = c\n" + ("" if plugin is None else f"TaskPlugin              = {plugin}\n")
    facts = parse_config(result)
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://login:1",), ca="ca", bootstrap_token="t"
    )
    script = batch_script(SlurmConfig(), launch_request, 1, 1, can_bind=facts.can_bind)
    assert ("--cpu-bind=none" in script) is can_bind


def test_no_argument_of_sbatch_has_the_bootstrap_token() -> None:
    request = job_request(SlurmConfig(), (slurm_task_spec(),), {}, "/tmp/x", "#!/bin/sh\n# sht_att_1_x\n")
    assert not any("sht_" in word for word in sbatch_arguments(request))


KINDS = {"n0": ("h100", "h100", "a100"), "n1": ("h100", "h100", "a100"), "n2": ("", "")}


@pytest.mark.parametrize(
    ("gpus_by_node", "gres"),
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
    gpus_by_node: dict[str, tuple[int, ...]], gres: str
) -> None:
    task_specs = tuple(
        slurm_task_spec(node=node, gpu_ids=gpu_ids, nodes=tuple(gpus_by_node))
        for node, gpu_ids in gpus_by_node.items()
    )
    assert job_request(SlurmConfig(), task_specs, KINDS, "/tmp/x", "").gres == gres


def test_a_part_of_a_gpu_is_refused() -> None:
    with pytest.raises(EngineRefused, match="Slurm gives whole ones"):
        job_request(SlurmConfig(), (slurm_task_spec(gpu_ids=(0,), gpu_milli=500),), {}, "/tmp/x", "")


def nodes(
    state: str, reason: str = "none", partition: str = "", places: dict[str, dict[str, str]] | None = None
) -> list[SlurmNode]:
    raw = parse_nodes(NODE.format(state=state, reason=reason))
    return slurm_nodes(
        raw, places or {}, usable_partitions(SlurmConfig(partition=partition), SlurmFacts(), [], raw)
    )


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
    [nodes] = parse_nodes(f"{NODE.format(state='IDLE+DRAIN', reason=reason)} Comment=State=IDLE RealMemory=1")
    assert msgspec.structs.replace(nodes, reason=plain.reason) == plain
    assert nodes.reason.startswith(reason.partition(" Comment")[0])


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
    first, second = slurm_nodes(raw, {}, usable_partitions(SlurmConfig(), SlurmFacts(), [], raw))
    assert (first.facts.name, first.facts.is_alive) == ("n0", True)
    assert (second.facts.name, second.facts.is_alive, second.is_responding) == ("n1", False, False)
    assert "half" in second.facts.remarks[0]


@pytest.mark.parametrize(
    ("start", "estimate"),
    [
        ("2026-12-16T01:00:00", ", Slurm expects it to start at 2026-12-16T01:00:00 UTC"),
        ("2027-11-17T00:00:00", ", and Slurm has no estimate of its start that means anything"),
        ("N/A", ""),
    ],
)
def test_an_estimate_a_year_away_is_none(start: str, estimate: str) -> None:
    job = SlurmJob(job_id="12", state="PENDING", name="x", start=start)
    seen = job_observation(job, is_settled=False, rebooted=False, now=NOW)
    assert seen.raw == f"Slurm job 12 is PENDING{estimate}"


def test_jobs_and_switches_are_read() -> None:
    line = "12|PENDING|ana|2026-11-17T01:00:00|shoal-att_1.0|Resources|odd"
    [job] = parse_jobs(f"{line}\nrubbish\n")
    assert (job.job_id, job.state, job.reason) == ("12", "PENDING", "Resources|odd")
    assert job_observation(job, is_settled=False, rebooted=False, now=NOW).raw == (
        "Slurm job 12 is PENDING (Resources|odd), Slurm expects it to start at 2026-11-17T01:00:00 UTC"
    )
    leaf = "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[08-10],m1"
    result = f"{leaf}\nSwitchName=top Level=1 LinkSpeed=1 Nodes=n08 Switches=s0\n"
    assert parse_topology(result) == {
        "n08": {"rack": "s0", "fabric": "top"},
        "n09": {"rack": "s0"},
        "n10": {"rack": "s0"},
        "m1": {"rack": "s0"},
    }
    assert expand_hostlist("a[1-2]b[0,3],c") == ["a1b0", "a1b3", "a2b0", "a2b3", "c"]


@pytest.mark.parametrize(
    "state", ["NODE_FAIL", "BOOT_FAIL", "REVOKED", "RUNNING", "SUSPENDED", "PENDING", "SOMETHING_NEW"]
)
def test_unconfirmed_end_of_slurm_is_never_evidence(state: str) -> None:
    job = SlurmJob(job_id="1", state=state, name="x")
    assert job_observation(job, is_settled=True, rebooted=False, now=NOW).evidence is Evidence.UNKNOWN


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"])
def test_what_slurm_is_to_run_again_waits_in_its_queue(state: str) -> None:
    assert task_state_of(state) is ClusterTaskState.QUEUED


def test_an_end_is_evidence_once_the_node_has_answered_for_a_while_or_was_restarted() -> None:
    for state in OVER:
        job = SlurmJob(job_id="1", state=state, name="x")
        assert job_observation(job, is_settled=False, rebooted=False, now=NOW).evidence is Evidence.UNKNOWN
        assert job_observation(job, is_settled=True, rebooted=False, now=NOW).evidence is Evidence.ENDED
    assert (
        job_observation(
            SlurmJob(job_id="1", state="NODE_FAIL", name="x"), is_settled=False, rebooted=True, now=NOW
        ).evidence
        is Evidence.ENDED
    )
    suspended = job_observation(
        SlurmJob(job_id="1", state="SUSPENDED", name=""), is_settled=False, rebooted=False, now=NOW
    )
    assert suspended.state is ClusterTaskState.SUSPENDED


def test_a_home_that_is_not_connected_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no Slurm is connected"):
        load_config(tmp_path)
    (tmp_path / "slurm.json").write_text('{"partitoin": "x"}')
    with pytest.raises(SpecError, match="partitoin"):
        load_config(tmp_path)


def test_what_of_its_configuration_decides_what_slurms_word_is_worth() -> None:
    result = "Configuration data as of now\nKillWait   = 45 sec\nProctrackType  = proctrack/cgroup\n"
    assert parse_config(result) == SlurmFacts(kill_wait_s=45.0, has_cgroups=True)
    assert parse_config("ProctrackType = proctrack/pgid\n") == SlurmFacts(kill_wait_s=30.0, has_cgroups=False)


def test_which_slurm_it_is_is_read() -> None:
    result = (
        "ClusterName             = lab\nSlurmctldHost[0]        = a(10.0.0.1)\nSlurmctldHost[1]        = b\n"
    )
    assert parse_config(result) == SlurmFacts(cluster="lab", heads=("a", "b"))


def test_a_node_that_sleeps_takes_work_and_tells_nothing() -> None:
    [node] = nodes("IDLE+CLOUD+POWERED_DOWN")
    assert (node.facts.is_alive, node.is_responding) == (True, False)


def test_nothing_of_the_control_planes_environment_goes_to_the_nodes() -> None:
    environ = {"PATH": "/bin", "LANG": "C", "SLURM_CONF": "/etc/s", "SBATCH_ACCOUNT": "a", "AWS_SECRET": "x"}
    assert sbatch_environment(environ) == {"PATH": "/bin", "LANG": "C", "SLURM_CONF": "/etc/s"}
