"""Traces as workloads: the format by its content, the cluster by its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.sim.cluster_shapes import ClusterShape, nodes_of, parse_shape
from shoal.sim.from_trace import read_workload, workload_of
from shoal.sim.traces.trace import TraceError
from shoal.sim.workload import CountedDevice
from tests.support.sim_jobs import trace_job

SWF_LINE = "1 0 5 60 4 -1 -1 4 30 -1 1 7 1 -1 -1 -1 -1 -1\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_a_log_in_swf_says_itself_how_many_processors_there_were(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, f"; MaxProcs: 100\n{SWF_LINE}"))
    assert (workload.device, workload.capacity) == (CountedDevice.CPU, 100)
    (one,) = workload.jobs
    assert (one.request.cpus, one.user) == (4, "7")


def test_a_limit_below_the_run_time_is_raised_to_it(tmp_path: Path) -> None:
    assert read_workload(written(tmp_path, SWF_LINE), ClusterShape(8)).jobs[0].request.time_limit_s == 60


def test_a_table_is_recognised_by_its_columns(tmp_path: Path) -> None:
    itp = written(tmp_path, "job_id,submission_time,duration,num_gpu\nx,7,60,4\n")
    workload = read_workload(itp, ClusterShape(2, 8))
    assert (workload.device, workload.capacity) == (CountedDevice.GPU, 16)
    assert workload.jobs[0].request.gpus is not None
    assert workload.jobs[0].request.gpus.count == 4
    table = written(tmp_path, "submitted_at,run_s,num_gpus,project,limit_s\n9,5,1,vision,\n3,5,1,nlp,10\n")
    assert [one.project for one in read_workload(table, ClusterShape(1, 8)).jobs] == ["nlp", "vision"]


def test_a_file_that_is_no_trace_is_refused_with_its_first_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it begins `hello there`"):
        read_workload(written(tmp_path, "hello there\n"))


def test_a_trace_without_a_machine_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the size of the cluster") as refused:
        read_workload(written(tmp_path, "submitted_at,run_s,num_gpus\n0,1,1\n"))
    assert refused.value.hint == "--nodes 160x8"


def test_a_job_of_more_gpus_than_a_node_has_asks_for_the_fewest_nodes() -> None:
    workload = workload_of([trace_job(0, 1, gpus=16), trace_job(0, 1, gpus=12)], nodes_of(ClusterShape(4, 8)))
    requests = [(one.request.min_nodes, one.request.gpus and one.request.gpus.count) for one in workload.jobs]
    assert requests == [(2, 8), (2, 6)]


@pytest.mark.parametrize(
    ("text", "shape"),
    [("8xH100:8", ClusterShape(8, 8, "H100")), ("160x8", ClusterShape(160, 8)), ("240", ClusterShape(240))],
)
def test_a_cluster_reads_as_it_is_written(text: str, shape: ClusterShape) -> None:
    assert parse_shape(text, "--nodes") == shape
    assert str(shape) == text


@pytest.mark.parametrize("text", ["", "x8", "8x", "0x8", "8xH100", "8*8"])
def test_a_cluster_that_cannot_be_read_says_how_it_is_written(text: str) -> None:
    with pytest.raises(SpecError, match="a cluster is NODESxKIND:GPUS"):
        parse_shape(text, "--add")
