"""The facts script and its parser. The script itself runs here, too."""

from __future__ import annotations

import subprocess

import pytest

from shoal.cluster.facts import SCRIPT, gpu_kind, group_gpus, inside_address, read_facts, shape_of_cpus
from shoal.cluster.inventory import Gpus, InventoryHost
from shoal.errors import EngineRefused
from tests.support.fakes.machines import facts_text

HOST = InventoryHost(address="10.0.0.1")


def test_the_script_runs_with_the_shell_of_this_machine_and_ends() -> None:
    done = subprocess.run(["sh", "-s"], input=SCRIPT, capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "end"
    assert {"uid", "hostname", "os", "cpus", "memory_kib", "init"} <= {line.split()[0] for line in lines}
    assert done.stderr == ""


def test_facts_are_parsed_from_the_report() -> None:
    more = (
        "package munge 0.5.15-2 ii",
        "package slurmd 22.05 rc",
        "file /etc/munge/munge.key abc",
        "own cluster lab",
        "own files abc /etc/munge/munge.key",
        "own made folder /var/log/slurm",
        "own made database",
        "firewall ufw",
    )
    fact = read_facts(facts_text("a", "10.0.0.1", *more), HOST)
    assert (fact.hostname, fact.init, fact.hardware.cgroup, fact.own_cluster) == ("a", "systemd", "v2", "lab")
    assert dict(fact.packages) == {"munge": "0.5.15-2"}
    assert fact.is_own("/etc/munge/munge.key")
    assert not fact.is_own("/etc/slurm/slurm.conf")
    assert fact.own_made == {"/var/log/slurm", "database"}
    assert fact.firewalls == ("ufw",)
    assert (fact.hardware.sockets, fact.hardware.cores, fact.hardware.threads, fact.hardware.cpus) == (
        2,
        2,
        2,
        8,
    )
    assert fact.hardware.memory_mib == 63552


def test_facts_say_whether_cgroups_hold_jobs() -> None:
    assert read_facts(facts_text("a", "10.0.0.1", "contained"), HOST).is_contained
    assert not read_facts(facts_text(), HOST).is_contained
    assert read_facts(facts_text(without="cgroup"), HOST).hardware.cgroup == ""


def test_changed_file_is_no_longer_ours() -> None:
    fact = read_facts(
        facts_text("a", "10.0.0.1", "file /etc/slurm/slurm.conf new", "own files old /etc/slurm/slurm.conf"),
        HOST,
    )
    assert not fact.is_own("/etc/slurm/slurm.conf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sudo: a password is required\n", "did not finish its report; its last line: sudo"),
        ("", "its last line: nothing"),
        (facts_text().replace("os debian", "os fedora"), "runs `fedora 12`"),
        (facts_text().replace("uid 0", "uid 1000", 1), "run as uid 1000"),
        (facts_text("$(reboot)"), "has a name or parts that Slurm cannot use"),
        (facts_text("-oProxyCommand=x"), "has a name or parts that Slurm cannot use"),
        (facts_text(without="cpus"), "reported a value that cannot be read: KeyError('cpus')"),
        (
            facts_text().replace("memory_kib 67108864", "memory_kib lots"),
            "reported a value that cannot be read",
        ),
    ],
)
def test_a_machine_that_cannot_be_used_is_refused_with_a_reason(text: str, expected: str) -> None:
    with pytest.raises(EngineRefused) as refused:
        read_facts(text, HOST)
    assert expected in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA L40S", "l40s"),
        ("", ""),
    ],
)
def test_gpu_kind_is_the_name_that_jobs_request(name: str, kind: str) -> None:
    assert gpu_kind(name) == kind


def test_gpus_come_from_the_driver_or_else_from_device_files() -> None:
    devices = ["/dev/nvidia10", "/dev/nvidia2"]
    assert group_gpus([], devices, []) == (Gpus(files=("/dev/nvidia2", "/dev/nvidia10")),)
    told_by_driver = group_gpus([(0, "NVIDIA H200"), (1, "NVIDIA L4"), (2, "NVIDIA H200")], devices, [])
    assert told_by_driver == (
        Gpus(kind="h200", files=("/dev/nvidia0", "/dev/nvidia2")),
        Gpus(kind="l4", files=("/dev/nvidia1",)),
    )
    assert group_gpus([], [], []) == ()


def test_a_gpu_has_the_file_of_its_minor_number_not_of_its_place_on_the_bus() -> None:
    lines = ("minor 3", "minor 1", "gpu 0 Disabled NVIDIA H200", "gpu 1 Disabled NVIDIA L4")
    assert read_facts(facts_text("a", "10.0.0.1", *lines), HOST).hardware.gpus == (
        Gpus(kind="l4", files=("/dev/nvidia1",)),
        Gpus(kind="h200", files=("/dev/nvidia3",)),
    )


@pytest.mark.parametrize(
    ("rows", "usable", "shape"),
    [
        (["0,0", "0,0", "1,1", "1,1"], 4, (2, 1, 2)),
        (["0,0", "1,0"], 2, (1, 2, 1)),
        (["0,0", "1,0", "2,0", "3,0"], 2, (1, 2, 1)),
        ([], 3, (1, 3, 1)),
        (["0,0", "1,0", "2,1"], 3, (1, 3, 1)),
    ],
)
def test_cpus_have_their_shape_or_are_flat(rows: list[str], usable: int, shape: tuple[int, int, int]) -> None:
    assert shape_of_cpus(rows, usable) == shape


def test_inside_address_is_where_our_connection_arrived_by_default() -> None:
    arrived = ["1.2.3.4", "5", "10.0.0.7", "22"]
    assert inside_address(HOST, arrived, ["192.168.0.7"]) == "10.0.0.7"
    assert inside_address(HOST.model_copy(update={"inside": "172.16.0.7"}), arrived, []) == "172.16.0.7"
    assert inside_address(HOST, ["127.0.0.1", "5", "127.0.0.1", "22"], ["192.168.0.7"]) == "192.168.0.7"
    assert inside_address(HOST, [], []) == "10.0.0.1"
