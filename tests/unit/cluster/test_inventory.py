"""The inventory: what people type and write, what is kept, and what is refused with every mistake."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shoal.cluster.inventory import (
    Role,
    known_clusters,
    load,
    make,
    path_of,
    save,
    the_cluster,
    typed_hosts,
    with_roles,
)
from shoal.errors import NotFound, SpecError, StateError
from tests.support.bare_machines import facts_of, found, three


def test_hosts_are_typed_as_for_ssh() -> None:
    hosts = typed_hosts("a, ana@b:2222,[fe80::1]:22", user="root", port=None, jump="bastion")
    assert [(host.user, host.address, host.port) for host in hosts] == [
        ("root", "a", None),
        ("ana", "b", 2222),
        ("root", "fe80::1", 22),
    ]
    assert {host.jump for host in hosts} == {"bastion"}


def test_every_host_that_cannot_be_one_is_named() -> None:
    with pytest.raises(SpecError) as wrong:
        typed_hosts("a,,b c,-oProxyCommand=x,c:99999", user=None, port=None, jump=None)
    assert len(wrong.value.problems) == 4


def test_the_first_machine_decides_unless_another_is_named() -> None:
    hosts = typed_hosts("a,b", user=None, port=None, jump=None)
    assert with_roles(hosts, controller=None, is_worker=True)[0].roles == tuple(Role)
    named = with_roles(hosts, controller="b", is_worker=False)
    assert [host.roles for host in named] == [(Role.WORKER,), (Role.CONTROLLER, Role.DATABASE)]
    with pytest.raises(SpecError, match="none of the machines"):
        with_roles(hosts, controller="c", is_worker=True)


def test_what_is_kept_is_what_was_found_and_nobody_else_reads_it(tmp_path: Path) -> None:
    inventory = three(slurm={"KillWait": 10})
    inventory = found(inventory, facts_of(inventory.hosts, {"b": ("gpu 0 Disabled NVIDIA H200",)}))
    path = path_of(tmp_path, "lab")
    save(inventory, path)
    assert load(path) == inventory
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert known_clusters(tmp_path) == ["lab"]


@pytest.mark.parametrize(
    ("data", "words"),
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
def test_a_wrong_inventory_is_refused_with_what_is_wrong(data: dict[str, object], words: str) -> None:
    whole = {"cluster": "lab", "hosts": [{"address": "a", "roles": ["controller", "database"]}], **data}
    with pytest.raises(SpecError) as wrong:
        make(whole, "cluster.yaml")
    assert any(words in problem for problem in wrong.value.problems), wrong.value.problems


def test_a_machine_stands_in_the_inventory_once() -> None:
    hosts = [{"address": "a", "roles": ["controller", "database", "worker"]}, {"address": "a"}]
    with pytest.raises(SpecError, match="twice"):
        make({"cluster": "lab", "hosts": hosts}, "cluster.yaml")


def test_a_machine_with_the_name_of_another_is_named() -> None:
    inventory = three()
    joining = inventory.hosts[1].model_copy(update={"address": "10.0.0.9"})
    with pytest.raises(SpecError, match="cluster `lab`: names b twice"):
        inventory.with_hosts([*inventory.hosts, joining])


def test_the_cluster_that_is_meant_is_the_only_one_or_the_named_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no cluster yet"):
        the_cluster(tmp_path, None)
    save(three(), path_of(tmp_path, "lab"))
    assert the_cluster(tmp_path, None) == "lab"
    save(three(cluster="other"), path_of(tmp_path, "other"))
    with pytest.raises(StateError, match="lab, other"):
        the_cluster(tmp_path, None)
    with pytest.raises(NotFound, match="there is lab, other"):
        the_cluster(tmp_path, "third")


def test_files_that_are_no_inventory_are_refused(tmp_path: Path) -> None:
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
    inventory = three()
    assert inventory.host("b") == inventory.host("10.0.0.2")
    with pytest.raises(NotFound, match="it has a, b, c"):
        inventory.host("d")


@pytest.mark.parametrize("value", ["a;reboot", "$(reboot)", "a\nb", "-oProxyCommand=x", "a b", "`id`", "a'b"])
@pytest.mark.parametrize("field", ["address", "name", "user", "jump", "inside", "switch"])
def test_no_value_of_a_host_can_reach_a_shell_as_more_than_a_word(field: str, value: str) -> None:
    host = {"address": "10.0.0.1", "roles": ["controller", "database"], field: value}
    with pytest.raises(SpecError):
        make({"cluster": "lab", "hosts": [host]}, "here")


@pytest.mark.parametrize("value", ["shared", "/a b", "/a;b", "/$(x)", "/../etc", "/-x", "/"])
def test_a_shared_directory_is_a_plain_path(value: str) -> None:
    host = {"address": "10.0.0.1", "roles": ["controller", "database"]}
    with pytest.raises(SpecError):
        make({"cluster": "lab", "shared": value, "hosts": [host]}, "here")
