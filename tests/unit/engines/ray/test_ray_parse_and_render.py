"""What Ray and its agents say, as we read it; what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.engines.ray.config import RayConfig, check_token_file, load_config
from shoal.engines.ray.parse import check_version, connection_error, node_name, parse_nodes, task_observation
from shoal.engines.ray.render import (
    agent_task,
    head_command,
    head_environment,
    key_of,
    ray_environment,
    tls_environment,
)
from shoal.engines.remote.cluster_observation import Boot, ClusterTaskState
from shoal.errors import EngineUnreachable, SpecError
from shoal.model.evidence import Evidence
from shoal.wire import LaunchRequest
from tests.support.slurm.fake_slurm import slurm_task_spec

MISMATCH = """RuntimeError: Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.11.7
This process on node 10.0.0.1 was started with:
    Ray: 2.59.0
    Python: 3.11.2
"""
"""As Ray 2.60 says it."""


def row(node_id: str = "a" * 8, **changes: Any) -> dict[str, Any]:
    return {
        "NodeID": node_id,
        "Alive": True,
        "NodeName": "n0",
        "NodeManagerAddress": "10.0.0.10",
        "Resources": {
            "CPU": 4.0,
            "GPU": 2.0,
            "memory": 8e9,
            "accelerator_type:H100": 1.0,
            "node:10.0.0.10": 1.0,
        },
        "Labels": {"rack": "leaf", "ray.io/node-id": node_id},
    } | changes


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "uid": 1000,
        "hostname": "box",
        "machine": "m",
        "boot_id": "1",
        "memory_bytes": 16 << 30,
        "disk_bytes": 1 << 40,
        "devices": None,
    } | changes


def answer(*rows: dict[str, Any], **result: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows), "facts": result, "failed": {}}


def test_a_node_is_what_ray_and_its_agent_say() -> None:
    [node] = parse_nodes(answer(row(), **{"a" * 8: facts()}))
    assert (node.node_id, node.uid, node.boot) == ("a" * 8, 1000, Boot(machine="m", boot_id="1"))
    [unknown] = parse_nodes(answer(row(), **{"a" * 8: facts(machine="")}))
    assert unknown.boot is None
    assert (node.facts.name, node.facts.address, node.facts.cpus) == ("n0", "10.0.0.10", 4.0)
    assert (node.facts.memory_bytes, node.facts.disk_bytes) == (16 << 30, 1 << 40)
    assert [(gpu.index, gpu.kind) for gpu in node.facts.gpus] == [(0, "H100"), (1, "H100")]
    assert node.facts.labels == {"rack": "leaf", "hostname": "box"}


@pytest.mark.parametrize("devices", ["GPU-1b2c,GPU-2d3e", "MIG-1,MIG-2", "3"])
def test_devices_by_other_names_are_not_offered(devices: str) -> None:
    [node] = parse_nodes(answer(row(), **{"a" * 8: facts(devices=devices)}))
    assert node.facts.gpus == ()


def test_devices_have_the_drivers_numbers() -> None:
    [node] = parse_nodes(answer(row(), **{"a" * 8: facts(devices="2,5")}))
    assert [(gpu.index, gpu.minor) for gpu in node.facts.gpus] == [(2, None), (5, None)]


def test_devices_have_the_files_that_the_driver_says() -> None:
    result = facts(devices="2,1", minors=[3, 2, 1, 0])
    [node] = parse_nodes(answer(row(), **{"a" * 8: result}))
    assert [(gpu.index, gpu.minor) for gpu in node.facts.gpus] == [(2, 1), (1, 2)]


def test_dead_nodes_and_heads_without_cpus_are_left_out() -> None:
    rows = (row(Alive=False), row("b" * 8, Resources={"memory": 1.0}, NodeName="head"))
    assert parse_nodes(answer(*rows)) == []


def test_a_node_whose_agent_is_silent_is_not_alive_and_says_so() -> None:
    result = answer(row()) | {"failed": {"a" * 8: "its agent has not answered in time"}}
    [node] = parse_nodes(result)
    assert not node.facts.is_alive
    assert "has not answered in time" in node.facts.remarks[0]


def test_two_raylets_of_one_name_are_one_node_with_a_remark() -> None:
    [node] = parse_nodes(answer(row(), row("b" * 8), **{"b" * 8: facts()}))
    assert (node.node_id, node.facts.is_alive) == ("b" * 8, True)
    assert "--node-name" in node.facts.remarks[-1]


@pytest.mark.parametrize(
    ("ray_name", "name"), [("n0", "n0"), ("10.0.0.1", "10.0.0.1"), ("fe80::1", "fe80--1"), ("::1", "node--1")]
)
def test_names_of_nodes_can_be_names_of_directories(ray_name: str, name: str) -> None:
    assert node_name({"NodeName": ray_name, "NodeManagerAddress": "1.2.3.4"}) == name


def test_different_versions_are_both_said_with_what_to_install() -> None:
    error = connection_error(MISMATCH, "10.0.0.1:6379")
    assert isinstance(error, SpecError)
    assert "2.60.0 on Python 3.11.7" in error.message
    assert "2.59.0 on Python 3.11.2" in error.message
    assert "ray==2.60.0" in (error.hint or "")


def test_a_wrong_token_is_told_from_a_ray_that_is_away() -> None:
    assert isinstance(connection_error("AuthenticationError: InvalidAuthToken", "h:1"), SpecError)
    assert isinstance(connection_error("ConnectionError: Failed to connect", "h:1"), EngineUnreachable)
    log = "gcs_client.cc: Unauthenticated: RPC error: InvalidAuthToken: token is missing or incorrect\nmore"
    error = connection_error("ConnectionError: Failed to connect", "h:1", log)
    assert isinstance(error, SpecError)
    assert error.message.endswith("InvalidAuthToken: token is missing or incorrect")


@pytest.mark.parametrize(
    ("version", "is_taken"), [("2.60.0", True), ("2.52.0", True), ("2.51.2", False), ("1.13", False)]
)
def test_a_ray_without_tokens_is_refused(version: str, is_taken: bool) -> None:
    if is_taken:
        check_version(version)
    else:
        with pytest.raises(SpecError, match=version):
            check_version(version)


@pytest.mark.parametrize(("mode", "is_taken"), [(0o600, True), (0o400, True), (0o640, False), (0o644, False)])
def test_a_token_that_others_can_read_is_refused(tmp_path: Path, mode: int, is_taken: bool) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    file.chmod(mode)
    if is_taken:
        check_token_file(file)
    else:
        with pytest.raises(SpecError, match=f"{mode:04o}") as raised:
            check_token_file(file)
        assert raised.value.hint == f"chmod 600 {file}"


def test_an_empty_or_missing_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        check_token_file(tmp_path / "token")
    (tmp_path / "token").touch(mode=0o600)
    with pytest.raises(SpecError, match="is empty"):
        check_token_file(tmp_path / "token")


def test_a_home_without_a_ray_says_how_to_connect_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        load_config(tmp_path)
    assert raised.value.hint == "shoal connect ray"


def test_bootstrap_token_is_not_on_the_command_line_of_a_node_agent() -> None:
    config = RayConfig(python="/py", python_path="/src", spool="/var/spool/shoal")
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://c:1",), ca="ca", bootstrap_token="swordfish"
    )
    task = agent_task(config, launch_request, slurm_task_spec().identity)
    node = slurm_task_spec().identity.node
    assert task["command"] == ["/py", "-P", "-s", "-m", "shoal.runtime.agent.bootstrap", node]
    assert task["reap"][-5:] == ["shoal.runtime.agent.reaping", "/var/spool/shoal", "att_1", node, "0"]
    assert "swordfish" in task["launch_request"]
    assert "swordfish" not in str({**task, "launch_request": ""})
    assert key_of("att_1", node, 0) == f"att_1.{node}.0"


def test_nothing_of_another_ray_reaches_ours() -> None:
    passed = {"RAY_ADDRESS": "elsewhere", "RAY_AUTH_TOKEN": "x", "PYTHONPATH": "/ours", "PATH": "/bin"}
    result = ray_environment(passed, Path("/token"), is_own=False)
    assert {name for name in result if name.startswith("RAY_")} == {
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_USAGE_STATS_ENABLED",
    }
    assert (result["RAY_AUTH_MODE"], result["PATH"], "PYTHONPATH" in result) == ("token", "/bin", False)


def test_a_ray_that_speaks_tls_is_shown_our_certificate() -> None:
    assert tls_environment(RayConfig(address="h:1")) == {}
    result = tls_environment(RayConfig(address="h:1", tls_cert="/c", tls_key="/k", tls_ca="/a"))
    assert result == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": "/c",
        "RAY_TLS_SERVER_KEY": "/k",
        "RAY_TLS_CA_CERT": "/a",
    }


def test_the_head_of_our_own_is_on_loopback_with_a_token_and_a_disk() -> None:
    command = head_command("/py", "box", 1234, (1, 2, 3, 4, 5), Path("/t"))
    assert {"--node-ip-address=127.0.0.1", "--port=1234", "--include-dashboard=false", "--block"} <= set(
        command
    )
    env = head_environment({}, Path("/token"), Path("/gcs"))
    assert (env["RAY_gcs_storage"], env["RAY_gcs_storage_path"], env["RAY_AUTH_MODE"]) == (
        "rocksdb",
        "/gcs",
        "token",
    )


@pytest.mark.parametrize(
    ("state", "stage", "evidence"),
    [
        ("running", ClusterTaskState.RUNNING, Evidence.UNKNOWN),
        ("over", ClusterTaskState.ENDED, Evidence.ENDED),
        ("gone", ClusterTaskState.UNKNOWN, Evidence.UNKNOWN),
        ("left", ClusterTaskState.UNKNOWN, Evidence.ORPHANED_PER_CLUSTER),
        ("hidden", ClusterTaskState.UNKNOWN, Evidence.UNKNOWN),
    ],
)
def test_only_an_agent_that_looked_gives_evidence(
    state: str, stage: ClusterTaskState, evidence: Evidence
) -> None:
    result = {"state": state, "pid": 7, "said": "no order", "process": "one"}
    seen = task_observation("n0", result, "one")
    assert (seen.state, seen.evidence) == (stage, evidence)
    assert "no order" in seen.raw
    for holder in ("two", ""):
        other = task_observation("n0", result, holder)
        assert (other.state, other.evidence) == (stage, Evidence.UNKNOWN)
        assert other.raw.startswith(
            "a node agent that did not get its task spec" if holder else "its node agent"
        )


def test_leftovers_of_an_older_shoal_hold_off_the_fence() -> None:
    """Its agent's record does not say which process it is about: enough to wait, and to end nothing."""
    left = task_observation("n0", {"state": "left", "pid": 7, "said": ""}, "one")
    assert (left.state, left.evidence) == (ClusterTaskState.UNKNOWN, Evidence.ORPHANED_PER_CLUSTER)
    assert left.raw == "its node agent, process 7 on n0, is gone, and something of its task does not die"
    over = task_observation("n0", {"state": "over", "pid": 7, "said": "", "process": ""}, "one")
    assert over.evidence is Evidence.UNKNOWN
    assert over.raw.startswith("its node agent")


def test_untrusted_record_is_no_evidence() -> None:
    seen = task_observation(
        "n0", {"state": "hidden", "pid": None, "said": "/tmp/x is not a directory of ours"}, "one"
    )
    assert (seen.state, seen.evidence) == (ClusterTaskState.UNKNOWN, Evidence.UNKNOWN)
    assert seen.raw == "the record of its node agent on n0 is not trusted: /tmp/x is not a directory of ours"
