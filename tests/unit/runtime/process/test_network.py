"""Which interface and which InfiniBand ports ranks of several nodes should use."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runtime.process.network import (
    RdmaPort,
    interface_addresses,
    interface_of,
    interface_variables,
    own_address,
    rdma_ports,
    rdma_variables,
)

LISTED = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("ib0", "10.1.0.4"), ("ib0", "10.2.0.4")]


@pytest.mark.parametrize(
    ("address", "expected"), [("10.2.0.4", "ib0"), ("127.0.0.1", "lo"), ("10.9.9.9", None), (None, None)]
)
def test_interface_is_the_one_that_holds_the_address(address: str | None, expected: str | None) -> None:
    assert interface_of(address, LISTED) == expected


def test_nccl_gets_the_exact_interface_name_or_no_variable() -> None:
    assert interface_variables("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert interface_variables(None) == {}


def test_own_addresses_of_this_machine_are_found() -> None:
    assert interface_of("127.0.0.1", interface_addresses()) == "lo"
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no.such.host.invalid") is None


def port(device: str, state: str = "ACTIVE", link: str = "InfiniBand", number: int = 1) -> RdmaPort:
    return RdmaPort(device=device, number=number, state=state, link=link)


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([], {"NCCL_IB_DISABLE": "1"}),
        ([port("mlx5_1"), port("mlx5_0")], {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}),
        ([port("mlx5_0"), port("mlx5_1", "DOWN")], {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ([port("mlx5_0"), port("mlx5_9", link="Ethernet")], {"NCCL_IB_HCA": "=mlx5_0:1"}),
        ([port("mlx5_0", "DOWN"), port("mlx5_9", link="Ethernet")], {"NCCL_IB_HCA": "=mlx5_9:1"}),
        ([port("mlx5_0", "DOWN")], {"NCCL_IB_DISABLE": "1"}),
        ([port("rdmap0s6", link="Unspecified")], {}),
    ],
    ids=["none", "two", "one down", "storage beside it", "RoCE", "all down", "EFA"],
)
def test_nccl_gets_the_ports_that_are_up(ports: list[RdmaPort], expected: dict[str, str]) -> None:
    assert rdma_variables(ports) == expected


def test_ports_are_read_as_the_kernel_describes_them(tmp_path: Path) -> None:
    for device, number, state, link in [
        ("mlx5_0", "1", "4: ACTIVE\n", "InfiniBand\n"),
        ("mlx5_0", "2", "1: DOWN\n", "Ethernet\n"),
    ]:
        place = tmp_path / device / "ports" / number
        place.mkdir(parents=True)
        (place / "state").write_text(state)
        (place / "link_layer").write_text(link)
    (tmp_path / "half_made").mkdir()
    assert rdma_ports(str(tmp_path)) == [port("mlx5_0"), port("mlx5_0", "DOWN", "Ethernet", 2)]
    assert rdma_ports(str(tmp_path / "nothing")) == []
