"""What slurmrestd is told and answers, in both of its languages: recorded from Slurm 22.05.8 and 24.11.5."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from shoal.engines.slurm.config import SlurmConfig, usable_partitions
from shoal.engines.slurm.nodes import slurm_nodes
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Association, Partition
from shoal.engines.slurm.render import SlurmJobRequest, job_request
from shoal.engines.slurm.rest_parse import (
    RestReply,
    associations_in,
    jobs_in,
    nodes_in,
    parse_reply,
    partitions_in,
    versions_in,
)
from shoal.engines.slurm.rest_request import RENDERERS, RestEndpoint, parse_claims, parse_endpoint, read_token
from shoal.engines.slurm.states import describe_job, is_permanent, is_unreachable
from shoal.errors import EngineUnreachable, SpecError
from tests.support.slurm.fake_slurm import slurm_task_spec
from tests.unit.engines.slurm.test_slurm_parse_and_render import KINDS

RECORDED = Path(__file__).parents[3] / "recorded" / "slurm"
GOLDEN = Path(__file__).parents[3] / "golden" / "slurm"
VERSIONS = ("v0.0.38", "v0.0.42")
NOW = 1_800_000_000.0


def reply(version: str, name: str) -> RestReply:
    result = parse_reply((RECORDED / version / f"{name}.json").read_bytes())
    assert result is not None
    return result


def token(**claims: object) -> str:
    result = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJIUzI1NiJ9.{result}.c2lnbmF0dXJl"


def asked() -> SlurmJobRequest:
    task_specs = tuple(
        slurm_task_spec(node=node, node_rank=rank, gpu_ids=(0, 2)) for rank, node in enumerate(("n0", "n1"))
    )
    config, script = SlurmConfig(account="vision"), "#!/bin/sh\nexec srun keeper\n"
    return job_request(config, task_specs, KINDS, "/shared/slurm/%x.out", script, Partition(name="main"))


@pytest.mark.parametrize("version", VERSIONS)
def test_slurmrestd_request_matches_the_golden_file(version: str) -> None:
    file = GOLDEN / f"rest-{version}.json"
    text = json.dumps(RENDERERS[version](asked(), {"PATH": "/usr/bin:/bin"}), indent=1) + "\n"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_asked_for_that_is_left_to_the_site(version: str) -> None:
    bare = SlurmJobRequest(
        name="n", comment="c", nodes=("n0",), cpus=1, output="/dev/null", script="#!/bin/sh\n"
    )
    result = RENDERERS[version](bare, {})["job"]
    left = {"partition", "account", "qos", "time_limit", "memory_per_node", "gres", "tres_per_node"}
    assert not left & set(result)


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_are_read_alike(version: str) -> None:
    result = {job.name: job for job in jobs_in(reply(version, "jobs"), "root")}
    running, waiting = result["shoal-att_1.0"], result["shoal-att_2.0"]
    assert (running.state, running.is_active) == ("RUNNING", True)
    assert (waiting.state, waiting.reason) == ("PENDING", "Resources")
    assert f"Slurm job {waiting.job_id} is PENDING (Resources)" in describe_job(waiting, NOW)
    assert result["shoal-att_x.0"].state == "COMPLETED"


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_of_other_users_are_ignored(version: str) -> None:
    assert jobs_in(reply(version, "jobs"), "ana") == []


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_are_read_alike(version: str) -> None:
    raw = nodes_in(reply(version, "nodes"))
    parts = usable_partitions(SlurmConfig(partition="main"), SlurmFacts(), [], raw)
    first, second = slurm_nodes(raw, {}, parts)
    facts = first.facts
    assert (facts.name, facts.cpus, facts.memory_bytes) == ("n0", 4.0, 8000 << 20)
    assert [gpu.kind for gpu in facts.gpus] == ["H100", "H100"]
    assert first.gpu_kinds == ("h100", "h100")
    assert facts.labels == {"feature.fast": "yes", "partition.main": "yes"}
    assert facts.address.startswith("10.")
    assert first.boot is not None
    assert facts.is_alive
    assert second.facts.remarks == ("Slurm says DRAIN bad cable",)
    assert second.is_responding


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_that_does_not_answer_slurm_is_told_from_one_that_takes_no_work(version: str) -> None:
    changed = (RECORDED / version / "nodes.json").read_text().replace('"DRAIN"', '"NOT_RESPONDING"')
    result = parse_reply(changed.encode())
    assert result is not None
    raw = nodes_in(result)
    first, second = slurm_nodes(
        raw, {}, usable_partitions(SlurmConfig(partition="main"), SlurmFacts(), [], raw)
    )
    assert (first.unresponsive_reason, first.is_responding) == ("", True)
    assert (second.unresponsive_reason, second.unusable_reason) == ("Slurm says NOT_RESPONDING bad cable", "")
    assert not second.is_responding


def test_memory_that_is_set_aside_is_not_offered() -> None:
    text = (RECORDED / "v0.0.42" / "nodes.json").read_text()
    result = parse_reply(text.replace('"specialized_memory": 0', '"specialized_memory": 512').encode())
    assert result is not None
    assert {raw.memory_mb for raw in nodes_in(result)} == {8000 - 512}


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_are_read_alike(version: str) -> None:
    """Of v0.0.42 by hand, from what its writer writes: src/plugins/data_parser/v0.0.42 of Slurm 24.11.5."""
    result = {item.name: item for item in partitions_in(reply(version, "partitions"))}
    main, gpu, staff = result["main"], result["gpu"], result["staff"]
    assert (main.state, main.max_minutes, main.max_nodes, main.has_default_time) == ("UP", None, None, False)
    assert (gpu.max_minutes, gpu.max_nodes, gpu.has_default_time, gpu.tier) == (120, 2, True, 1)
    assert (staff.state, staff.groups, staff.accounts) == ("UP", ("staff",), ("vision", "nlp"))
    assert (result["closed"].state, result["closed"].tier) == ("DRAIN", 7)
    assert main.groups == main.accounts == main.denied_accounts == main.qos == main.denied_qos == ()
    if version == "v0.0.38":  # the newer one tells no flags
        assert (main.is_default, gpu.is_default, staff.is_hidden) == (True, False, True)


@pytest.mark.parametrize("version", VERSIONS)
def test_associations_are_read_alike(version: str) -> None:
    """Of v0.0.42 by hand, as above."""
    assert associations_in(reply(version, "associations"), "root") == [
        Association(account="nlp", qos=("normal",)),
        Association(account="vision", partition="gpu", qos=("high", "normal")),
        Association(account="root", is_default=True, qos=("normal",)),
    ]
    assert associations_in(reply(version, "associations"), "ana") == []


@pytest.mark.parametrize("version", VERSIONS)
def test_what_accounting_remembers_is_read_alike(version: str) -> None:
    [job] = jobs_in(reply(version, "past"), "root", is_past=True)
    assert (job.name, job.state) == ("shoal-att_1.0", "RUNNING")
    assert describe_job(job, NOW) == f"Slurm's accounting has job {job.job_id} as RUNNING"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_partition_that_is_not_there_is_told_from_a_token_that_is_not_taken(version: str) -> None:
    refused = reply(version, "refused").error_text
    assert "Invalid partition name specified" in refused
    assert not is_unreachable(refused)
    assert not is_permanent(refused)
    for name in ("other-token", "submit-other-token"):
        assert is_unreachable(reply(version, name).error_text)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_is_gone_is_said_when_it_is_cancelled(version: str) -> None:
    assert "Invalid job id specified" in reply(version, "cancel-gone").error_text


@pytest.mark.parametrize(("version", "release"), [("v0.0.38", "22.05.8"), ("v0.0.42", "24.11.5")])
def test_the_release_is_read(version: str, release: str) -> None:
    assert reply(version, "ping").release == release


@pytest.mark.parametrize(("version", "cluster"), [("v0.0.38", ""), ("v0.0.42", "lab")])
def test_which_slurm_it_is_is_read(version: str, cluster: str) -> None:
    message = reply(version, "ping")
    assert (message.cluster, message.heads) == (cluster, ("vm",))


def test_versions_are_found_in_the_description() -> None:
    result = (
        rb'{"paths": {"\/slurm\/v0.0.39\/ping": {}, "/slurm/v0.0.41/ping/": {}, "/slurmdb/v0.0.40/jobs": {}}}'
    )
    assert versions_in(result) == ["v0.0.41", "v0.0.39"]


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:6820", RestEndpoint("127.0.0.1", 6820)),
        ("http://localhost:6820/", RestEndpoint("localhost", 6820)),
        ("http://[::1]:6820", RestEndpoint("::1", 6820)),
        ("https://slurm.example.org", RestEndpoint("slurm.example.org", 443, True)),
        (
            "https://slurm.example.org:8443/rest/",
            RestEndpoint("slurm.example.org", 8443, True, prefix="/rest"),
        ),
        ("unix:/run/slurmrestd.sock", RestEndpoint(file="/run/slurmrestd.sock")),
    ],
)
def test_where_a_token_may_go(url: str, place: RestEndpoint) -> None:
    assert parse_endpoint(url) == place


@pytest.mark.parametrize("url", ["http://slurm.example.org:6820", "http://10.0.0.7:6820", "http://0.0.0.0:1"])
def test_a_token_goes_over_no_network_in_clear(url: str) -> None:
    with pytest.raises(SpecError, match="in clear") as raised:
        parse_endpoint(url)
    assert "https://" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "url",
    ["", "slurm:6820", "unix:relative", "ftp://localhost", "http://", "http://localhost:x", "http://a:b@::1"],
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="no place"):
        parse_endpoint(url)


def test_a_token_is_read_as_scontrol_printed_it(tmp_path: Path) -> None:
    file, text = tmp_path / "token", token(sun="ana", exp=int(NOW) + 60)
    for written in (text, f"{text}\n", f"SLURM_JWT={text}\n"):
        file.write_text(written)
        file.chmod(0o600)
        result = read_token(str(file), NOW)
        assert (result.text, result.claims.sun) == (text, "ana")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(token(sun="ana"))
    file.chmod(mode)
    with pytest.raises(EngineUnreachable, match=f"mode {mode:04o}") as raised:
        read_token(str(file), NOW)
    assert raised.value.hint == f"chmod 600 {file}"


def test_an_expired_token_says_since_when_and_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token(sun="ana", exp=int(NOW) - 90))
    file.chmod(0o600)
    with pytest.raises(EngineUnreachable, match="expired 90 s ago") as raised:
        read_token(str(file), NOW)
    assert f"scontrol token username=ana lifespan=86400 > {file}" in (raised.value.hint or "")


@pytest.mark.parametrize("text", ["", "rubbish", "a.b.c", "a b.c.d", "x.\x00.z"])
def test_what_is_no_token_is_never_sent(tmp_path: Path, text: str) -> None:
    assert parse_claims(text) is None
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(EngineUnreachable, match="holds no token"):
        read_token(str(file), NOW)
    with pytest.raises(EngineUnreachable, match="cannot be read"):
        read_token(str(tmp_path / "gone"), NOW)
