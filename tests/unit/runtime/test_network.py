"""Which interface and which InfiniBand ports ranks of several nodes are told to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runtime.network import Port, addresses, interface_of, own_address, ports, rdma, sockets

LISTED = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("ib0", "10.1.0.4"), ("ib0", "10.2.0.4")]


@pytest.mark.parametrize(
    ("address", "expected"), [("10.2.0.4", "ib0"), ("127.0.0.1", "lo"), ("10.9.9.9", None), (None, None)]
)
def test_interface_is_the_one_that_holds_the_address(address: str | None, expected: str | None) -> None:
    assert interface_of(address, LISTED) == expected


def test_nccl_is_told_the_whole_name_and_nobody_anything_without_one() -> None:
    assert sockets("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert sockets(None) == {}


def test_this_machines_own_addresses_are_found() -> None:
    assert interface_of("127.0.0.1", addresses()) == "lo"
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no.such.host.invalid") is None


def port(device: str, state: str = "ACTIVE", link: str = "InfiniBand", number: int = 1) -> Port:
    return Port(device=device, number=number, state=state, link=link)


@pytest.mark.parametrize(
    ("found", "expected"),
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
def test_nccl_is_told_the_ports_that_are_up(found: list[Port], expected: dict[str, str]) -> None:
    assert rdma(found) == expected


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
    assert ports(str(tmp_path)) == [port("mlx5_0"), port("mlx5_0", "DOWN", "Ethernet", 2)]
    assert ports(str(tmp_path / "nothing")) == []
