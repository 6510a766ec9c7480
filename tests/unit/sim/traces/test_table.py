"""Traces as CSV: Philly's and ITP's columns, Shoal's own, and tar files of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from shoal.sim.traces.table import ITP, PHILLY, SHOAL, Columns, read_table
from shoal.sim.traces.trace import TraceError, TraceJob


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_phillys_columns_become_a_job(tmp_path: Path) -> None:
    path = written(
        tmp_path / "philly.csv",
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n",
    )
    assert list(read_table(path, PHILLY)) == [
        TraceJob(job_id="2", submitted_at=1507532515, run_s=66, num_gpus=1, project="11cb48")
    ]


def test_each_table_of_a_tar_file_is_a_project(tmp_path: Path) -> None:
    path = tmp_path / "itp.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("cluster02.csv", "cluster01.csv", "LICENSE"):
            data = f"job_id,submission_time,duration,num_gpu\n{name[:9]}-a,7,604,16\n".encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    jobs = list(read_table(path, ITP))
    assert [(job.project, job.job_id) for job in jobs] == [
        ("cluster01", "cluster01-a"),
        ("cluster02", "cluster02-a"),
    ]
    assert (jobs[0].submitted_at, jobs[0].run_s, jobs[0].num_gpus) == (7, 604, 16)


def test_shoals_own_columns_may_be_in_any_order_and_missing(tmp_path: Path) -> None:
    path = written(
        tmp_path / "own.csv",
        "run_s,submitted_at,num_nodes,num_gpus,memory_bytes,user,limit_s\n60.5,0,2,16,1024,ana,3600\n1,5,,,,,\n",
    )
    first, second = read_table(path)
    assert first == TraceJob(
        job_id="2",
        submitted_at=0,
        run_s=60.5,
        num_nodes=2,
        num_gpus=16,
        memory_bytes=1024,
        user="ana",
        limit_s=3600,
    )
    assert (second.limit_s, second.num_nodes, second.user) == (None, None, None)


def test_every_field_of_a_job_has_a_column_of_its_own_name() -> None:
    assert set(Columns.__struct_fields__) == set(TraceJob.__struct_fields__)
    assert SHOAL.memory_bytes == "memory_bytes"


@pytest.mark.parametrize(
    "cells, complaint",
    [
        ("5,-1,1", "`run_s` cannot be `-1`"),
        ("5,nan,1", "`run_s` cannot be `nan`"),
        ("yesterday,1,1", "`submitted_at` cannot be `yesterday`"),
        ("5,1,1.5", "`num_processors` cannot be `1.5`"),
        ("5,,1", "no `run_s`"),
        ("5", "1 cells"),
    ],
)
def test_a_malformed_cell_is_named_with_file_line_and_value(
    tmp_path: Path, cells: str, complaint: str
) -> None:
    path = written(tmp_path / "bad.csv", f"submitted_at,run_s,num_processors\n1,1,1\n{cells}\n")
    with pytest.raises(TraceError) as caught:
        list(read_table(path))
    assert f"{path}:3: " in caught.value.message
    assert complaint in caught.value.message


def test_a_table_without_a_needed_column_says_which_it_has(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.csv", "when,run_s\n1,1\n")
    with pytest.raises(TraceError, match=r"no column `submitted_at`; there are when, run_s"):
        list(read_table(path))
