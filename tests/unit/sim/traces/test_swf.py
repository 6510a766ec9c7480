"""The Standard Workload Format, from a log of a few lines."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from shoal.sim.traces.swf import MissingLimit, Size, SwfRules, read_header, read_swf
from shoal.sim.traces.trace import TraceError, TraceJob

LOG = """\
; Version: 2.2
; Computer: Toy
; MaxProcs: 64
; Queue:  1  short
; Queue:  2  long
;
    1   10    5  100    8   -1   -1    8   300    -1  1   7   3   2  1 -1 -1 -1
    2   20   -1   50   -1   -1   -1   16    40    -1  1   8  -1  -1  2 -1 -1 -1

    3   30    0    0    4   -1   -1    4    60    -1  5   8   3  -1  2 -1 -1 -1
    4   40    0   12    4   -1   -1    6    -1    -1  1   7   3  -1  2 -1 -1 -1
    5   50    0    1   -1   -1   -1   -1    -1    -1  1   7   3  -1  2 -1 -1 -1
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "toy.swf"
    path.write_text(LOG)
    return path


def by_id(path: Path, rules: SwfRules | None = None) -> dict[str, TraceJob]:
    return {job.job_id: job for job in read_swf(path, rules)}


def test_a_job_has_every_fact_of_its_line(log: Path) -> None:
    assert by_id(log)["1"] == TraceJob(
        job_id="1",
        submitted_at=10,
        run_s=100,
        limit_s=300,
        num_processors=8,
        user="7",
        group="3",
        name="2",
        queue="1",
    )


def test_minus_one_is_not_known(log: Path) -> None:
    job = by_id(log)["2"]
    assert (job.group, job.name) == (None, None)
    assert job.num_processors == 16  # none was allocated, so the requested number counts


def test_facts_of_the_header_are_kept_and_repeated_ones_joined(log: Path) -> None:
    header = read_header(log)
    assert header["MaxProcs"] == "64"
    assert header["Queue"] == "1  short\n2  long"


def test_a_gzipped_log_reads_like_a_plain_one(log: Path, tmp_path: Path) -> None:
    packed = tmp_path / "whatever-its-name"
    packed.write_bytes(gzip.compress(LOG.encode()))
    assert list(read_swf(packed)) == list(read_swf(log))


def test_what_is_dropped_is_counted_by_reason(log: Path) -> None:
    dropped: Counter[str] = Counter()
    assert [job.job_id for job in read_swf(log, dropped=dropped)] == ["1", "2", "4"]
    assert dropped == {"no run time": 1, "no processors": 1}


def test_rules_can_keep_what_is_dropped_otherwise(log: Path) -> None:
    jobs = by_id(log, SwfRules(is_empty_run_dropped=False, is_sizeless_dropped=False))
    assert jobs["3"].run_s == 0
    assert jobs["5"].num_processors == 1


@pytest.mark.parametrize("size, expected", [(Size.ALLOCATED, 4), (Size.LARGEST, 6)])
def test_the_rules_say_which_processors_count(log: Path, size: Size, expected: int) -> None:
    assert by_id(log, SwfRules(size=size))["4"].num_processors == expected


@pytest.mark.parametrize("missing, expected", [(MissingLimit.NONE, None), (MissingLimit.RUN, 12)])
def test_the_rules_say_what_a_missing_limit_is(
    log: Path, missing: MissingLimit, expected: float | None
) -> None:
    job = by_id(log, SwfRules(missing_limit=missing))["4"]
    assert job.limit_s == expected
    assert job.planned_s == 12


def test_a_limit_below_the_run_time_is_raised_only_if_the_rules_say_so(log: Path) -> None:
    assert by_id(log)["2"].limit_s == 40
    assert by_id(log, SwfRules(is_limit_raised_to_run=True))["2"].limit_s == 50


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("6 60 0 twelve 4 -1 -1 4 60 -1 1 7 3 -1 2 -1 -1 -1", "'twelve'"),
        ("6 60 0 12 4", "5 columns, a job has 18"),
    ],
)
def test_a_malformed_line_is_named_with_its_value(log: Path, line: str, complaint: str) -> None:
    log.write_text(f"{LOG}{line}\n")
    with pytest.raises(TraceError) as caught:
        list(read_swf(log))
    assert f"{log}:13: " in caught.value.message
    assert complaint in caught.value.message


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace at"):
        list(read_swf(tmp_path / "none.swf"))


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.swf.gz"
    path.write_bytes(gzip.compress(LOG.encode())[:-20])
    with pytest.raises(TraceError, match="damaged gzip"):
        list(read_swf(path))
