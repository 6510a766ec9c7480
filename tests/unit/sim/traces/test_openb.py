"""Alibaba's lists of nodes and pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.sim.traces.openb import GpuNode, Pod, read_nodes, read_pods
from shoal.sim.traces.trace import TraceError

NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


def test_nodes_come_in_order_of_name(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text(f"{NODES}node-2,32000,1024,0,\nnode-1,64000,2048,2,P100\n")
    assert read_nodes(path) == [
        GpuNode(name="node-1", cpu_milli=64000, memory_mib=2048, num_gpus=2, model="P100"),
        GpuNode(name="node-2", cpu_milli=32000, memory_mib=1024, num_gpus=0),
    ]


def test_a_pod_asks_for_a_part_of_a_gpu_or_for_whole_ones_of_some_models(tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(f"{PODS}a,6000,12288,1,460,\nb,8000,1024,2,1000,V100M16|V100M32\nc,1000,64,0,0,\n")
    shared, whole, none = read_pods(path)
    assert shared == Pod(name="a", cpu_milli=6000, memory_mib=12288, num_gpus=1, gpu_milli=460)
    assert (whole.models, whole.total_gpu_milli) == (("V100M16", "V100M32"), 2000)
    assert none.total_gpu_milli == 0


def test_a_list_without_models_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,1000\n")
    assert read_pods(path)[0].models == ()


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("a,many,1,0,0,", "`cpu_milli` cannot be `many`"),
        ("a,1,1,1,1500,", "`gpu_milli` is 1500"),
        ("a,1,1,2,500,", "only a single GPU can be shared"),
        ("a,1,1", "3 cells, the header has 6"),
        (",1,1,0,0,", "`name` is empty"),
    ],
)
def test_a_malformed_pod_is_named_with_file_line_and_value(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(f"{PODS}ok,1,1,0,0,\n{line}\n")
    with pytest.raises(TraceError) as caught:
        read_pods(path)
    assert caught.value.message.startswith(f"{path}:3: ")
    assert complaint in caught.value.message


def test_a_list_without_a_column_says_which(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,gpu\nx,1\n")
    with pytest.raises(TraceError, match="no column `cpu_milli`"):
        read_nodes(path)
