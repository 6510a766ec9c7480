"""The local engine's pure parts: pages of logs, simulated nodes, names of GPUs, commands, refusals."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path

import hypothesis
import pynvml
import pytest
from hypothesis import strategies as st

from shoal.clock import SystemClock
from shoal.engines.disk import MAX_LINE, whole_lines
from shoal.engines.local import inventory
from shoal.engines.local.client import FIRST_PORT, NUM_PORTS, free_port
from shoal.engines.local.inventory import SimulatedNodes
from shoal.engines.local.task_specs import supervisor_command, supervisor_environment
from shoal.engines.registry import open_engine
from shoal.errors import SpecError


def paged(log: bytes, limit: int, *, is_final: bool) -> bytes:
    """A whole log read page by page, as a client would."""
    out, offset = b"", 0
    while True:
        data = log[offset : offset + limit + MAX_LINE]
        is_last = offset + len(data) >= len(log)
        page, length = whole_lines(data, limit, is_final=is_final and is_last)
        if not length:
            return out
        assert page.endswith(b"\n")
        out, offset = out + page, offset + length


@hypothesis.given(st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"."))), st.integers(1, 80))
def test_pages_put_together_are_the_log(lines: list[bytes], limit: int) -> None:
    log = b"".join(line + b"\n" for line in lines)
    assert paged(log, limit, is_final=True) == log
    assert paged(log, limit, is_final=False) == log


def test_an_unfinished_last_line_waits_until_the_log_is_over() -> None:
    assert whole_lines(b"one\ntw", 100, is_final=False) == (b"one\n", 4)
    assert whole_lines(b"tw", 100, is_final=False) == (b"", 0)
    assert whole_lines(b"tw", 100, is_final=True) == (b"tw\n", 2)
    assert whole_lines(b"", 100, is_final=True) == (b"", 0)


def test_a_line_longer_than_the_limit_comes_whole() -> None:
    long = b"x" * MAX_LINE + b"\n"
    assert whole_lines(long + b"y\n", 10, is_final=False) == (long, len(long))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("16x8", SimulatedNodes(count=16, gpus_per_node=8)),
        ("16x8xH100", SimulatedNodes(count=16, gpus_per_node=8, gpu_kind="H100")),
        (" 1x0 ", SimulatedNodes(count=1, gpus_per_node=0)),
    ],
)
def test_simulated_nodes_are_read(text: str, expected: SimulatedNodes) -> None:
    assert SimulatedNodes.parse(text) == expected


@pytest.mark.parametrize("text", ["", "16", "x8", "16x", "0x8", "4x65", "99999x1", "4x2x", "4x2x../a"])
def test_impossible_simulated_nodes_are_refused_with_a_command_to_type(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        SimulatedNodes.parse(text)
    assert caught.value.hint == "shoal up --demo 16x8"


def test_simulated_nodes_stand_four_to_a_rack() -> None:
    nodes = SimulatedNodes.parse("16x8").facts()
    assert [node.name for node in nodes[:2]] == ["sim-01", "sim-02"]
    assert len({node.name for node in nodes}) == 16
    racks = [node.labels["rack"] for node in nodes]
    assert all(racks.count(rack) == 4 for rack in racks)
    assert {(n.cpus, n.memory_bytes, len(n.gpus), n.gpus[0].kind) for n in nodes} == {
        (8, 64 << 30, 8, "fake")
    }
    assert all(node.is_simulated for node in nodes)


@pytest.mark.parametrize(
    "product, kind",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-1g.10gb"),
        ("NVIDIA", "NVIDIA"),
        ("", "unknown"),
    ],
)
def test_gpus_have_the_short_names_people_use(product: str, kind: str) -> None:
    assert inventory.gpu_kind(product) == kind


@pytest.mark.parametrize(
    "host, name", [("Box.example.org", "box"), ("", "local"), ("..", "local"), ("sim-01", "local")]
)
def test_a_host_name_that_cannot_name_a_node_is_called_local(host: str, name: str) -> None:
    assert inventory.node_name(host) == name


def test_a_machine_without_the_driver_has_no_gpus_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    gpus, remarks = inventory.find_gpus()
    assert gpus == ()
    assert len(remarks) == 1
    assert "NVML" in remarks[0]


def test_one_broken_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError_GpuIsLost
        return index

    class Memory:
        total = 80 << 30

    for name, fake in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetName": lambda _: b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
        "nvmlDeviceGetMinorNumber": lambda index: 7 - index,
        "nvmlDeviceGetMemoryInfo": lambda _: Memory,
        "nvmlDeviceGetMigMode": lambda _: (0, 0),
    }.items():
        monkeypatch.setattr(pynvml, name, fake)
    gpus, remarks = inventory.find_gpus()
    assert [(gpu.index, gpu.kind, gpu.uuid, gpu.minor) for gpu in gpus] == [
        (0, "H100", "GPU-0", 7),
        (2, "H100", "GPU-2", 5),
    ]
    assert len(remarks) == 1
    assert "GPU 1" in remarks[0]


def test_a_gpu_in_mig_mode_is_listed_as_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total = 10 << 30

    def cut(_: str, number: int) -> str:
        if number == 1:
            raise pynvml.NVMLError_NotFound
        return f"slice-{number}"

    for name, fake in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda _: "whole",
        "nvmlDeviceGetMigMode": lambda _: (1, 1),
        "nvmlDeviceGetMaxMigDeviceCount": lambda _: 3,
        "nvmlDeviceGetMigDeviceHandleByIndex": cut,
        "nvmlDeviceGetName": lambda _: "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "nvmlDeviceGetUUID": lambda handle: f"MIG-{handle}",
        "nvmlDeviceGetMinorNumber": lambda _: 4,
        "nvmlDeviceGetMemoryInfo": lambda _: Memory,
    }.items():
        monkeypatch.setattr(pynvml, name, fake)
    gpus, remarks = inventory.find_gpus()
    assert remarks == ()
    assert [(gpu.index, gpu.kind, gpu.uuid, gpu.minor) for gpu in gpus] == [
        (100, "H100-1g.10gb", "MIG-slice-0", 4),
        (102, "H100-1g.10gb", "MIG-slice-2", 4),
    ]


def test_a_supervisor_gets_nothing_of_our_environment_that_it_does_not_need() -> None:
    ours = {"PATH": "/bin", "SHOAL_TOKEN": "shl_x", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/evil"}
    passed = supervisor_environment(ours, "/home/server.json")
    assert set(passed) == {"PATH", "PYTHONPATH", "SHOAL_SERVER_FILE", "SHOAL_PATH"}
    assert "/evil" not in passed["PYTHONPATH"]
    assert supervisor_command("/d")[0] == sys.executable
    assert supervisor_command("/d")[-3:] == ["-m", "shoal.runtime.supervisor", "/d"]


def test_a_port_is_neither_promised_nor_in_use() -> None:
    with socket.socket() as busy:
        first = free_port("127.0.0.1", (), 7)
        busy.bind(("127.0.0.1", first))
        second = free_port("127.0.0.1", (), 7)
        third = free_port("127.0.0.1", {second}, 7)
    assert len({first, second, third}) == 3


def test_running_out_of_ports_is_an_os_error() -> None:
    with pytest.raises(OSError) as caught:
        free_port("127.0.0.1", range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 0)
    assert caught.value.errno == errno.EADDRINUSE


def test_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'kubernetes'.* local"):
        open_engine("kubernetes", home=tmp_path, clock=SystemClock(), server_file=tmp_path / "s")
    local = open_engine("local", home=tmp_path, clock=SystemClock(), server_file=tmp_path / "s", demo="2x1")
    assert local.name == "local"
