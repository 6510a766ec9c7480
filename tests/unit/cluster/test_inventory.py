"""The inventory: what people type and write, what is saved, and what is refused with every mistake."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shoal.cluster.inventory import (
    HostRole,
    build_inventory,
    inventory_path,
    list_clusters,
    load,
    parse_hosts,
    resolve_cluster,
    save,
    with_roles,
)
from shoal.errors import NotFound, SpecError, StateError
from tests.support.fakes.machines import facts_of, three_hosts, with_hardware


def test_hosts_are_typed_as_for_ssh() -> None:
    hosts = parse_hosts("a, ana@b:2222,[fe80::1]:22", user="root", port=None, jump="bastion")
    assert [(host.user, host.address, host.port) for host in hosts] == [
        ("root", "a", None),
        ("ana", "b", 2222),
        ("root", "fe80::1", 22),
    ]
    assert {host.jump for host in hosts} == {"bastion"}


def test_every_invalid_host_is_named() -> None:
    with pytest.raises(SpecError) as wrong:
        parse_hosts("a,,b c,-oProxyCommand=x,c:99999", user=None, port=None, jump=None)
    assert len(wrong.value.problems) == 4


def test_first_machine_is_the_controller_by_default() -> None:
    hosts = parse_hosts("a,b", user=None, port=None, jump=None)
    assert with_roles(hosts, controller=None, is_worker=True)[0].roles == tuple(HostRole)
    named = with_roles(hosts, controller="b", is_worker=False)
    assert [host.roles for host in named] == [(HostRole.WORKER,), (HostRole.CONTROLLER, HostRole.DATABASE)]
    with pytest.raises(SpecError, match="not one of the machines"):
        with_roles(hosts, controller="c", is_worker=True)


def test_saved_inventory_has_the_detected_hardware_and_is_private(tmp_path: Path) -> None:
    inventory = three_hosts(slurm={"KillWait": 10})
    inventory = with_hardware(inventory, facts_of(inventory.hosts, {"b": ("gpu 0 Disabled NVIDIA H200",)}))
    path = inventory_path(tmp_path, "lab")
    save(inventory, path)
    assert load(path) == inventory
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list_clusters(tmp_path) == ["lab"]


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        ({"cluster": "Lab"}, "`cluster`"),
        ({"hosts": []}, "at least one host"),
        ({"hosts": [{"address": "a"}]}, "exactly one host with the role `controller`, not 0"),
        ({"colour": 1}, "`colour`"),
        ({"slurm": {"A b": 1}}, "slurm"),
        ({"slurm": {"KillWait": "1\nSlurmUser=root"}}, "more than one line"),
        ({"provider": "aws"}, "`provider`"),
    ],
)
def test_a_wrong_inventory_is_refused_with_what_is_wrong(data: dict[str, object], arguments: str) -> None:
    whole = {"cluster": "lab", "hosts": [{"address": "a", "roles": ["controller", "database"]}], **data}
    with pytest.raises(SpecError) as wrong:
        build_inventory(whole, "cluster.yaml")
    assert any(arguments in problem for problem in wrong.value.problems), wrong.value.problems


def test_a_machine_stands_in_the_inventory_once() -> None:
    hosts = [{"address": "a", "roles": ["controller", "database", "worker"]}, {"address": "a"}]
    with pytest.raises(SpecError, match="twice"):
        build_inventory({"cluster": "lab", "hosts": hosts}, "cluster.yaml")


def test_a_machine_with_the_name_of_another_is_named() -> None:
    inventory = three_hosts()
    joining = inventory.hosts[1].model_copy(update={"address": "10.0.0.9"})
    with pytest.raises(SpecError, match="cluster `lab`: names b twice"):
        inventory.with_hosts([*inventory.hosts, joining])


def test_command_uses_the_only_cluster_or_the_named_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no cluster yet"):
        resolve_cluster(tmp_path, None)
    save(three_hosts(), inventory_path(tmp_path, "lab"))
    assert resolve_cluster(tmp_path, None) == "lab"
    save(three_hosts(cluster="other"), inventory_path(tmp_path, "other"))
    with pytest.raises(StateError, match="lab, other"):
        resolve_cluster(tmp_path, None)
    with pytest.raises(NotFound, match="there is lab, other"):
        resolve_cluster(tmp_path, "third")


def test_files_that_are_not_an_inventory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(NotFound):
        load(path)
    path.write_text("- a\n")
    with pytest.raises(SpecError, match="a mapping"):
        load(path)
    path.write_text("a: [\n")
    with pytest.raises(SpecError, match=r"x\.yaml"):
        load(path)


def test_a_machine_is_called_by_name_or_address() -> None:
    inventory = three_hosts()
    assert inventory.host("b") == inventory.host("10.0.0.2")
    with pytest.raises(NotFound, match="it has a, b, c"):
        inventory.host("d")


@pytest.mark.parametrize("value", ["a;reboot", "$(reboot)", "a\nb", "-oProxyCommand=x", "a b", "`id`", "a'b"])
@pytest.mark.parametrize("field", ["address", "name", "user", "jump", "inside", "switch"])
def test_no_value_of_a_host_can_reach_a_shell_as_more_than_a_word(field: str, value: str) -> None:
    host = {"address": "10.0.0.1", "roles": ["controller", "database"], field: value}
    with pytest.raises(SpecError):
        build_inventory({"cluster": "lab", "hosts": [host]}, "here")


@pytest.mark.parametrize("value", ["shared", "/a b", "/a;b", "/$(x)", "/../etc", "/-x", "/"])
def test_a_shared_directory_is_a_plain_path(value: str) -> None:
    host = {"address": "10.0.0.1", "roles": ["controller", "database"]}
    with pytest.raises(SpecError):
        build_inventory({"cluster": "lab", "shared": value, "hosts": [host]}, "here")
