"""What Ray and its agents say, as we read it; what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.engines.boots import Boot
from shoal.engines.glimpses import Stage
from shoal.engines.ray.config import RayConfig, check_token_file, load_config
from shoal.engines.ray.parse import check_version, node_name, parse_nodes, refusal
from shoal.engines.ray.render import (
    head_command,
    head_environment,
    keeper_task,
    key_of,
    ray_environment,
    tls_environment,
)
from shoal.engines.ray.states import glimpse
from shoal.errors import EngineUnreachable, SpecError
from shoal.wire import Summons
from tests.support.paper_slurm import order

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


def answer(*rows: dict[str, Any], **told: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows), "facts": told, "failed": {}}


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
    told = facts(devices="2,1", minors=[3, 2, 1, 0])
    [node] = parse_nodes(answer(row(), **{"a" * 8: told}))
    assert [(gpu.index, gpu.minor) for gpu in node.facts.gpus] == [(2, 1), (1, 2)]


def test_dead_nodes_and_heads_without_cpus_are_left_out() -> None:
    rows = (row(Alive=False), row("b" * 8, Resources={"memory": 1.0}, NodeName="head"))
    assert parse_nodes(answer(*rows)) == []


def test_a_node_whose_agent_is_silent_is_not_alive_and_says_so() -> None:
    told = answer(row()) | {"failed": {"a" * 8: "its agent has not answered in time"}}
    [node] = parse_nodes(told)
    assert not node.facts.is_alive
    assert "has not answered in time" in node.facts.remarks[0]


def test_two_raylets_of_one_name_are_one_node_with_a_remark() -> None:
    [node] = parse_nodes(answer(row(), row("b" * 8), **{"b" * 8: facts()}))
    assert (node.node_id, node.facts.is_alive) == ("b" * 8, True)
    assert "--node-name" in node.facts.remarks[-1]


@pytest.mark.parametrize(
    ("given", "name"), [("n0", "n0"), ("10.0.0.1", "10.0.0.1"), ("fe80::1", "fe80--1"), ("::1", "node--1")]
)
def test_names_of_nodes_can_be_names_of_directories(given: str, name: str) -> None:
    assert node_name({"NodeName": given, "NodeManagerAddress": "1.2.3.4"}) == name


def test_different_versions_are_both_said_with_what_to_install() -> None:
    error = refusal(MISMATCH, "10.0.0.1:6379")
    assert isinstance(error, SpecError)
    assert "2.60.0 on Python 3.11.7" in error.message
    assert "2.59.0 on Python 3.11.2" in error.message
    assert "ray==2.60.0" in (error.hint or "")


def test_a_wrong_token_is_told_from_a_ray_that_is_away() -> None:
    assert isinstance(refusal("AuthenticationError: InvalidAuthToken", "h:1"), SpecError)
    assert isinstance(refusal("ConnectionError: Failed to connect", "h:1"), EngineUnreachable)
    log = "gcs_client.cc: Unauthenticated: RPC error: InvalidAuthToken: token is missing or incorrect\nmore"
    error = refusal("ConnectionError: Failed to connect", "h:1", log)
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
        with pytest.raises(SpecError, match=f"{mode:04o}") as told:
            check_token_file(file)
        assert told.value.hint == f"chmod 600 {file}"


def test_an_empty_or_missing_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        check_token_file(tmp_path / "token")
    (tmp_path / "token").touch(mode=0o600)
    with pytest.raises(SpecError, match="is empty"):
        check_token_file(tmp_path / "token")


def test_a_home_without_a_ray_says_how_to_connect_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as told:
        load_config(tmp_path)
    assert told.value.hint == "shoal connect ray"


def test_a_keeper_is_told_everything_but_the_ticket_on_its_command_line() -> None:
    config = RayConfig(python="/py", python_path="/src", spool="/var/spool/shoal")
    summons = Summons(attempt_id="att_1", urls=("https://c:1",), ca="ca", ticket="swordfish")
    task = keeper_task(config, summons, order())
    node = order().node
    assert task["command"] == ["/py", "-P", "-s", "-m", "shoal.runtime.keep", node]
    assert task["bury"][-5:] == ["shoal.runtime.burial", "/var/spool/shoal", "att_1", node, "0"]
    assert "swordfish" in task["summons"]
    assert "swordfish" not in str({**task, "summons": ""})
    assert key_of("att_1", node, 0) == f"att_1.{node}.0"


def test_nothing_of_another_ray_reaches_ours() -> None:
    given = {"RAY_ADDRESS": "elsewhere", "RAY_AUTH_TOKEN": "x", "PYTHONPATH": "/ours", "PATH": "/bin"}
    told = ray_environment(given, Path("/token"), is_own=False)
    assert {name for name in told if name.startswith("RAY_")} == {
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_USAGE_STATS_ENABLED",
    }
    assert (told["RAY_AUTH_MODE"], told["PATH"], "PYTHONPATH" in told) == ("token", "/bin", False)


def test_a_ray_that_speaks_tls_is_shown_our_certificate() -> None:
    assert tls_environment(RayConfig(address="h:1")) == {}
    told = tls_environment(RayConfig(address="h:1", tls_cert="/c", tls_key="/k", tls_ca="/a"))
    assert told == {
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
    ("state", "stage", "is_over", "is_left"),
    [
        ("running", Stage.RUNNING, False, False),
        ("over", Stage.ENDED, True, False),
        ("gone", Stage.UNKNOWN, False, False),
        ("left", Stage.UNKNOWN, False, True),
        ("hidden", Stage.UNKNOWN, False, False),
    ],
)
def test_only_who_looked_for_what_is_left_gives_evidence(
    state: str, stage: Stage, is_over: bool, is_left: bool
) -> None:
    told = {"state": state, "pid": 7, "said": "no order", "process": "one"}
    seen = glimpse("n0", told, "one")
    assert (seen.stage, seen.is_over, seen.is_left) == (stage, is_over, is_left)
    assert "no order" in seen.raw
    for holder in ("two", ""):
        other = glimpse("n0", told, holder)
        assert (other.stage, other.is_over, other.is_left) == (stage, False, False)
        assert other.raw.startswith("a keeper that did not get its order" if holder else "its keeper")


def test_what_is_left_of_a_share_that_an_older_shoal_began_holds_off_its_fence() -> None:
    """Its agent's record does not say which process it is about: enough to wait, and to end nothing."""
    left = glimpse("n0", {"state": "left", "pid": 7, "said": ""}, "one")
    assert (left.stage, left.is_over, left.is_left) == (Stage.UNKNOWN, False, True)
    assert left.raw == "its keeper, process 7 on n0, is gone, and something of its share does not die"
    over = glimpse("n0", {"state": "over", "pid": 7, "said": "", "process": ""}, "one")
    assert (over.is_over, over.is_left) == (False, False)
    assert over.raw.startswith("its keeper")


def test_a_record_that_is_not_believed_is_no_evidence() -> None:
    seen = glimpse("n0", {"state": "hidden", "pid": None, "said": "/tmp/x is not a directory of ours"}, "one")
    assert (seen.stage, seen.is_over, seen.is_left) == (Stage.UNKNOWN, False, False)
    assert seen.raw == "what n0 has of its keeper is not believed: /tmp/x is not a directory of ours"
