"""What slurmrestd is told and answers, in both of its languages: recorded from Slurm 22.05.8 and 24.11.5."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from shoal.engines.slurm.associations import Association
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.nodes import slurm_nodes
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import Request, request
from shoal.engines.slurm.rest_parse import (
    Reply,
    associations_in,
    jobs_in,
    nodes_in,
    parse_reply,
    partitions_in,
    versions_in,
)
from shoal.engines.slurm.rest_place import Place, claims_of, place_of, read_token
from shoal.engines.slurm.rest_render import RENDERERS
from shoal.engines.slurm.rights import parts_of
from shoal.engines.slurm.states import is_away, is_for_ever, words
from shoal.errors import EngineUnreachable, SpecError
from tests.support.paper_slurm import order
from tests.unit.engines.test_slurm_pieces import KINDS

RECORDED = Path(__file__).parents[2] / "recorded" / "slurm"
GOLDEN = Path(__file__).parents[2] / "golden" / "slurm"
VERSIONS = ("v0.0.38", "v0.0.42")
NOW = 1_800_000_000.0


def reply(version: str, name: str) -> Reply:
    found = parse_reply((RECORDED / version / f"{name}.json").read_bytes())
    assert found is not None
    return found


def token(**claims: object) -> str:
    told = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJIUzI1NiJ9.{told}.c2lnbmF0dXJl"


def asked() -> Request:
    orders = tuple(order(node=node, node_rank=rank, gpu_ids=(0, 2)) for rank, node in enumerate(("n0", "n1")))
    config, script = SlurmConfig(account="vision"), "#!/bin/sh\nexec srun keeper\n"
    return request(config, orders, KINDS, "/shared/slurm/%x.out", script, Partition(name="main"))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_slurmrestd_is_told_is_the_golden_file(version: str) -> None:
    file = GOLDEN / f"rest-{version}.json"
    text = json.dumps(RENDERERS[version](asked(), {"PATH": "/usr/bin:/bin"}), indent=1) + "\n"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_asked_for_that_is_left_to_the_site(version: str) -> None:
    bare = Request(name="n", comment="c", nodes=("n0",), cpus=1, output="/dev/null", script="#!/bin/sh\n")
    told = RENDERERS[version](bare, {})["job"]
    left = {"partition", "account", "qos", "time_limit", "memory_per_node", "gres", "tres_per_node"}
    assert not left & set(told)


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_are_read_alike(version: str) -> None:
    found = {job.name: job for job in jobs_in(reply(version, "jobs"), "root")}
    running, waiting = found["shoal-att_1.0"], found["shoal-att_2.0"]
    assert (running.state, running.is_active) == ("RUNNING", True)
    assert (waiting.state, waiting.reason) == ("PENDING", "Resources")
    assert f"Slurm job {waiting.job_id} is PENDING (Resources)" in words(waiting, NOW)
    assert found["shoal-att_x.0"].state == "COMPLETED"


@pytest.mark.parametrize("version", VERSIONS)
def test_jobs_of_others_are_nobody_of_ours_whatever_they_are_called(version: str) -> None:
    assert jobs_in(reply(version, "jobs"), "ana") == []


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_are_read_alike(version: str) -> None:
    raw = nodes_in(reply(version, "nodes"))
    parts = parts_of(SlurmConfig(partition="main"), SlurmFacts(), [], raw)
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
    assert second.answers


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_that_does_not_answer_slurm_is_told_from_one_that_takes_no_work(version: str) -> None:
    told = (RECORDED / version / "nodes.json").read_text().replace('"DRAIN"', '"NOT_RESPONDING"')
    found = parse_reply(told.encode())
    assert found is not None
    raw = nodes_in(found)
    first, second = slurm_nodes(raw, {}, parts_of(SlurmConfig(partition="main"), SlurmFacts(), [], raw))
    assert (first.mute, first.answers) == ("", True)
    assert (second.mute, second.shut) == ("Slurm says NOT_RESPONDING bad cable", "")
    assert not second.answers


def test_memory_that_is_set_aside_is_not_offered() -> None:
    told = (RECORDED / "v0.0.42" / "nodes.json").read_text()
    found = parse_reply(told.replace('"specialized_memory": 0', '"specialized_memory": 512').encode())
    assert found is not None
    assert {raw.memory_mb for raw in nodes_in(found)} == {8000 - 512}


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_are_read_alike(version: str) -> None:
    """Of v0.0.42 by hand, from what its writer writes: src/plugins/data_parser/v0.0.42 of Slurm 24.11.5."""
    found = {one.name: one for one in partitions_in(reply(version, "partitions"))}
    main, gpu, staff = found["main"], found["gpu"], found["staff"]
    assert (main.state, main.max_minutes, main.max_nodes, main.has_default_time) == ("UP", None, None, False)
    assert (gpu.max_minutes, gpu.max_nodes, gpu.has_default_time, gpu.tier) == (120, 2, True, 1)
    assert (staff.state, staff.groups, staff.accounts) == ("UP", ("staff",), ("vision", "nlp"))
    assert (found["closed"].state, found["closed"].tier) == ("DRAIN", 7)
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
    assert words(job, NOW) == f"Slurm's accounting has job {job.job_id} as RUNNING"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_partition_that_is_not_there_is_told_from_a_token_that_is_not_taken(version: str) -> None:
    refused = reply(version, "refused").said
    assert "Invalid partition name specified" in refused
    assert not is_away(refused)
    assert not is_for_ever(refused)
    for name in ("other-token", "submit-other-token"):
        assert is_away(reply(version, name).said)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_is_gone_is_said_when_it_is_cancelled(version: str) -> None:
    assert "Invalid job id specified" in reply(version, "cancel-gone").said


@pytest.mark.parametrize(("version", "release"), [("v0.0.38", "22.05.8"), ("v0.0.42", "24.11.5")])
def test_the_release_is_read(version: str, release: str) -> None:
    assert reply(version, "ping").release == release


@pytest.mark.parametrize(("version", "cluster"), [("v0.0.38", ""), ("v0.0.42", "lab")])
def test_which_slurm_it_is_is_read(version: str, cluster: str) -> None:
    said = reply(version, "ping")
    assert (said.cluster, said.heads) == (cluster, ("vm",))


def test_versions_are_found_in_the_description() -> None:
    told = (
        rb'{"paths": {"\/slurm\/v0.0.39\/ping": {}, "/slurm/v0.0.41/ping/": {}, "/slurmdb/v0.0.40/jobs": {}}}'
    )
    assert versions_in(told) == ["v0.0.41", "v0.0.39"]


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:6820", Place("127.0.0.1", 6820)),
        ("http://localhost:6820/", Place("localhost", 6820)),
        ("http://[::1]:6820", Place("::1", 6820)),
        ("https://slurm.example.org", Place("slurm.example.org", 443, True)),
        ("https://slurm.example.org:8443/rest/", Place("slurm.example.org", 8443, True, prefix="/rest")),
        ("unix:/run/slurmrestd.sock", Place(file="/run/slurmrestd.sock")),
    ],
)
def test_where_a_token_may_go(url: str, place: Place) -> None:
    assert place_of(url) == place


@pytest.mark.parametrize("url", ["http://slurm.example.org:6820", "http://10.0.0.7:6820", "http://0.0.0.0:1"])
def test_a_token_goes_over_no_network_in_clear(url: str) -> None:
    with pytest.raises(SpecError, match="in clear") as told:
        place_of(url)
    assert "https://" in (told.value.hint or "")


@pytest.mark.parametrize(
    "url",
    ["", "slurm:6820", "unix:relative", "ftp://localhost", "http://", "http://localhost:x", "http://a:b@::1"],
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="no place"):
        place_of(url)


def test_a_token_is_read_as_scontrol_printed_it(tmp_path: Path) -> None:
    file, text = tmp_path / "token", token(sun="ana", exp=int(NOW) + 60)
    for written in (text, f"{text}\n", f"SLURM_JWT={text}\n"):
        file.write_text(written)
        file.chmod(0o600)
        found = read_token(str(file), NOW)
        assert (found.text, found.claims.sun) == (text, "ana")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(token(sun="ana"))
    file.chmod(mode)
    with pytest.raises(EngineUnreachable, match=f"mode {mode:04o}") as told:
        read_token(str(file), NOW)
    assert told.value.hint == f"chmod 600 {file}"


def test_an_expired_token_says_since_when_and_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token(sun="ana", exp=int(NOW) - 90))
    file.chmod(0o600)
    with pytest.raises(EngineUnreachable, match="expired 90 s ago") as told:
        read_token(str(file), NOW)
    assert f"scontrol token username=ana lifespan=86400 > {file}" in (told.value.hint or "")


@pytest.mark.parametrize("text", ["", "rubbish", "a.b.c", "a b.c.d", "x.\x00.z"])
def test_what_is_no_token_is_never_sent(tmp_path: Path, text: str) -> None:
    assert claims_of(text) is None
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(EngineUnreachable, match="holds no token"):
        read_token(str(file), NOW)
    with pytest.raises(EngineUnreachable, match="cannot be read"):
        read_token(str(tmp_path / "gone"), NOW)
